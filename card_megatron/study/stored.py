"""Reads the records of runs back, and refuses what is none, or is of something else: a report must not guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.config.schema import RunConfig
from card_megatron.study.definition import Study, StudyRun, config_hash

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


FIELDS: dict[str, type | tuple[type, ...]] = {
    **{"run": str, "seed": int, "config_hash": str, "steps": int, "tokens": int, "hours": (int, float)},
    **{"evaluations": dict, "cells": dict, "curves": dict},
}


def read_record(path: Path) -> dict[str, Any]:
    """Refuses what is none, or was damaged by hand: a report must not guess."""
    try:
        record = json.loads(path.read_text("utf-8"))
        if record["kind"] != KIND:
            raise ValueError("no study_run")
        for name, kind in FIELDS.items():
            if not isinstance(record[name], kind) or isinstance(record[name], bool):
                raise TypeError(name)
        for name in ("commit", "machine"):
            record.setdefault(name, None)
        for name, cell in record["cells"].items():
            if not (cell["value"] is None or isinstance(cell["value"], (int, float))):
                raise TypeError(f"cells: {name}")
        for name, curve in record["curves"].items():
            lengths = {len(curve[part]) for part in ("tokens", "epochs", "values") if curve[part] is not None}
            if len(lengths) != 1:
                raise ValueError(f"curves: {name}")
        for name, evaluation in record["evaluations"].items():
            # the first records did not say which cells an evaluation gave; they had one of a kind
            evaluation.setdefault("cells", [cell for cell in record["cells"] if given_by(name, cell)])
            if not set(evaluation["cells"]) <= set(record["cells"]):
                raise ValueError(f"evaluations: {name}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no record of a study's run ({error}); move it away") from error
    return record


def given_by(evaluation: str, cell: str) -> bool:
    return {
        "perplexity": cell.endswith((" token ppl", " word ppl", " byte ppl")),
        "denoising": " nll behind " in cell,
        "generation": " · " in cell,
    }.get(evaluation, False)
