"""Which tokens a pass feeds, and what becomes of its proposals: the strategies `ar` and `confidence`; verify.py has one
more.

The output at input i predicts position i + 1. So a block of K new tokens is proposed from [last token, MASK x (K-1)]:
the last decided token's output proposes the first slot, each MASK's the next one.

A row is a buffer of tokens with [MASK] where nothing is decided. Its first `cached` positions have final keys and
values: each was fed as a real token behind a fully real prefix. A pass feeds positions cached .. end-2 and its outputs
propose positions cached+1 .. end-1. A token that was filled in a pass was fed as [MASK] there; it is fed once more, in
the next pass, together with what is still open.

Shapes: B rows, W columns of a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from card_megatron.decoding.cache import Branches
from card_megatron.decoding.sampling import Choices

FAR = np.iinfo(np.int64).max // 2


class Rows:
    """The state of all slots of a batch: column arrays, so that a pass over 128 rows is a few numpy calls."""

    def __init__(self, slots: int, capacity: int, mask_id: int, most_eos: int):
        self.mask_id = mask_id
        self.tokens = np.full((slots, capacity), mask_id, dtype=np.int64)
        self.filled_in = np.zeros((slots, capacity), dtype=np.int32)
        """The row's pass that decided the position; 0 in the prompt."""
        self.entered = np.zeros((slots, capacity), dtype=np.int32)
        """The row's passes before the position was first proposed."""
        columns = np.zeros((8, slots), dtype=np.int64)
        self.prompt, self.limit, self.decided, self.cached, self.end, self.drafts, self.passes, self.near_ties = columns
        self.met_eos = np.zeros(slots, dtype=bool)
        self.eos = np.full((slots, max(1, most_eos)), -1, dtype=np.int64)

    def put(self, slot: int, prompt: np.ndarray, max_new_tokens: int, eos: tuple[int, ...]) -> None:
        length = len(prompt)
        self.tokens[slot, :length], self.tokens[slot, length:] = prompt, self.mask_id
        self.filled_in[slot], self.entered[slot] = 0, 0
        self.prompt[slot] = self.decided[slot] = self.end[slot] = length
        self.limit[slot], self.cached[slot] = length + max_new_tokens, length - 1
        self.drafts[slot] = self.passes[slot] = self.near_ties[slot] = 0
        self.met_eos[slot] = False
        self.eos[slot] = -1
        self.eos[slot, : len(eos)] = eos

    def move(self, source: int, target: int) -> None:
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array[target] = array[source]

    def generated(self, slot: int) -> list[int]:
        return self.tokens[slot, self.prompt[slot] : self.decided[slot]].tolist()


@dataclass
class BlockPass:
    """One pass over the first B slots."""

    rows_B1: np.ndarray
    widths_B: np.ndarray
    """Tokens that a row feeds; the columns behind them are padding, which no later pass reads."""
    tokens_BW: np.ndarray
    targets_BW: np.ndarray
    """Position that a column's output proposes."""
    current_BW: np.ndarray
    """What stands there: [MASK], a decided token, a draft."""
    wanted_BW: np.ndarray
    """Outputs that the strategy looks at; only these become logits."""
    branches: Branches | None = None
    """Where the columns stand if they are no chain."""


class Strategy(Protocol):
    """Says what each row feeds and which outputs it wants, and takes their proposals."""

    width: int
    """The most tokens that a row forwards in a pass."""
    needs_confidence: bool

    def plan(self, rows: Rows, count: int, agree: Callable[[int], int]) -> BlockPass:
        """The next pass over the first `count` slots."""
        ...

    def take(self, rows: Rows, plan: BlockPass, choices: Choices) -> None:
        """Write the proposals that stand into the rows, and advance them."""
        ...

    def saw_prefill(self, tokens: int, seconds: float) -> None: ...

    def saw_pass(self, rows: int, tokens: int, seconds: float) -> None: ...


class Confidence:
    """The paper's: each pass fills every open slot that the model is sure of. `ar` is the block of one."""

    def __init__(
        self, block: int = 16, tau: float = 0.9, max_passes: int = 16, commit: str = "block", min_fill: int = 1
    ):
        for name, value, valid, rule in (
            ("block (K)", block, block >= 1, "at least 1"),
            ("tau", tau, tau >= 0, "at least 0; 1 and more is never exceeded"),
            ("max_passes (T_max)", max_passes, max_passes >= 1, "at least 1"),
            ("commit", commit, commit in ("block", "prefix"), "block or prefix"),
            ("min_fill", min_fill, min_fill in (0, 1), "0 or 1"),
        ):
            if not valid:
                raise ValueError(f"{name}={value} must be {rule}")
        self.block, self.tau, self.max_passes, self.commit, self.min_fill = block, tau, max_passes, commit, min_fill
        self.width = 2 * block - 1  # a whole block may be fed once more behind its last token, beside the next block
        self.needs_confidence = block > 1 or not min_fill

    def plan(self, rows: Rows, count: int, agree: Callable[[int], int]) -> BlockPass:
        self._open(rows, count)
        widths_B = rows.end[:count] - 1 - rows.cached[:count]
        columns = np.arange(int(widths_B.max()))
        rows_B1 = np.arange(count)[:, None]
        positions_BW = rows.cached[:count, None] + columns
        targets_BW = positions_BW + 1
        current_BW = rows.tokens[rows_B1, targets_BW]
        wanted_BW = (columns < widths_B[:, None]) & (current_BW == rows.mask_id)
        return BlockPass(rows_B1, widths_B, rows.tokens[rows_B1, positions_BW], targets_BW, current_BW, wanted_BW)

    def _open(self, rows: Rows, count: int) -> None:
        """The next block once this one is full; with commit=prefix, K open slots at every pass."""
        decided, end = rows.decided[:count], rows.end[:count]
        wider = np.minimum(decided + self.block, rows.limit[:count])
        opened = wider if self.commit == "prefix" else np.where(end <= decided, wider, end)
        if self.needs_confidence:
            rows_B1, slots = np.arange(count)[:, None], decided[:, None] + np.arange(self.block)
            new = slots >= end[:, None]
            rows.entered[rows_B1, slots] = np.where(new, rows.passes[:count, None], rows.entered[rows_B1, slots])
        rows.end[:count] = opened

    def take(self, rows: Rows, plan: BlockPass, choices: Choices) -> None:
        count, open_BW = len(plan.widths_B), plan.wanted_BW
        rows.passes[:count] += 1
        if choices.confidence is None:
            filled = open_BW.copy()  # the only slot, and a pass fills at least one
        else:
            filled = np.zeros_like(open_BW)
            waited = rows.passes[:count, None] - rows.entered[plan.rows_B1, plan.targets_BW]
            filled[open_BW] = choices.confidence > self.tau
            filled |= open_BW & (waited >= self.max_passes)
            if self.min_fill:
                unsure = ~filled.any(axis=1)
                filled[unsure, open_BW.argmax(axis=1)[unsure]] = True
        proposed = plan.current_BW.copy()
        proposed[open_BW] = choices.tokens
        before = rows.decided[:count].copy()
        rows.tokens[plan.rows_B1, plan.targets_BW] = kept = np.where(filled, proposed, plan.current_BW)
        near_tie = np.zeros_like(open_BW)
        near_tie[open_BW] = choices.near_tie
        note_choices(rows, plan.targets_BW, filled, proposed, near_tie)
        still_open = kept == rows.mask_id
        first_open = plan.targets_BW[:, 0] + np.where(still_open.any(1), still_open.argmax(1), still_open.shape[1])
        rows.decided[:count] = np.minimum(first_open, rows.limit[:count])
        # With min_fill=0 the first slot may stay open: the token before it is then fed again, for its output.
        rows.cached[:count] = np.minimum(before, rows.decided[:count] - 1)

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        pass

    def saw_pass(self, rows: int, tokens: int, seconds: float) -> None:
        pass


def autoregressive() -> Confidence:
    """One token a pass."""
    return Confidence(block=1)


def note_choices(
    rows: Rows, targets_BW: np.ndarray, final_BW: np.ndarray, proposed: np.ndarray, near_tie: np.ndarray
) -> None:
    """Remember when positions were decided, count near ties, and end a row behind its first end of text."""
    count = len(final_BW)
    rows_B1 = np.arange(count)[:, None]
    filled_in = rows.filled_in[rows_B1, targets_BW]
    rows.filled_in[rows_B1, targets_BW] = np.where(final_BW, rows.passes[:count, None], filled_in)
    if near_tie.any():
        rows.near_ties[:count] += (near_tie & final_BW).sum(axis=1)
    ends = final_BW & (proposed[:, :, None] == rows.eos[:count, None, :]).any(axis=2)
    if ends.any():
        first_end = np.where(ends, targets_BW, FAR).min(axis=1) + 1
        rows.met_eos[:count] |= first_end <= rows.limit[:count]
        rows.limit[:count] = np.minimum(rows.limit[:count], first_end)
        rows.end[:count] = np.minimum(rows.end[:count], rows.limit[:count])
