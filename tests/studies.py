"""Studies and records of runs that were never trained, for tests of what is read and reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from card_megatron.study.definition import Study, config_hash
from card_megatron.study.reading import read_study


def write_study(folder: Path, **changes: Any) -> Path:
    """A study whose base is no more than a preset."""
    (folder / "base.yaml").write_text("preset: tiny\ntrain: {train_iters: 2}\ndata: {train: [a], tokenizer: bytes}\n")
    tree = {
        "title": "A small study",
        "config": "base.yaml",
        "runs": {"arm": {"objective.name": "arm"}, "card": {"objective.name": "card"}},
        **changes,
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in tree.items() if value is not None}))
    return path


def record_of(run: str, seed: int, cells: dict[str, Any], curve: list[float] = (), **more: Any) -> dict[str, Any]:
    curves = {
        "validation/v/clean_nll": {"tokens": [*range(len(curve))], "epochs": [*range(len(curve))], "values": [*curve]}
    }
    return {
        **{"kind": "study_run", "run": run, "seed": seed, "objective": run, "tokens": 100, "steps": 1},
        **{"hours": 0.5, "commit": "abc", "machine": "m", "evaluations": {}, "curves": curves if curve else {}},
        "cells": {name: value if isinstance(value, dict) else {"value": value} for name, value in cells.items()},
        **more,
    }


def study_with(folder: Path, records: list[dict[str, Any]], **changes: Any) -> Study:
    study = read_study(write_study(folder, **changes))
    (folder / "results").mkdir(exist_ok=True)
    for record in records:
        (run,) = study.grid([f"{record['run']}-s{record['seed']}"])
        known = {"config_hash": config_hash(run.load())} | record
        study.result_path(run).write_text(json.dumps(known))
    return study
