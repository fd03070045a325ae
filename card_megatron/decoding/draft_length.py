"""How many tokens to draft in a pass and in which shape, so that text comes fastest: by measured acceptance and cost.

A draft pays where the accelerator waits for memory (few rows) and costs where it computes (many rows). The choice
changes the speed alone, never the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MEMORY = 0.98
"""What a pass leaves of the weight of those before it: about the last 50 count."""
WORTH_IT = 1.05
"""Drafting must promise this much more than plain passes: the promise is an estimate."""
WORTH_A_TRY = 1.15
"""What drafting must promise, if acceptance were high, to be tried again where it did not pay."""
RETHINK = 8
"""Plain passes between two looks at the numbers: looking is not free at one row of a small model."""
FEW_ROWS = 4
"""Up to here a wider pass is cheap enough to be tried on hope."""
MOST_BRANCHED = 4
"""Deepest branches that are chosen: their tokens grow with the square."""


class Shape(NamedTuple):
    """What a pass drafts: so many tokens behind its last draft, or behind every one (verify.py says more)."""

    drafts: int
    branches: bool = False

    def tokens(self, drafts: int) -> int:
        """What a row forwards that verifies `drafts` and makes this shape's."""
        return drafts + 1 + self.drafts * (drafts + 1 if self.branches else 1)


class Cost:
    """Seconds of a pass as a line in the number of forwarded tokens, for batches of about one size."""

    def __init__(self) -> None:
        self.weight = self.tokens = self.seconds = self.square = self.product = 0.0
        self.skipped = False

    def add(self, tokens: int, seconds: float) -> None:
        if not self.skipped:  # the first pass of a size allocates what the later ones reuse
            self.skipped = True
            return
        if self.weight >= 2:  # a pass that the machine interrupted is no evidence
            seconds = min(seconds, 2 * self.at(tokens, slope=self.seconds / self.tokens))
        for name, value in (
            ("weight", 1.0),
            ("tokens", tokens),
            ("seconds", seconds),
            ("square", tokens * tokens),
            ("product", tokens * seconds),
        ):
            setattr(self, name, MEMORY * getattr(self, name) + value)

    def at(self, tokens: float, *, slope: float) -> float:
        """Predicted seconds; `slope` is believed where passes of one width alone have been seen."""
        mean_tokens, mean_seconds = self.tokens / self.weight, self.seconds / self.weight
        spread = self.square / self.weight - mean_tokens**2
        # one pass's worth of belief in the given slope, at a distance of half the mean width
        belief = (0.25 * mean_tokens**2 + 1) / self.weight
        covariance = self.product / self.weight - mean_tokens * mean_seconds
        fitted = (covariance + belief * slope) / (spread + belief)
        return max(mean_seconds + max(fitted, 0.0) * (tokens - mean_tokens), 0.2 * mean_seconds)


class DraftLength:
    """Chooses the shape of each pass; learns from every pass and keeps what it learned."""

    def __init__(self, most: int):
        self.most = most
        self.shapes = [
            Shape(0),
            *(Shape(drafts) for drafts in range(1, most + 1)),
            *(Shape(drafts, branches=True) for drafts in range(1, min(most, MOST_BRANCHED) + 1)),
        ]
        self.tried, self.accepted = [0.0] * (most + 1), [0.0] * (most + 1)
        self.costs: dict[int, Cost] = {}
        self.prefill_tokens, self.prefill_slope = 0, 0.0
        self.plain_passes = self.failed_tries = 0

    def choose(self, rows: int) -> int:
        """Which of `shapes` the next pass of `rows` rows has."""
        cost = self.costs.get(rows.bit_length())
        if not self.most or cost is None or not cost.weight:
            return 0  # plain passes first: they are what drafting is compared with
        if self.plain_passes % RETHINK:
            self.plain_passes += 1
            return 0
        rates = self.rates()[: self._deepest(rows)]
        best, gain = self._best(cost, rows, rates, self._slope(cost, rows))
        if gain > WORTH_IT:
            self.plain_passes = self.failed_tries = 0
            return best
        self.plain_passes += 1
        if self.plain_passes < (RETHINK if rows <= FEW_ROWS else 6 * RETHINK) * 3**self.failed_tries:
            return 0
        self.failed_tries += 1
        hopes = [max(rate, 0.9) for rate in rates]
        best, gain = self._best(cost, rows, hopes, self._slope(cost, rows, hopeful=True))
        return best if gain > WORTH_A_TRY else 0

    def _deepest(self, rows: int) -> int:
        """Drafts go little deeper than acceptance is known: a try that fails must not cost much."""
        known = sum(tried >= 4 for tried in self.tried)
        return known + (4 if rows <= FEW_ROWS else 1)

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        """Wide passes tell what a further token costs at most, before any draft was tried."""
        if tokens >= self.prefill_tokens:
            self.prefill_tokens, self.prefill_slope = tokens, seconds / tokens

    def saw_pass(self, rows: int, tokens: int, seconds: float) -> None:
        """`tokens` counts padding too: it is computed all the same."""
        self.costs.setdefault(rows.bit_length(), Cost()).add(tokens, seconds)

    def saw_drafts(self, tried: Sequence[int], accepted: Sequence[int]) -> None:
        """How many drafts of depth 1, 2, … were reached by verification, and how many of them it accepted."""
        for depth, (reached, passed) in enumerate(zip(tried, accepted, strict=True), start=1):
            if reached:
                self.tried[depth] = MEMORY * self.tried[depth] + reached
                self.accepted[depth] = MEMORY * self.accepted[depth] + passed

    def rates(self) -> list[float]:
        """Acceptance at depth 1, 2, … given that of those before; a depth without evidence is like the last."""
        rates, guess, belief = [], 0.6, 2.0
        for tried, accepted in zip(self.tried[1:], self.accepted[1:], strict=True):
            guess = (accepted + belief * guess) / (tried + belief)
            rates.append(guess)
            belief = 1.0
        return rates

    def _slope(self, cost: Cost, rows: int, *, hopeful: bool = False) -> float:
        """Seconds of one more token, as far as is known without a wide pass of this batch."""
        if self.prefill_tokens >= 4 * rows:
            return self.prefill_slope * (0.7 if hopeful else 1.0)
        return cost.seconds / cost.tokens * (0.1 if hopeful and rows <= FEW_ROWS else 0.5)

    def _best(self, cost: Cost, rows: int, rates: list[float], slope: float) -> tuple[int, float]:
        """(number of the best shape, its tokens per second over those of plain passes)."""
        plain = cost.at(rows, slope=slope)
        best, gain = 0, 1.0
        accepted, survives = [0.0], [1.0]
        for rate in rates:
            survives.append(survives[-1] * rate)
            accepted.append(accepted[-1] + survives[-1])
        for number, shape in enumerate(self.shapes):
            if not 0 < shape.drafts < len(accepted):
                continue
            # A row verifies drafts in this share of its passes: behind a tail it has none after a rejection.
            verifies = 1.0 if shape.branches else 1 / (2 - survives[shape.drafts])
            alone = (1 - verifies) ** rows  # no row of the batch has drafts, and the pass is narrow
            narrow = cost.at(rows * shape.tokens(0), slope=slope)
            wide = cost.at(rows * shape.tokens(shape.drafts), slope=slope)
            ratio = (1 + verifies * accepted[shape.drafts]) * plain / (alone * narrow + (1 - alone) * wide)
            if ratio > gain:
                best, gain = number, ratio
        return best, gain
