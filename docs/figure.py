"""Draw the README's figure of CARD: one sentence, its noise, its weights, and a block of decoding.

    python docs/figure.py docs/card.svg

The masks and weights are computed by the code that trains; only the sentence is invented.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from card_megatron.objectives.keys import SampleKey
from card_megatron.objectives.noise import mask_count, soft_tail_mask, window_size
from card_megatron.objectives.weights import token_weights

TEXT = ["The", "old", "clock", "on", "the", "wall", "struck", "ten", "and", "our", "guests", "left", "home"]
NOISE_LEVEL, TAIL_FACTOR = 0.42, 1.5
KEY = SampleKey(seed=1234, split="train", index=13)
CACHED, PROPOSED = ["and", "our", "guests"], ["home", "at", "once", "."]
"""Decoding: the text before the last token, and what the block's K outputs propose."""

WIDTH, HEIGHT = 900, 548
LEFT, COLUMN, BOX = 112, 64, (58, 28)
SHOWN = 8
"""The prediction whose causal context is drawn."""

INK, FAINT, LINE, BLUE, ORANGE = "#1f2933", "#6b7785", "#c3cbd4", "#2f6fb5", "#d9772b"
PALE_BLUE, PALE_ORANGE, PALE_GREY = "#e8f1fa", "#fdeddc", "#eef1f4"


def text(
    x: float, y: float, words: str, *, size: int = 13, colour: str = INK, anchor: str = "middle", more: str = ""
) -> str:
    style = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}" {more}'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def box(x: float, y: float, word: str, fill: str, edge: str, colour: str = INK) -> str:
    """A token, centred on (x, y)."""
    width, height = BOX
    size = 12 if len(word) > 6 or word == "[MASK]" else 13
    return (
        f'<rect x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width}" height="{height}" rx="5" '
        f'fill="{fill}" stroke="{edge}"/>' + text(x, y + 4.5, word, size=size, colour=colour)
    )


def mask_box(x: float, y: float) -> str:
    return box(x, y, "[MASK]", PALE_ORANGE, ORANGE, ORANGE)


def line(x1: float, y1: float, x2: float, y2: float, colour: str = LINE, more: str = "") -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" {more}/>'


def centre(column: int) -> float:
    return LEFT + COLUMN * (column + 0.5)


def label(y: float, first: str, second: str = "") -> list[str]:
    """The name of a row, in the margin."""
    lines = [text(LEFT - 10, y + (4.5 if not second else -2), first, anchor="end")]
    return [*lines, text(LEFT - 10, y + 14, second, size=11, colour=FAINT, anchor="end")] if second else lines


def training_panel(top: float) -> list[str]:
    """Text, noised inputs, one prediction's context, the targets, and a bar for each weight."""
    inputs, targets = TEXT[:-1], TEXT[1:]
    eligible = len(inputs) - 1  # the first input has no context and stays
    masked = np.concatenate([[False], soft_tail_mask(eligible, NOISE_LEVEL, TAIL_FACTOR, KEY.rng())])
    weights = token_weights(masked)
    count = mask_count(eligible, NOISE_LEVEL)
    window = window_size(eligible, count, TAIL_FACTOR)

    clean_y, noised_y, target_y, base_y, tallest = top + 48, top + 100, top + 178, top + 292, 66
    parts = [text(18, top + 14, "Training", size=15, anchor="start", more='font-weight="bold"')]
    parts.append(
        text(
            LEFT + 3,
            top + 14,
            f"t = {NOISE_LEVEL}: {count} of the last {window} inputs become [MASK]; "
            "every next token is predicted, all in one causal pass",
            colour=FAINT,
            anchor="start",
        )
    )
    parts += [*label(clean_y, "text"), *label(noised_y, "inputs", "soft tail mask")]
    parts += [*label(target_y, "targets", "the next token"), *label(base_y - 34, "weight", "1 / (1 + S)")]

    left, right = centre(len(inputs) - window) - COLUMN / 2 + 1, centre(len(inputs) - 1) + COLUMN / 2 - 1
    parts.append(
        f'<rect x="{left:g}" y="{noised_y - 20:g}" width="{right - left:g}" height="40" rx="7" fill="none" '
        f'stroke="{ORANGE}" stroke-dasharray="4 3"/>'
    )
    for column in range(SHOWN + 1):  # what one prediction sees: every input up to its own
        colour = ORANGE if masked[column] else BLUE
        parts.append(
            line(
                centre(column), noised_y + 14, centre(SHOWN), target_y - 15, colour, 'stroke-width="1.2" opacity="0.65"'
            )
        )
    for column, (word, target) in enumerate(zip(inputs, targets, strict=True)):
        x, weight = centre(column), weights[column]
        parts.append(box(x, clean_y, word, "#ffffff", LINE))
        parts.append(mask_box(x, noised_y) if masked[column] else box(x, noised_y, word, PALE_BLUE, BLUE))
        shown = column == SHOWN
        parts.append(box(x, target_y, target, PALE_GREY, INK if shown else LINE))
        height = tallest * weight
        parts.append(
            f'<rect x="{x - 17:g}" y="{base_y - height:g}" width="34" height="{height:g}" rx="2" fill="{BLUE}" '
            f'opacity="{1 if shown else 0.72}"/>'
        )
        parts.append(text(x, base_y - height - 6, f"{weight:.2f}", size=11, colour=INK if shown else FAINT))
    parts.append(line(LEFT, base_y, LEFT + COLUMN * len(inputs), base_y, FAINT))
    note = (
        f"the prediction of “{targets[SHOWN]}” sees inputs 0 … {SHOWN} only; "
        f"its masked, near context makes it count {weights[SHOWN]:.2f}"
    )
    parts.append(text(LEFT + 3, base_y + 20, note, size=12, colour=FAINT, anchor="start"))
    return parts


def decoding_panel(top: float) -> list[str]:
    """The last token and K-1 masks go in; K tokens come out."""
    size = len(PROPOSED)
    input_y, output_y, first = top + 58, top + 126, len(CACHED)
    parts = [text(18, top + 14, "Decoding", size=15, anchor="start", more='font-weight="bold"')]
    parts.append(
        text(
            LEFT + 3,
            top + 14,
            f"the last token and K − 1 masks in, K tokens out of one pass (K = {size}); "
            "the text before them is in the KV cache",
            colour=FAINT,
            anchor="start",
        )
    )
    parts += [*label(input_y, "inputs"), *label(output_y, "proposed")]
    for column, word in enumerate(CACHED):
        parts.append(box(centre(column), input_y, word, PALE_GREY, LINE, FAINT))
    middle = (centre(0) + centre(first - 1)) / 2
    parts.append(text(middle, input_y + 32, "KV cache", size=11, colour=FAINT))
    for number, word in enumerate(PROPOSED):
        x = centre(first + number)
        parts.append(mask_box(x, input_y) if number else box(x, input_y, "left", PALE_BLUE, BLUE))
        parts.append(line(x, input_y + 14, x, output_y - 17, INK, 'stroke-width="1.2" marker-end="url(#tip)"'))
        parts.append(box(x, output_y, word, "#ffffff", INK))
    x = centre(first + size - 1) + COLUMN / 2 + 18
    for row, words in enumerate(
        (
            "Confident tokens are kept; the others",
            "stay [MASK] for the next pass.",
            "K = 1 is plain autoregressive decoding.",
        )
    ):
        parts.append(text(x, input_y + 15 + 19 * row, words, size=12, colour=FAINT, anchor="start"))
    return parts


def figure() -> str:
    """The whole drawing; it brings its own white background, so that it reads on a dark page too."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" role="img">',
        "<title>CARD: soft tail masking, context-aware weights, and decoding of a block</title>",
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>',
        *training_panel(14),
        line(18, 356, WIDTH - 18, 356),
        *decoding_panel(372),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the README's figure as an SVG.")
    parser.add_argument("output", type=Path, help="the .svg file to write")
    options = parser.parse_args()
    options.output.write_text(figure(), encoding="utf-8")


if __name__ == "__main__":
    main()
