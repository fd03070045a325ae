"""Samples of a run as its model will see them, as coloured text and as a picture, drawn by hand.

In the picture a row is a sample and a column a position; a cell's colour is the weight of the prediction made there,
and the strip below it is orange where the input there is masked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from xml.sax.saxutils import escape

import numpy as np

from card_megatron.config.derived import total_samples
from card_megatron.config.errors import ConfigError
from card_megatron.config.schema import RunConfig
from card_megatron.data.inspect import pieces, visible
from card_megatron.data.tokenizers import MASK_PIECE, Tokenizer

if TYPE_CHECKING:
    from rich.text import Text

Value = TypeVar("Value")

INK, FAINT, LINE, ORANGE = "#1f2933", "#6b7785", "#c3cbd4", "#d9772b"
NO_WEIGHT, FULL_WEIGHT = (0xF4, 0xF8, 0xFC), (0x2F, 0x6F, 0xB5)
WIDTH, LEFT, TOP, ROW, STRIP = 960.0, 120, 58, 26, 6
WIDEST, READABLE = 64.0, 24.0
"""A column is at most this wide, and shows its token from this width on."""


@dataclass
class ShownSample:
    """A sample with its text. S positions; targets[i] is what the prediction made from inputs[0..i] is scored on."""

    index: int
    """Place in the order of the run."""
    source: str | None
    """The prefix that it was drawn from, in a blend."""
    t: float
    inputs: list[str]
    targets: list[str]
    masked: np.ndarray
    """bool[S]"""
    weights: np.ndarray
    """float32[S]"""


def read_samples(
    config: RunConfig, tokenizer: Tokenizer, split: str = "train", start: int = 0, count: int = 1
) -> list[ShownSample]:
    """Samples of "train", "validation/NAME" or "test/NAME", through the datasets that training reads."""
    from card_megatron.data.datasets import ObjectiveDataset, build_clean_datasets
    from card_megatron.objectives import build_objective

    clean, prefixes, size = _find(build_clean_datasets(config, tokenizer), config, split)
    if start + count > size:
        raise ConfigError(f"samples {start:,} to {start + count - 1:,} of {split} are not there: it has {size:,}")
    objective = build_objective(config.objective, mask_id=tokenizer.mask, eod_id=tokenizer.eod)
    noised = ObjectiveDataset(clean, objective, config.seed, split)
    shown = []
    for index in range(start, start + count):
        sample, number = noised[index], clean[index].get("dataset_id")
        tokens, labels = sample["tokens"].numpy()[: len(sample["labels"])], sample["labels"].tolist()
        masked = tokens == tokenizer.mask
        texts = [visible(text) for text in pieces(tokenizer, [clean[index]["tokens"][0].item(), *labels])]
        # what is fed at a place: the token before its target, or the target itself where nothing is shifted
        fed = texts[:-1] if objective.shifted else texts[1:]
        shown.append(
            ShownSample(
                index=index,
                source=None if number is None else prefixes[int(number)],
                t=float(sample["t"]),
                inputs=[MASK_PIECE if hidden else text for hidden, text in zip(masked, fed, strict=True)],
                targets=texts[1:],
                masked=masked,
                weights=sample["weights"].numpy(),
            )
        )
    return shown


def _find(datasets: Any, config: RunConfig, split: str) -> tuple[Any, list[str], int]:
    """(dataset, prefixes of its blend, samples) of a split by the name that keys its noise."""
    data = config.data
    found = {"train": (datasets.train, data.train, total_samples(config))}
    for kind, sets, given in (
        ("validation", datasets.validation, data.validation),
        ("test", datasets.test, data.test),
    ):
        found |= {f"{kind}/{name}": (held, given.get(name, data.train), len(held)) for name, held in sets.items()}
    if split not in found:
        raise ConfigError(f"--split={split} is not in this run; choose from {', '.join(found)}")
    held, entries, size = found[split]
    return held, [entry.split()[-1] for entry in entries], size


# ---------------------------------------------------------------- text


def print_samples(samples: Sequence[ShownSample], *, with_weights: bool) -> None:
    """Inputs and targets as text; in colour on a terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    for sample in samples:
        source = f", from {sample.source}" if sample.source else ""
        length, masks = len(sample.masked), int(sample.masked.sum())
        console.print(
            f"sample {sample.index}{source}: t = {sample.t:.4f}, {masks} of {length} inputs masked, "
            f"mean weight {sample.weights.mean():.3f}",
            style="bold",
            **_unwrapped(console),
        )
        for line in _table(sample) if with_weights else _paragraphs(sample):
            console.print(line, **_unwrapped(console))


def _unwrapped(console: Any) -> dict[str, Any]:
    """A file gets whole lines; a terminal gets them wrapped."""
    return {"markup": False, "soft_wrap": not console.is_terminal}


def _paragraphs(sample: ShownSample) -> Iterator[Text]:
    from rich.text import Text

    inputs, targets = Text("inputs   "), Text("targets  ")
    for position, weight in enumerate(sample.weights):
        inputs.append(*_input(sample, position))
        targets.append(sample.targets[position], style=_shaded(weight))
    yield inputs
    yield targets


def _table(sample: ShownSample) -> Iterator[Text]:
    from rich.text import Text

    yield Text(f"{'position':>8}  {'input':<18}{'target':<18}weight")
    for position, weight in enumerate(sample.weights):
        text, style = _input(sample, position)
        line = Text(f"{position:>8}  ")
        line.append(f'"{text}"'.ljust(17), style).append(" ")
        line.append(f'"{sample.targets[position]}"'.ljust(17), _shaded(weight)).append(f" {weight:.4f}  ")
        yield line.append("█" * round(20 * weight / max(1.0, float(sample.weights.max()))), shade(1.0))


def _input(sample: ShownSample, position: int) -> tuple[str, str]:
    return sample.inputs[position], f"bold {ORANGE}" if sample.masked[position] else ""


def _shaded(weight: float) -> str:
    return f"{on_shade(weight)} on {shade(weight)}"


# ---------------------------------------------------------------- picture


def draw(samples: Sequence[ShownSample], title: str) -> str:
    """An SVG of samples."""
    return sample_grid(
        title,
        [f"{sample.index:,}  t = {sample.t:.2f}" for sample in samples],
        np.stack([sample.weights for sample in samples]),
        np.stack([sample.masked for sample in samples]),
        [sample.targets for sample in samples],
    )


def shade(weight: float, top: float = 1.0) -> str:
    """The colour of a weight: the darker, the more its prediction counts."""
    part = min(max(weight / top, 0.0), 1.0)
    mixed = (round(low + (high - low) * part) for low, high in zip(NO_WEIGHT, FULL_WEIGHT, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def on_shade(weight: float, top: float = 1.0) -> str:
    """A colour that reads on shade(weight)."""
    return "#ffffff" if weight > 0.6 * top else INK


def sample_grid(
    title: str, names: Sequence[str], weights: np.ndarray, masked: np.ndarray, texts: Sequence[Sequence[str]]
) -> str:
    """An SVG of R samples of S positions: weights[R, S], masked[R, S], the name of each row, the token of each cell."""
    rows, columns = weights.shape
    cell = min(WIDTH / columns, WIDEST)
    top = max(1.0, float(weights.max()))
    grid, height = cell * columns, TOP + ROW * rows + 30
    width = LEFT + max(grid, 400.0) + 20  # the legend needs its place
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        _text(18, 24, title, 14, INK, "start", 'font-weight="bold"'),
        *_legend(44, top, with_tokens=cell >= READABLE),
    ]
    for row in range(rows):
        y = TOP + ROW * row
        parts.append(_text(LEFT - 8, y + 15, names[row], 11, INK, "end"))
        for start, stop, colour in _runs([shade(weight, top) for weight in weights[row]]):
            parts.append(_cell(start, stop, y, ROW - STRIP - 2, cell, colour))
        for start, stop, is_mask in _runs(masked[row].tolist()):
            if is_mask:
                parts.append(_cell(start, stop, y + ROW - STRIP - 2, STRIP, cell, ORANGE))
        if cell >= READABLE:
            parts += _tokens(y, cell, weights[row], texts[row], top)
    parts += _positions(TOP + ROW * rows + 14, columns, cell)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _tokens(y: float, cell: float, weights: np.ndarray, texts: Sequence[str], top: float) -> Iterator[str]:
    longest = int(cell / 5.2)
    for column, (weight, text) in enumerate(zip(weights, texts, strict=True)):
        short = text if len(text) <= longest else text[: longest - 1] + "…"
        yield _text(LEFT + cell * (column + 0.5), y + 13, short, 9, on_shade(weight, top))


def _legend(y: float, top: float, *, with_tokens: bool) -> list[str]:
    steps = 20
    parts = [_text(18, y, "weight 0", 11, FAINT, "start")]
    for step in range(steps):
        colour = shade(top * step / (steps - 1), top)
        parts.append(f'<rect x="{70 + 6 * step}" y="{y - 10:g}" width="6" height="12" fill="{colour}"/>')
    parts.append(f'<rect x="70" y="{y - 10:g}" width="{6 * steps}" height="12" fill="none" stroke="{LINE}"/>')
    parts.append(_text(76 + 6 * steps, y, f"{top:.3g}", 11, FAINT, "start"))
    parts.append(f'<rect x="230" y="{y - 7:g}" width="14" height="{STRIP}" fill="{ORANGE}"/>')
    about = "the input is [MASK]" + ("; cells show what is predicted" if with_tokens else "")
    return [*parts, _text(250, y, about, 11, FAINT, "start")]


def _positions(y: float, columns: int, cell: float) -> Iterator[str]:
    """Numbers below the grid, about eight of them."""
    step = max(1, 2 ** round(np.log2(max(columns / 8, 1))))
    for position in range(0, columns, step):
        yield _text(LEFT + cell * (position + 0.5), y, str(position), 10, FAINT)


def _cell(start: int, stop: int, y: float, height: float, cell: float, colour: str) -> str:
    """One rectangle for a run of equal cells: thousands of positions stay a small file."""
    x, width = LEFT + start * cell, (stop - start) * cell
    return f'<rect x="{x:.6g}" y="{y:g}" width="{width:.6g}" height="{height:g}" fill="{colour}"/>'


def _runs(values: Iterable[Value]) -> Iterator[tuple[int, int, Value]]:
    """(start, stop, value) of every stretch of equal values."""
    start = 0
    for value, group in itertools.groupby(values):
        stop = start + len(list(group))
        yield start, stop, value
        start = stop


def _text(x: float, y: float, words: str, size: int, colour: str, anchor: str = "middle", more: str = "") -> str:
    style = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}" {more}'
    return f'<text x="{x:.6g}" y="{y:g}" {style}>{escape(words)}</text>'
