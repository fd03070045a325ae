"""Reads a study's file, and refuses one that could not be run or reported."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from card_megatron.config.errors import ConfigError
from card_megatron.config.keys import suggestion
from card_megatron.config.load import StrictLoader
from card_megatron.study.definition import Study

NAME = r"[A-Za-z0-9][A-Za-z0-9_.]*"
EVALUATIONS = ("perplexity", "denoising", "generation")
"""Kinds of `card eval` that a study may ask for; tasks have no word of their own and begin with --tasks."""
OWN = ("run_dir", "seed")
"""Fields of a run that the grid decides."""
KINDS: dict[type, tuple[str, ...]] = {
    list: ("seeds", "also_against"),
    bool: ("epochs", "pooled"),
    str: ("baseline", "title", "config", "folder", "results"),
}
EXAMPLES = {list: "a list, as [1, 2]", bool: "true or false", str: "text (in quotes where YAML takes it for more)"}
MAPPINGS = ("runs", "every", "evaluate", "columns", "curves", "points")
"""What the fields of a study's file must be."""


def read_study(path: Path) -> Study:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise ConfigError(f"{path} {what}; name a study's YAML file: examples/study has some to begin with")
    try:
        tree = yaml.load(path.read_text("utf-8"), StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must be a mapping with title, config and runs; it is a {type(tree).__name__}")
    known = [item.name for item in fields(Study) if item.name != "path"]
    for key in tree:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key}{suggestion(str(key), known)}; a study has {', '.join(known)}")
    for key in ("title", "config", "runs"):
        if tree.get(key) in (None, "", {}):
            raise ConfigError(f"{path} has no {key}; a study needs title, config and runs")
    for key in MAPPINGS:
        if key in tree:
            refuse_no_mapping(path, key, tree[key])
    tree["runs"] = {name: {} if given is None else given for name, given in tree["runs"].items()}
    study = Study(path, **tree)
    problems = [*problems_of_kind(study)] or [*problems_of(study)]
    if problems:
        raise ConfigError("\n  - ".join([f"{path} cannot be run:", *problems]))
    return study


def refuse_no_mapping(path: Path, key: str, value: Any) -> None:
    if value is None:
        raise ConfigError(f"{path}: {key} is empty; give it names, or leave it out")
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {key} must be a mapping of names; it is a {type(value).__name__}")
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(f"{path}: {key}: {name!r} is no name; YAML reads it as a {type(name).__name__}: quote it")


def problems_of_kind(study: Study) -> Iterator[str]:
    for kind, keys in KINDS.items():
        for key in keys:
            if not isinstance(getattr(study, key), kind):
                yield f"{key}={getattr(study, key)!r} must be {EXAMPLES[kind]}"


def problems_of(study: Study) -> Iterator[str]:
    if not (study.path.parent / study.config).is_file():
        yield f"config={study.config} is not beside it"
    whole = all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in study.seeds)
    if not study.seeds or not whole or len(set(study.seeds)) < len(study.seeds):
        yield f"seeds={study.seeds} must be different whole numbers, at least one"
    for name, given in [*study.runs.items(), ("every", study.every)]:
        if not re.fullmatch(NAME, name):
            yield f"runs: {name!r} is no name for a folder: letters, digits, _ and ."
        if not isinstance(given, dict):
            yield f"runs: {name} must be {{section.key: value}}; it is {given!r}"
        elif any(value is given for value in given.values()):
            yield f"runs: {name} holds itself"
        elif nested := [key for key, value in given.items() if isinstance(value, dict) and "." not in str(key)]:
            inner = next(iter(given[nested[0]]), "key")
            yield f"runs: {name}: {nested[0]} is a section; write its fields with dots, as {nested[0]}.{inner}"
        elif set(given) & set(OWN):
            yield f"runs: {name} gives {', '.join(sorted(set(given) & set(OWN)))}, which the study decides"
    for name, other in itertools.combinations(study.runs, 2):
        if name.lower() == other.lower():
            yield f"runs: {name} and {other} are one file where case does not count; rename one"
    for key, names in (("baseline", [study.baseline] if study.baseline else []), ("also_against", study.also_against)):
        for name in names:
            if name not in study.runs:
                yield f"{key}={name} is no run; there are {', '.join(study.runs)}"
    if len(set(study.baselines)) < len(study.baselines):
        yield f"also_against={study.also_against} names a run twice, or the baseline {study.compared_with}"
    for name, words in study.evaluate.items():
        if not re.fullmatch(NAME, name) or first_word(words) not in (*EVALUATIONS, "--tasks"):
            yield f"evaluate: {name}: {words!r} must begin with {', '.join(EVALUATIONS)} or --tasks, and be whole"
    yield from problems_of_report(study)


def first_word(words: Any) -> str | None:
    try:
        return shlex.split(words)[0] if isinstance(words, str) else None
    except (ValueError, IndexError):  # an open quotation mark; nothing
        return None


def problems_of_report(study: Study) -> Iterator[str]:
    for heading, metric in study.columns.items():
        if not isinstance(metric, str):
            yield f"columns: {heading}: {metric!r} is no metric"
    for key, pictures in (("curves", study.curves), ("points", study.points)):
        for name, metrics in pictures.items():
            names = isinstance(metrics, list) and all(isinstance(metric, str) for metric in metrics)
            if not names or not metrics or (key == "points" and len(metrics) != 2):
                yield f"{key}: {name}: {metrics!r} must be a list of {'two metrics' if key == 'points' else 'metrics'}"
    files = {name: study.picture_file(name) for name in (*study.curves, *study.points)}
    for name, file in files.items():
        if [*files.values()].count(file) > 1 or (name in study.curves and name in study.points):
            yield f"curves, points: {name!r} has the file {file}, and another has it too: rename one"
