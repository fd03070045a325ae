"""`card eval compare`: runs and evaluations in one table, and their curves."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from card_megatron.config.errors import ConfigError

if TYPE_CHECKING:
    from card_megatron.evaluation.compare import Comparison

DESCRIPTION = """One table of several models: run directories (last training loss, validation, what `card eval watch`
wrote) and JSON files of `card eval` (tasks, perplexity, generation), or folders of them. The best of each column is
bold. LABEL=PATH names a row; entries of one name, or of one checkpoint, share a row. With --output also JSON, and
curves of run directories: each metric against tokens (curve_*.png), and what is measured on held-out data against
epochs (epochs_*.png), with the best point of each run marked."""


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="card eval compare", description=DESCRIPTION)
    parser.add_argument("entries", nargs="+", metavar="[LABEL=]RUN_OR_JSON", help="run directory, JSON, folder of JSON")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="write comparison.md, comparison.json and curves there"
    )
    parser.add_argument(
        "--metrics",
        nargs="+",
        help="curves to draw, such as loss or validation/NAME/clean_nll (default: the usual ones)",
    )
    parser.add_argument(
        "--plot", action=argparse.BooleanOptionalAction, default=True, help="draw curves (default: yes)"
    )
    options = parser.parse_args(list(arguments))
    from card_megatron.evaluation.compare import Comparison

    comparison = Comparison()
    for entry in options.entries:
        comparison.add(entry)
    table = comparison.table()
    print(table, end="")
    if options.output is not None:
        write(comparison, table, options)
    elif options.metrics:
        raise ConfigError("--metrics chooses curves, which need a place: --output DIR")


def write(comparison: Comparison, table: str, options: argparse.Namespace) -> None:
    from card_megatron.evaluation.report import refuse_no_matplotlib, write_json, write_text

    folder = options.output
    notes: list[str] = []
    record = comparison.record()
    if comparison.runs and options.plot:
        refuse_no_matplotlib()
        record["epochs"], notes = draw(comparison, folder, options.metrics)
    write_json(folder / "comparison.json", {**record, "notes": notes})
    write_text(folder / "comparison.md", table + "".join(f"\n{note}\n" for note in notes))
    for note in notes:
        print(note)
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def draw(
    comparison: Comparison, folder: Path, metrics: list[str] | None
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """All pictures; the best epoch of every run, and what could not be drawn."""
    from card_megatron.evaluation import curves

    runs = list(comparison.runs.values())
    curves.refuse_unknown(runs, metrics or [])
    best: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    with_epochs = {}
    for label, one in comparison.runs.items():
        try:
            one.epoch_tokens()
            with_epochs[label] = one
        except ConfigError as error:
            notes.append(f"no epochs: {error}")
    for metric in metrics or curves.default_metrics(runs):
        curves.draw_by_tokens(folder / curves.file_name("curve", metric), comparison.runs, metric)
        if "/" in metric and any(metric in one.series for one in with_epochs.values()):
            found = curves.draw_by_epochs(folder / curves.file_name("epochs", metric), with_epochs, metric)
            best[metric] = {label: {"epoch": epoch, "value": value} for label, (epoch, value) in found.items()}
    return best, notes
