"""The lossless strategy: a pass verifies the drafts that the one before it made, and makes the next ones.

A row whose text ends in c, with drafts d_1..d_k behind it, feeds its trunk [c, d_1..d_k] and masks. Outputs at c and at
accepted drafts are autoregressive conditionals, so greedy text is that of `ar`; sampled text too, because a position's
noise is the same in both. The outputs of masks are the next drafts. Where the masks stand is the pass's shape:

- a tail, [c, d_1..d_k, MASK x K]: K + k + 1 tokens. The new drafts stand only if every d was accepted; after a
  rejection the next pass has none.
- branches, K masks behind c and behind every draft, each branch seeing its own part of the trunk: (K + 1)(k + 1)
  tokens. Whatever was accepted, the branch behind it has drafts for what follows: every pass verifies some.

Shapes: B rows, W columns of a pass, S columns of the text that a pass can write.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from card_megatron.decoding.block import BlockPass, Rows, note_choices
from card_megatron.decoding.cache import Branches
from card_megatron.decoding.draft_length import DraftLength, Shape
from card_megatron.decoding.sampling import Choices


class Verify:
    """Lossless block decoding; `adaptive` chooses number and shape of the drafts by what they gain and cost."""

    needs_confidence = False

    def __init__(self, drafts: int = 8, adaptive: bool = True, branches: bool = False):
        if drafts < 0:
            raise ValueError(f"drafts (K)={drafts} must be at least 0; 0 is plain autoregressive decoding")
        if adaptive and branches:
            raise ValueError("branches=True must be given with adaptive=False: adaptive drafts choose their shape")
        self.shape = Shape(drafts, branches)
        self.length = DraftLength(drafts) if adaptive else None
        shapes = [self.shape] if self.length is None else self.length.shapes
        self.width = max(shape.tokens(drafts=shape.drafts) for shape in shapes)

    def plan(self, rows: Rows, count: int, agree: Callable[[int], int]) -> BlockPass:
        if self.length is not None:
            self.shape = self.length.shapes[agree(self.length.choose(count))]
            if rows.drafts[:count].max() > self.shape.drafts:  # left by a longer tail: too long a trunk for branches
                self.shape = Shape(self.shape.drafts)
        cached, limit, drafts = rows.cached[:count, None], rows.limit[:count, None], rows.drafts[:count, None]
        # of a text that is about to end, the last draft has no output to give
        trunk = np.minimum(drafts + 1, limit - cached - 1)
        masks = np.clip(limit - cached - 2 - (0 if self.shape.branches else drafts), 0, self.shape.drafts)
        widths = trunk + masks * (trunk if self.shape.branches else 1)
        columns = np.arange(int(widths.max()))
        on_trunk, behind = columns < trunk, columns - trunk
        branch = behind // np.maximum(masks, 1) if self.shape.branches else trunk - 1
        first = trunk + (branch * masks if self.shape.branches else 0)
        positions = np.where(on_trunk, columns, branch + 1 + columns - first)
        rows_B1, targets = np.arange(count)[:, None], cached + positions + 1
        mask = rows.mask_id
        return BlockPass(
            rows_B1=rows_B1,
            widths_B=widths[:, 0],
            tokens_BW=np.where(on_trunk, rows.tokens[rows_B1, cached + columns], mask),
            targets_BW=targets,
            current_BW=np.where(columns < drafts, rows.tokens[rows_B1, cached + columns + 1], mask),
            wanted_BW=(columns < widths) & (targets < limit),
            branches=Branches(positions, np.where(on_trunk, columns, branch), np.where(on_trunk, columns, first))
            if self.shape.branches
            else None,
        )

    def take(self, rows: Rows, plan: BlockPass, choices: Choices) -> None:
        count, width = plan.tokens_BW.shape
        columns = np.arange(width)
        rows.passes[:count] += 1
        proposed = np.full_like(plan.current_BW, rows.mask_id)
        proposed[plan.wanted_BW] = choices.tokens
        near_tie = np.zeros_like(plan.wanted_BW)
        near_tie[plan.wanted_BW] = choices.near_tie
        cached, limit, drafts = rows.cached[:count], rows.limit[:count], rows.drafts[:count]
        wrong = (proposed != plan.current_BW) | (columns >= drafts[:, None])
        accepted = np.where(wrong.any(axis=1), wrong.argmax(axis=1), width)
        if self.length is not None and drafts.any():
            self._learn(drafts, accepted)
        trunk = np.minimum(drafts + 1, limit - cached - 1)
        emitted = np.minimum(accepted + 1, trunk)

        # The new text: what the trunk emitted, and behind it the drafts of the branch that stands.
        span = np.arange(int(trunk.max()) + self.shape.drafts)
        final = span < emitted[:, None]
        masks = (plan.widths_B - trunk) // (trunk if self.shape.branches else 1)
        stands = np.where(self.shape.branches | (accepted == drafts), masks, 0)
        first = trunk + (accepted * masks if self.shape.branches else 0)
        depth = span - emitted[:, None]
        drafted = (depth >= 0) & (depth < stands[:, None]) & (cached[:, None] + 1 + span < limit[:, None])
        source = np.where(final, span, np.minimum(first[:, None] + depth, width - 1))
        text = np.where(final | drafted, proposed[plan.rows_B1, source], rows.mask_id)
        targets = cached[:, None] + 1 + span
        rows.tokens[plan.rows_B1, targets] = text
        rows.drafts[:count] = drafted.sum(axis=1)
        note_choices(rows, targets, final, text, near_tie[plan.rows_B1, source])
        rows.decided[:count] = np.minimum(rows.decided[:count] + emitted, rows.limit[:count])
        rows.cached[:count] = rows.decided[:count] - 1

    def _learn(self, drafts: np.ndarray, accepted: np.ndarray) -> None:
        assert self.length is not None
        depths = np.arange(1, self.length.most + 1)[:, None]
        tried = (drafts >= depths) & (accepted >= depths - 1)
        self.length.saw_drafts(tried.sum(1).tolist(), (tried & (accepted >= depths)).sum(1).tolist())

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        if self.length is not None:
            self.length.saw_prefill(tokens, seconds)

    def saw_pass(self, rows: int, tokens: int, seconds: float) -> None:
        if self.length is not None:
            self.length.saw_pass(rows, tokens, seconds)
