"""A study as its YAML file declares it: a grid of runs, how each is evaluated, and what the report shows."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.config.keys import suggestion
from card_megatron.config.load import load_config, options_of
from card_megatron.config.schema import RunConfig
from card_megatron.data.indexed import read_manifest

NAME = r"[A-Za-z0-9][A-Za-z0-9_.]*"
EVALUATIONS = ("perplexity", "denoising", "generation")
"""Kinds of `card eval` that a study may ask for; tasks have no word of their own and begin with --tasks."""
OWN = ("run_dir", "seed")
"""Fields of a run that the grid decides."""
OF_NO_EFFECT = ("run_dir", "checkpoint", "logging", "profile", "guard")
"""Sections of a configuration that change nothing of what a run learns: the hash leaves them out."""

KINDS: dict[type, tuple[str, ...]] = {
    list: ("seeds",),
    dict: ("every", "evaluate", "columns", "curves", "points"),
    bool: ("epochs", "pooled"),
    str: ("baseline", "title", "config", "folder", "results"),
}
"""What the fields of a study's file must be."""


@dataclass(frozen=True)
class StudyRun:
    """One run of the grid."""

    name: str
    seed: int
    config: Path
    run_dir: Path
    given: dict[str, Any]

    @property
    def label(self) -> str:
        return f"{self.name}-s{self.seed}"

    def options(self) -> list[str]:
        """Of `card train`."""
        return [f"--config={self.config}", *options_of(self.given | {"seed": self.seed, "run_dir": str(self.run_dir)})]

    def load(self) -> RunConfig:
        try:
            return load_config(self.options())[0]
        except ConfigError as error:
            raise ConfigError(f"run {self.name}: {error}") from error


@dataclass(frozen=True)
class Study:
    """The fields of STUDY.yaml, and where it stands."""

    path: Path
    title: str
    """Heading of the report."""
    config: str
    """Configuration that every run begins with, beside this file."""
    runs: dict[str, dict[str, Any]]
    """Name -> what is changed in it, as {section.key: value}. Studies of one folder share runs of one name."""
    every: dict[str, Any] = field(default_factory=dict)
    """What is changed in every run, as in `runs`, which may change it again."""
    seeds: list[int] = field(default_factory=lambda: [1, 2])
    """Every run is trained with each of them; differences are paired by seed."""
    baseline: str = ""
    """The run that others are compared with; none takes the first."""
    folder: str = "runs/study"
    """Run directories, below the folder in which the study is started."""
    results: str = "results"
    """A JSON file for each finished run, beside this file: all that the report is made from."""
    evaluate: dict[str, str] = field(default_factory=dict)
    """Name -> words of `card eval` for a finished run, without the run and --output: 'perplexity --data a=b.jsonl'."""
    columns: dict[str, str] = field(default_factory=dict)
    """Heading -> metric, as `card eval compare` names it; empty shows every metric."""
    curves: dict[str, list[str]] = field(default_factory=dict)
    """Name of a picture -> metrics of metrics.jsonl that are drawn as one, a run's first that it has."""
    points: dict[str, list[str]] = field(default_factory=dict)
    """Name of a picture -> two metrics, across and up: every run, or strategy of its generated text, is a point."""
    pooled: bool = False
    """Differences share one spread, that of all runs: for runs that are variants of one another."""
    epochs: bool = False
    """Curves go by epochs, not by tokens; and the report says where they cross the baseline's."""

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def compared_with(self) -> str:
        return self.baseline or next(iter(self.runs))

    def grid(self, only: Sequence[str] = ()) -> list[StudyRun]:
        """Seed by seed, so that a study that is cut short has whole comparisons."""
        known = [*self.runs, *(f"{name}-s{seed}" for name in self.runs for seed in self.seeds)]
        for wanted in only:
            if wanted not in known:
                raise ConfigError(f"--only {wanted} is no run of {self.path}; it has {', '.join(self.runs)}")
        found = [
            StudyRun(
                *(name, seed, self.path.parent / self.config, Path(self.folder) / f"{name}-s{seed}"),
                {**self.every, **given},
            )
            for seed in self.seeds
            for name, given in self.runs.items()
        ]
        return [run for run in found if not only or run.name in only or run.label in only]

    def result_path(self, run: StudyRun) -> Path:
        return self.path.parent / self.results / f"{run.label}.json"

    def evaluations(self) -> dict[str, list[str]]:
        return {name: shlex.split(words) for name, words in self.evaluate.items()}


def read_study(path: Path) -> Study:
    """A study's file, refused where anything in it could not be run."""
    import yaml

    if not path.is_file():
        raise ConfigError(f"{path} is not there; examples/study has studies to begin with")
    try:
        tree = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must be a mapping with title, config and runs; it is a {type(tree).__name__}")
    known = [item.name for item in fields(Study) if item.name != "path"]
    for key in tree:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key}{suggestion(str(key), known)}; a study has {', '.join(known)}")
    for key in ("title", "config", "runs"):
        if not tree.get(key):
            raise ConfigError(f"{path} has no {key}; a study needs title, config and runs")
    tree["runs"] = {name: given or {} for name, given in _mapping(path, tree, "runs").items()}
    study = Study(path, **tree)
    problems = [*_problems(study)]
    if problems:
        raise ConfigError("\n  - ".join([f"{path} cannot be run:", *problems]))
    return study


def _mapping(path: Path, tree: dict[str, Any], key: str) -> dict[Any, Any]:
    if not isinstance(tree[key], dict):
        raise ConfigError(f"{path}: {key} must be a mapping of names; it is a {type(tree[key]).__name__}")
    return tree[key]


def _problems(study: Study):
    for kind, keys in KINDS.items():
        for key in keys:
            if not isinstance(getattr(study, key), kind):
                yield f"{key}={getattr(study, key)!r} must be a {kind.__name__}"
                return
    if not (study.path.parent / study.config).is_file():
        yield f"config={study.config} is not beside it"
    whole = all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in study.seeds)
    if not study.seeds or not whole or len(set(study.seeds)) < len(study.seeds):
        yield f"seeds={study.seeds} must be different whole numbers, at least one"
    for name, given in {**study.runs, "every": study.every}.items():
        if not re.fullmatch(NAME, str(name)):
            yield f"runs: {name!r} is no name for a folder: letters, digits, _ and ."
        if not isinstance(given, dict):
            yield f"runs: {name} must be {{section.key: value}}; it is {given!r}"
        elif set(given) & set(OWN):
            yield f"runs: {name} gives {', '.join(sorted(set(given) & set(OWN)))}, which the study decides"
    if study.baseline and study.baseline not in study.runs:
        yield f"baseline={study.baseline} is no run; there are {', '.join(study.runs)}"
    for key, pictures in (("curves", study.curves), ("points", study.points)):
        for name, metrics in pictures.items():
            names = isinstance(metrics, list) and all(isinstance(metric, str) for metric in metrics)
            if not names or not metrics or (key == "points" and len(metrics) != 2):
                many = "two metrics" if key == "points" else "metrics"
                yield f"{key}: {name}: {metrics!r} must be a list of {many}"
    for name, words in study.evaluate.items():
        first = shlex.split(words)[:1] if isinstance(words, str) else []
        if not re.fullmatch(NAME, str(name)) or not first or first[0] not in (*EVALUATIONS, "--tasks"):
            yield f"evaluate: {name}: {words!r} must begin with {', '.join(EVALUATIONS)} or --tasks"


def config_hash(config: RunConfig) -> str:
    """Names what a run learns from: every field that bears on it. A path is a name; the data behind it is not read."""
    tree = {name: value for name, value in asdict(config).items() if name not in OF_NO_EFFECT}
    for place in ("num_workers", "path_to_cache"):
        tree["data"].pop(place)
    text = json.dumps(tree, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def data_identity(config: RunConfig) -> dict[str, Any] | None:
    """Of what was built for this run: counts and tokenizer of every source; None where a source says nothing of it.

    A path is a name; this is what stands behind it, so that a study is not continued on other data.
    """
    prefixes = [*config.data.train, *(prefix for part in config.data.validation.values() for prefix in part)]
    found: dict[str, Any] = {}
    for prefix in prefixes:
        manifest = read_manifest(prefix)
        if manifest is None:
            return None
        found[prefix] = {name: manifest[name] for name in ("documents", "tokens")}
        found[prefix]["tokenizer"] = manifest["tokenizer"]["sha256"][:16]
    return found


def shown_option(value: Any) -> str:
    """As YAML has it."""
    return ".inf" if isinstance(value, float) and math.isinf(value) else str(value)
