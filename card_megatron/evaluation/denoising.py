"""How well a causal model predicts through masks: the nll of the true token behind 0, 1, 2, ... [MASK]s.

Behind a clean context the next K - 1 inputs are [MASK]: exactly what decoding feeds when it drafts a block. Depth 0 is
the exact likelihood of the next token; how fast the nll grows with depth is how far drafting can carry.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.decoding.model import OpenModel
from card_megatron.evaluation.perplexity import choose_window, token_rows
from card_megatron.evaluation.report import masks, shown
from card_megatron.evaluation.scorer import Pair, Scorer
from card_megatron.evaluation.texts import TextSet


@dataclass(frozen=True)
class Denoising:
    """A model on a set, by depth."""

    set: str
    window: int
    """Context and hidden tokens together."""
    samples: int
    """Windows of the set that were scored."""
    nll: list[float]
    """Mean nll of the true token, in nats, behind as many masks as its place in the list."""
    nll_stderr: list[float | None]
    """Over windows."""

    def record(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    model: OpenModel,
    texts: TextSet,
    *,
    depth: int,
    samples: int,
    window: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Denoising:
    """Depths 0 .. depth - 1 on windows that are spread evenly over the set; every rank calls this and gets the same."""
    scorer = Scorer(model)  # refuses what is not causal
    length, _ = choose_window(model, window, 1)
    if depth >= length:
        raise ConfigError(f"--depth={depth} leaves no context in a window of {length} tokens; ask for fewer")
    pairs = spread([pair for rows in token_rows(model, texts) for pair in cut(rows, length, depth)], samples)
    if not pairs:
        raise ConfigError(f"{texts.name} has no document of {length} tokens; choose a shorter --window, or other texts")
    scores = scorer.score(pairs, per_token=True, progress=progress, instead=model.tokenizer.mask)
    by_depth = [
        [-value for value in column] for column in zip(*(score.token_logprobs for score in scores), strict=True)
    ]
    root = math.sqrt(len(pairs))
    errors = [statistics.stdev(column) / root if len(column) > 1 else None for column in by_depth]
    return Denoising(texts.name, length, len(pairs), [statistics.fmean(column) for column in by_depth], errors)


def cut(rows: Sequence[list[int]], window: int, depth: int) -> list[Pair]:
    """(context, hidden tokens) of every whole window, side by side."""
    edge = window - depth
    parts = (row[start : start + window] for row in rows for start in range(0, len(row) - window + 1, window))
    return [(part[:edge], part[edge:]) for part in parts]


def spread(pairs: list[Pair], samples: int) -> list[Pair]:
    """At most so many of them, evenly."""
    if len(pairs) <= samples:
        return pairs
    return [pairs[place * len(pairs) // samples] for place in range(samples)]


def table_rows(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and cells: a row a model and set, a column a depth."""
    depths = range(max(len(result["nll"]) for result in results))
    rows = [
        [
            result["set"],
            result["model"],
            *(shown(*pair) for pair in zip(result["nll"], result["nll_stderr"], strict=True)),
            f"{result['samples']:,}",
        ]
        for result in results
    ]
    return ["set", "model", *(f"nll behind {masks(depth)}" for depth in depths), "samples"], rows
