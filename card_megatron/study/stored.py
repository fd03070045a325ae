"""Reads the records of runs back, and refuses what is none, or is of something else: a report must not guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.config.schema import RunConfig
from card_megatron.study.definition import Study, StudyRun, config_hash, is_perplexity

KIND = "study_run"


def record_of(study: Study, run: StudyRun, config: RunConfig) -> dict[str, Any]:
    """The record of a run, refused where it is of something else than the study declares now."""
    path = study.result_path(run)
    record = read_record(path)
    if (record["run"], record["seed"]) != (run.name, run.seed):
        raise ConfigError(f"{path} is the record of {record['run']}-s{record['seed']}, not of {run.label}; name it so")
    if record["config_hash"] != config_hash(config):
        raise ConfigError(
            f"{path} is of another configuration ({record['config_hash']}) than {study.path} declares "
            f"({config_hash(config)}); move it away with its run, or declare the run as it was"
        )
    return record


FIELDS: dict[str, type] = {
    **{"run": str, "seed": int, "config_hash": str, "steps": int, "tokens": int},
    **{"evaluations": dict, "cells": dict, "curves": dict},
}
OPTIONAL: dict[str, type] = {"commit": str, "machine": str, "data": dict}
"""May be unknown, or not be there."""


def read_record(path: Path) -> dict[str, Any]:
    """Refuses what is none, or was damaged by hand: a report must not guess."""
    try:
        record = json.loads(path.read_text("utf-8"), parse_constant=refuse_constant)
        if record["kind"] != KIND:
            raise ValueError(f"its kind is {record['kind']!r}, not {KIND!r}")
        check_fields(record)
        for name, known in record["cells"].items():
            check_cell(name, known)
        for name, curve in record["curves"].items():
            check_curve(name, curve)
        for name, evaluation in record["evaluations"].items():
            # the first records did not say which cells an evaluation gave; they had one of a kind
            evaluation.setdefault("cells", [cell for cell in record["cells"] if given_by(name, cell)])
            words = evaluation["arguments"]
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                raise TypeError(f"evaluations: {name}: arguments")
            if not set(evaluation["cells"]) <= set(record["cells"]):
                raise ValueError(f"evaluation {name} names cells that are not there")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no whole record of a study's run: {fault_of(error)}; restore it from where it is "
            "committed, or move it away and run the study once more"
        ) from error
    return record


def fault_of(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]}"
    if isinstance(error, (OSError, ValueError)):
        return str(error)
    return f"{error} is not of its kind"


def refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def check_fields(record: dict[str, Any]) -> None:
    for name, kind in FIELDS.items():
        if not isinstance(record[name], kind) or isinstance(record[name], bool):
            raise TypeError(name)
    for name in ("seed", "steps", "tokens", "hours"):
        if not is_number(record[name]) or record[name] < 0:
            raise ValueError(f"{name}={record[name]!r} must be a number that is not negative")
    for name, kind in OPTIONAL.items():
        if record.setdefault(name, None) is not None and not isinstance(record[name], kind):
            raise TypeError(name)


def check_cell(name: str, known: dict[str, Any]) -> None:
    value = known["value"]
    if not (value is None or is_number(value)) or not isinstance(known.get("bound", ""), str):
        raise TypeError(f"cells: {name}")
    if value is not None and value <= 0 and is_perplexity(name):
        raise ValueError(f"cells: {name}: a perplexity of {value}")


def check_curve(name: str, curve: dict[str, Any]) -> None:
    parts = [curve[part] for part in ("tokens", "epochs", "values") if curve[part] is not None]
    places = [*curve["tokens"], *(curve["epochs"] or ())]
    if len({len(part) for part in parts}) != 1:
        raise ValueError(f"the parts of curve {name} have different lengths")
    if not all(map(is_number, places)) or not all(value is None or is_number(value) for value in curve["values"]):
        raise TypeError(f"curves: {name}")


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def given_by(evaluation: str, cell: str) -> bool:
    return {
        "perplexity": cell.endswith((" token ppl", " word ppl", " byte ppl")),
        "denoising": " nll behind " in cell,
        "generation": " · " in cell,
    }.get(evaluation, False)
