"""What an evaluation leaves behind: Markdown tables, JSON and pictures, each file whole or not there."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from card_megatron.config.errors import ConfigError

NOTHING = "—"
"""Stands in a table where there is no number."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name first: a reader, or a run after a crash, sees the old or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.unfinished")
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; choose another --output") from error


def write_json(path: Path, value: Any) -> None:
    write_whole(path, (json.dumps(finite(value), indent=1, ensure_ascii=False) + "\n").encode())


def write_text(path: Path, text: str) -> None:
    write_whole(path, text.encode())


def finite(value: Any) -> Any:
    """The same without nan and inf, which JSON does not have: they become null."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table whose source is readable too; the first `left` columns are words, the others numbers."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if column < left else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return "\n".join([line(cells[0]), line(rule), *(line(row) for row in cells[1:])]) + "\n"


def shown(value: float | None, error: float | None = None, digits: int | None = None) -> str:
    """A number with its standard error: 4 digits of the larger one, or as many decimals as are asked for."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if digits is None:
        size = max(abs(value), abs(error) if error is not None and math.isfinite(error) else 0.0)
        digits = max(0, 3 - math.floor(math.log10(size))) if size and math.isfinite(size) else 2
    text = f"{value:,.{digits}f}"
    return text if error is None or not math.isfinite(error) else f"{text} ± {error:,.{digits}f}"


def masks(count: int) -> str:
    return "1 mask" if count == 1 else f"{count} masks"


@contextlib.contextmanager
def picture(path: Path, title: str, across: str, up: str) -> Iterator[Any]:
    """Axes to draw on; the PNG is written when the block ends."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: pip install -e '.[plot]' in the checkout") from error
    matplotlib.use("agg")  # files alone: no window, no display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    try:
        axes.set(title=title, xlabel=across, ylabel=up)
        axes.grid(alpha=0.3)
        yield axes
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=120)
        write_whole(path, content.getvalue())
    finally:
        pyplot.close(figure)


def refuse_no_matplotlib() -> None:
    """Before an evaluation of hours, not after it."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib: pip install -e '.[plot]' in the checkout, or --no-plot")


def ratio_error(totals: Sequence[float], counts: Sequence[float]) -> float | None:
    """Standard error of sum(totals) / sum(counts) over independent items of unequal size; None for a single one."""
    items, count = len(counts), sum(counts)
    if items < 2 or not count:
        return None
    ratio = sum(totals) / count
    squares = sum((total - ratio * size) ** 2 for total, size in zip(totals, counts, strict=True))
    return math.sqrt(squares * items / (items - 1)) / count


def perplexity_of(nlls: Sequence[float], counts: Sequence[float]) -> tuple[float | None, float | None]:
    """exp(mean negative log-likelihood) of all items together, and its standard error over items."""
    if not sum(counts):
        return None, None
    try:
        value = math.exp(sum(nlls) / sum(counts))
    except OverflowError:
        return math.inf, None
    error = ratio_error(nlls, counts)
    return value, None if error is None else value * error
