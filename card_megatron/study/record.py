"""What is kept of a finished run: one JSON file, small enough to commit, without a path of the machine."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.evaluation.compare import Cell, Comparison, run_cells
from card_megatron.evaluation.report import write_json
from card_megatron.evaluation.runs import Run, read_run
from card_megatron.study.definition import Study, StudyRun, config_hash, data_identity
from card_megatron.study.stored import KIND, read_record
from card_megatron.version import __version__

ORIGIN = "origin.json"
"""In a run directory: the commit and the machine that a study began it with."""
POINTS = 100
"""Of a training curve: each is a mean over as many steps."""
WINDOW = 50
"""Steps over which gradient norms are compared with each other: in so few the run itself changes little."""
DRAFTS = ("accept_length", "passes_per_token")


def evaluation_path(run: StudyRun, name: str, words: Sequence[str]) -> Path:
    """What an evaluation writes: a file, or of generated text a folder. Other words, another name: none is mistaken."""
    digest = hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]
    return run.run_dir / "study" / (f"{name}-{digest}" + ("" if words[0] == "generation" else ".json"))


def is_evaluated(run: StudyRun, path: Path, words: Sequence[str]) -> bool:
    """Its output is there, whole, and of the last checkpoint; of perplexities it may be a part: its command goes on."""
    if words[0] == "perplexity" or not (path / "generation.json" if words[0] == "generation" else path).is_file():
        return False
    return steps_of(run, path) <= {None, read_run(run.run_dir).last_step}


def steps_of(run: StudyRun, path: Path) -> set[int | None]:
    """The checkpoints of a run that an evaluation looked at; refuses one that looked at another model."""
    read = Comparison()
    read.add(str(path))
    for row in read.rows:
        if row.source[0] != run.run_dir.resolve():
            raise ConfigError(
                f"{path} is of {row.source[0]}, and not of {run.run_dir}: an evaluation of a study is given no model"
            )
    return {row.source[1] for row in read.rows}


def cells_of(run: StudyRun, path: Path) -> dict[str, Cell]:
    read = Comparison()
    read.add(str(path))
    return {
        f"{name} · {more}" if (more := row.source[2]) else name: cell
        for row in read.rows
        for name, cell in row.cells.items()
    }


def note_origin(run: StudyRun) -> None:
    """Before a run begins: what it is begun with. A run that goes on keeps what it has."""
    path = run.run_dir / ORIGIN
    if not path.is_file():
        write_json(path, origin())


def origin() -> dict[str, Any]:
    return {"version": __version__, "commit": commit(), "machine": machine()}


def commit() -> str | None:
    """Of the checkout that this package stands in, `+` where it has changes; None where it is installed."""
    here = Path(__file__).parents[2]

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=10", "HEAD")
    return head and head + ("+" if git("status", "--porcelain", "--untracked-files=no", "--", "card_megatron") else "")


def machine() -> str:
    return f"{os.cpu_count()} cores, {processor()}, Python {platform.python_version()}"


def processor() -> str:
    """Its name where the kernel tells, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def collect(study: Study, run: StudyRun) -> dict[str, Any]:
    """The record of a finished run, from its directory and the evaluations of this study and of others."""
    found = read_run(run.run_dir)
    refuse_other_configuration(run, found)
    cells = as_json(run_cells(found)) | draft_cells(found) | gradient_cells(found)
    evaluations = kept_evaluations(study, run)
    for name, words in study.evaluations().items():
        if name not in evaluations:
            path = evaluation_path(run, name, words)
            if not steps_of(run, path) <= {None, found.last_step}:
                raise ConfigError(f"{path} is of another checkpoint than the last one, {found.last_step}; delete it")
            evaluations[name] = {"arguments": words, "cells": as_json(cells_of(run, path))}
    for name, evaluation in evaluations.items():
        twice = sorted(set(cells) & set(evaluation["cells"]))
        if twice:
            raise ConfigError(
                f"evaluation {name} of {run.label} gives {', '.join(twice)}, which stands there already: call its sets "
                "by other names (NAME=PATH)"
            )
        cells |= evaluation["cells"]
    origin_of = run.run_dir / ORIGIN
    unknown = {"version": None, "commit": None, "machine": None}  # begun by `card train` itself
    return {
        "kind": KIND,
        "run": run.name,
        "seed": run.seed,
        "config_hash": config_hash(run.load()),
        "data": data_identity(run.load()),
        "objective": found.config.objective.name,
        "given": run.given,
        "steps": found.last_step,
        "tokens": found.tokens_at([found.last_step])[0],
        "hours": round(training_seconds(run.run_dir) / 3600, 4),
        **(json.loads(origin_of.read_text("utf-8")) if origin_of.is_file() else unknown),
        "evaluations": {
            name: {"arguments": evaluation["arguments"], "cells": [*evaluation["cells"]]}
            for name, evaluation in evaluations.items()
        },
        "cells": cells,
        "curves": curves(found),
    }


def kept_evaluations(study: Study, run: StudyRun) -> dict[str, dict[str, Any]]:
    """Of the record that this training has already, with their cells: what this study or others asked for before."""
    known, declared = earlier_record(study, run), study.evaluations()
    if known is None:
        return {}
    return {
        name: {
            "arguments": evaluation["arguments"],
            "cells": {cell: known["cells"][cell] for cell in evaluation["cells"]},
        }
        for name, evaluation in known["evaluations"].items()
        if declared.get(name, evaluation["arguments"]) == evaluation["arguments"]
    }


def as_json(cells: dict[str, Cell]) -> dict[str, dict[str, Any]]:
    return {
        name: {"value": cell.value, "stderr": cell.stderr, **({"bound": cell.bound} if cell.bound else {})}
        for name, cell in cells.items()
    }


def earlier_record(study: Study, run: StudyRun) -> dict[str, Any] | None:
    """The record of this very training, so that evaluations of one training never stand beside those of another."""
    path = study.result_path(run)
    if not path.is_file():
        return None
    record = read_record(path)
    return record if record["curves"] == curves(read_run(run.run_dir)) else None


def refuse_other_configuration(run: StudyRun, found: Run) -> None:
    """A folder may hold a run of an earlier version of the study, whose number would stand in a wrong row."""
    wanted = run.load()
    trained = found.config
    if wanted.model.vocab_size is None:  # a run writes down the size that its tokenizer has
        trained = replace(trained, model=replace(trained.model, vocab_size=None))
    declared, there = config_hash(wanted), config_hash(trained)
    if declared != there:
        raise ConfigError(
            f"{run.run_dir} was trained with another configuration ({there}) than the study declares ({declared}); "
            f"`card config {' '.join(run.options())}` beside its config.yaml shows what differs. Move it away, or "
            "declare it as it was"
        )


def training_seconds(run_dir: Path) -> float:
    """Time of the steps alone, over all starts of the run."""
    records = (json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines() if line)
    last, total = 0, 0.0
    for record in records:
        if "step_seconds" in record:
            total += record["step_seconds"] * (record["step"] - last)
            last = record["step"]
    return total


def draft_cells(run: Run) -> dict[str, Any]:
    """What validation measured of drafting, where it did."""
    found = {}
    for name, points in run.series.items():
        of, _, metric = name.removeprefix("validation/").rpartition("/")
        if name.startswith("validation/") and metric in DRAFTS:
            found[f"{of} {metric.replace('_', ' ')}"] = {"value": points[max(points)], "stderr": None}
    return found


def gradient_cells(run: Run) -> dict[str, Any]:
    """How much gradient norms vary from step to step, after the first tenth of the run; where steps are recorded."""
    points = run.series.get("grad_norm", {})
    norms = [points[step] for step in sorted(points) if step > run.last_step / 10]
    if len(norms) < 2 * WINDOW or len(points) < run.last_step:
        return {}
    windows = [norms[start : start + WINDOW] for start in range(0, len(norms) - WINDOW + 1, WINDOW)]
    within = [statistics.stdev(window) / statistics.fmean(window) for window in windows]
    return {
        "grad norm": {"value": statistics.fmean(norms), "stderr": None},
        "grad norm variation": {"value": statistics.fmean(within), "stderr": None},
    }


def curves(run: Run) -> dict[str, Any]:
    """Metric -> its tokens, epochs and values: validation as it is, training in means over stretches of steps."""
    try:
        epoch: float = run.epoch_tokens()
    except ConfigError:  # the data is elsewhere
        epoch = math.nan
    found = {}
    for name, points in run.series.items():
        if name == "loss":
            steps, values = thinned(sorted(points), [points[step] for step in sorted(points)])
        elif name.startswith("validation/"):
            steps, values = sorted(points), [points[step] for step in sorted(points)]
        else:
            continue
        tokens = run.tokens_at(steps)
        found[name] = {
            "tokens": tokens,
            "epochs": [round(count / epoch, 4) for count in tokens] if math.isfinite(epoch) else None,
            "values": [float(f"{value:.6g}") for value in values],
        }
    return found


def thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    size = max(1, math.ceil(len(steps) / POINTS))
    starts = range(0, len(steps), size)
    return [steps[min(start + size, len(steps)) - 1] for start in starts], [
        statistics.fmean(values[start : start + size]) for start in starts
    ]
