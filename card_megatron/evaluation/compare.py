"""Several runs and evaluations in one table: a row a model, the best of each column in bold."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from card_megatron.checkpoint.folder import step_of
from card_megatron.config.errors import ConfigError
from card_megatron.evaluation.report import NOTHING, markdown_table, masks, shown
from card_megatron.evaluation.runs import Run, is_run, read_run
from card_megatron.objectives import OBJECTIVES

LOWER = ("ppl", "perplexity", "loss", "nll", "repetition", "bits")
BOUNDS = "≤ is a bound: the model may be better than it, so an exact number beside it is best only among exact ones\n"
HIGHER = ("acc", "exact_match", "f1", "bleu", "rouge", "tok/", "distinct", "mcc")


@dataclass(frozen=True)
class Cell:
    """A number with its standard error, where one is known."""

    value: float
    stderr: float | None = None
    bound: str = ""
    """Where it comes from likelihoods that are bounds: which, such as 'ELBO, 8 samples'."""


@dataclass
class Row:
    """What is known of one model."""

    source: tuple[Path | str, int | None, str]
    """(path or the user's own name, step, what else tells it from others): the same thing is one row."""
    cells: dict[str, Cell] = field(default_factory=dict)


def better(column: str) -> int:
    """-1 where lower is better, 1 where higher is, 0 where neither is: by the last word of the name that says it."""
    words = column.lower()
    places = {-1: max(words.rfind(word) for word in LOWER), 1: max(words.rfind(word) for word in HIGHER)}
    direction, place = max(places.items(), key=lambda item: item[1])
    return direction if place >= 0 else 0


class Comparison:
    """Rows and columns in the order in which they came."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.runs: dict[str, Run] = {}
        """Run directories, by the name that their curves have."""

    def add(self, entry: str) -> None:
        """A run directory, an evaluation's JSON, or a folder of such; 'LABEL=PATH' names its row."""
        label, equals, rest = entry.partition("=")
        path = Path(rest if equals and not Path(entry).exists() else entry)
        name = label if equals and not Path(entry).exists() else None
        if is_run(path):
            run = read_run(path)
            self.runs[name or str(path)] = run
            self._take(name, (path.resolve(), run.last_step, ""), run_cells(run))
        elif path.is_dir():
            found = [file for file in sorted(path.glob("*.json")) if is_evaluation(file)]
            if not found:
                raise ConfigError(
                    f"{path} is no run directory (config.yaml, metrics.jsonl) and has no evaluation's JSON"
                )
            for file in found:
                self._add_json(name, file)
        elif path.is_file():
            self._add_json(name, path)
        else:
            raise ConfigError(f"{path} is not there; give run directories and JSON files of `card eval`")

    def _add_json(self, name: str | None, path: Path) -> None:
        try:
            content = json.loads(path.read_text("utf-8"))
            read = READERS[content["kind"]]
            rows = list(read(content))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is no JSON of `card eval` ({type(error).__name__}: {error})") from error
        models = {source[:2] for source, _ in rows}
        for source, cells in rows:
            self._take(name if len(models) == 1 else None, source, cells)

    def _take(self, name: str | None, source: tuple[Path | str, int | None, str], cells: dict[str, Cell]) -> None:
        if name is not None:
            source = (name, None, source[2])
        row = next((row for row in self.rows if row.source == source), None)
        if row is None:
            row = Row(source)
            self.rows.append(row)
        row.cells |= cells

    # ------------------------------------------------------------ as a table

    def labels(self) -> list[str]:
        """Each row's name: the folder's, or the whole path where two folders have the same name."""
        paths = {row.source[0] for row in self.rows}
        found = []
        for row in self.rows:
            path, step, more = row.source
            name = path if isinstance(path, str) else path.name
            if isinstance(path, Path) and sum(isinstance(other, Path) and other.name == name for other in paths) > 1:
                name = str(path)
            found.append(name + (f"@{step}" if step is not None else "") + (f" · {more}" if more else ""))
        return found

    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row.cells))

    def best(self, column: str) -> list[bool]:
        """Which rows are the best of a column; all that look alike in the table, and none where there is one alone."""
        direction = better(column)
        values = [row.cells[column].value if column in row.cells else None for row in self.rows]
        known = [value for value in values if value is not None]
        if not direction or len(known) < 2:
            return [False] * len(values)
        winner = shown_value(column, max(known, key=lambda value: direction * value))
        return [value is not None and shown_value(column, value) == winner for value in values]

    def parts(self) -> list[list[int]]:
        """Rows that have a column in common, directly or through others: strategies are no company for runs."""
        groups: list[tuple[list[int], set[str]]] = []
        for place, row in enumerate(self.rows):
            joined, columns = [place], set(row.cells)
            for group in [group for group in groups if group[1] & columns]:
                groups.remove(group)
                joined, columns = [*group[0], *joined], columns | group[1]
            groups.append((sorted(joined), columns))
        return sorted(places for places, _ in groups)

    def table(self) -> str:
        """One table; where rows have nothing in common, one for each kind."""
        labels = self.labels()
        tables = []
        for places in self.parts():
            columns = [column for column in self.columns() if any(column in self.rows[place].cells for place in places)]
            best = {column: self.best(column) for column in columns}
            rows = [
                [labels[place], *(self._shown(self.rows[place], column, best[column][place]) for column in columns)]
                for place in places
            ]
            header = ["model", *(f"{column} {arrow(column)}".rstrip() for column in columns)]
            tables.append(markdown_table(header, rows))
        if any(cell.bound for row in self.rows for cell in row.cells.values()):
            tables.append(BOUNDS)
        return "\n".join(tables)

    @staticmethod
    def _shown(row: Row, column: str, bold: bool) -> str:
        if column not in row.cells:
            return NOTHING
        cell = row.cells[column]
        text = shown_value(column, cell.value, cell.stderr)
        if cell.bound:
            # a perplexity is at most the bound's; an accuracy is what bounds chose, and not bounded itself
            text = f"{'≤ ' if better(column) < 0 else ''}{text} ({cell.bound})"
        return f"**{text}**" if bold else text

    def record(self) -> dict[str, Any]:
        best = {column: self.best(column) for column in self.columns()}
        return {
            "kind": "comparison",
            "columns": [{"name": column, "better": arrow(column)} for column in self.columns()],
            "rows": [
                {
                    "label": label,
                    "cells": {
                        name: {
                            **{"value": cell.value, "stderr": cell.stderr, "best": best[name][place]},
                            **({"bound": cell.bound} if cell.bound else {}),
                        }
                        for name, cell in row.cells.items()
                    },
                }
                for place, (label, row) in enumerate(zip(self.labels(), self.rows, strict=True))
            ],
        }


def arrow(column: str) -> str:
    return {-1: "↓", 0: "", 1: "↑"}[better(column)]


def shown_value(column: str, value: float, stderr: float | None = None) -> str:
    """Counts whole, shares with 4 decimals, others with 4 digits."""
    if isinstance(value, int):
        return f"{value:,}"
    share = better(column) == 1 and 0 <= value <= 1 and "tok/" not in column
    return shown(value, stderr, digits=4 if share else None)


# ---------------------------------------------------------------- what rows are read from


def run_cells(run: Run) -> dict[str, Cell]:
    """A run's last training loss and validation, and what was evaluated of its last checkpoint."""
    last = {name: (max(points), points[max(points)]) for name, points in run.series.items()}
    bound = "ELBO" if OBJECTIVES[run.config.objective.name].likelihood == "bound" else ""
    found = {"tokens": Cell(run.tokens_at([run.last_step])[0])}
    if "loss" in last:
        # weighted as its objective has it: not to be compared with another's
        found[f"train loss ({run.config.objective.name})"] = Cell(last["loss"][1])
    for name, (step, value) in last.items():
        kind, _, rest = name.partition("/")
        error = run.errors.get(name, {}).get(step)
        if kind == "validation":
            of, _, metric = rest.rpartition("/")
            # exact where there is an exact one; a bound is never called by the name of what it bounds
            how = next((how for how in ("clean_", "bound_") if f"{kind}/{of}/{how}nll" in last), "")
            if metric in (f"{how}nll", f"{how}perplexity"):
                named = metric.replace("clean_", "").replace("bound_", "bound ").replace("perplexity", "ppl")
                found[f"{of} {named}"] = Cell(value, error)
        elif kind == "tasks" and rest:
            found[rest.replace("/", " ")] = Cell(value, error, bound)
        elif kind == "perplexity" and rest:
            of, _, unit = rest.rpartition("/")
            found[f"{of} {unit} ppl"] = Cell(value, error, bound)
    return found


Found = Iterator[tuple[tuple[Path | str, int | None, str], dict[str, Cell]]]


def perplexity_rows(content: dict[str, Any]) -> Found:
    for result in content["results"]:
        how = result["how"]
        bound = "" if how == "exact" else how
        cells = {
            f"{result['set']} {unit} ppl": Cell(value, result[f"{unit}_perplexity_stderr"], bound)
            for unit in ("token", "word", "byte")
            if (value := result[f"{unit}_perplexity"]) is not None
        }
        yield source_of(result["model_path"]), cells


def denoising_rows(content: dict[str, Any]) -> Found:
    for result in content["results"]:
        cells = {
            f"{result['set']} nll behind {masks(depth)}": Cell(value, error)
            for depth, (value, error) in enumerate(zip(result["nll"], result["nll_stderr"], strict=True))
        }
        yield source_of(result["model_path"]), cells


def generation_rows(content: dict[str, Any]) -> Found:
    for result in content["results"]:
        cells = {
            f"Gen PPL ({Path(name).name})": Cell(judge["perplexity"], judge["perplexity_stderr"])
            for name, judge in result["judges"].items()
            if judge["perplexity"] is not None
        }
        named = {"tok/s": "tokens_per_second", "tok/pass": "tokens_per_pass", "repetition-4": "repetition_4"}
        named |= {f"distinct-{n}": f"distinct_{n}" for n in (1, 2, 3)}
        cells |= {column: Cell(result[name]) for column, name in named.items() if result[name] is not None}
        yield source_of(content["model_path"], result["strategy"]), cells


def task_rows(content: dict[str, Any]) -> Found:
    bound = f"ELBO, {content['mc_samples']} samples" if content.get("likelihood") == "bound" else ""
    cells = {
        f"{task} {metric}": Cell(pair["value"], pair["stderr"], bound)
        for task, metrics in content["results"].items()
        for metric, pair in metrics.items()
        if isinstance(pair["value"], (int, float))
    }
    yield source_of(content["checkpoint"]), cells


def checkpoint_rows(content: dict[str, Any]) -> Found:
    """What `card eval watch` writes."""
    for part in ("tasks", "perplexity"):
        if content.get(part):
            for _, cells in READERS[part](content[part]):
                yield source_of(content["checkpoint"]), cells


READERS: dict[str, Callable[[dict[str, Any]], Found]] = {
    "perplexity": perplexity_rows,
    "denoising": denoising_rows,
    "generation": generation_rows,
    "tasks": task_rows,
    "checkpoint": checkpoint_rows,
}


def is_evaluation(path: Path) -> bool:
    try:
        return json.loads(path.read_text("utf-8")).get("kind") in READERS
    except (OSError, ValueError, AttributeError):
        return False


def source_of(model: str, more: str = "") -> tuple[Path | str, int | None, str]:
    """RUN/checkpoints/step_000100 is step 100 of RUN, whose row it joins."""
    path = Path(model).resolve()
    step = step_of(path)
    return (path, None, more) if step is None else (path.parent.parent, step, more)
