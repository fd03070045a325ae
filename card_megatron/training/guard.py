"""Bad numbers: steps that were skipped, losses that jump, and the samples behind them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from card_megatron.config.schema import GuardConfig
from card_megatron.data.loader import Batch

NAMED_SAMPLES = 8
"""Samples that a message names."""


@dataclass
class Samples:
    """The rows that this rank scored in one step, by place in the order of the run, with the mean nll of each."""

    indices: list[torch.Tensor]
    nlls: list[torch.Tensor]

    def add(self, batch: Batch, nll_BS: torch.Tensor) -> None:
        """Remember a micro-batch; nothing is read from the device until worst() is asked."""
        self.indices.append(batch.index)
        scored_BS = batch.weights > 0
        self.nlls.append((nll_BS * scored_BS).sum(1) / scored_BS.sum(1).clamp(min=1))

    def worst(self) -> list[dict[str, Any]]:
        """The samples of all ranks with the worst nll, non-finite first. Every rank must call this."""
        mine: dict[int, float] = {}
        if self.indices:
            rows = zip(torch.cat(self.indices).tolist(), torch.cat(self.nlls).tolist(), strict=True)
            mine = {index: nll for index, nll in rows if index >= 0}
        everyone: list[dict[int, float]] = [{} for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(everyone, mine)
        # best to worst: of the parts of a sample that several ranks scored, the worst is the one that stays
        scored = sorted((row for part in everyone for row in part.items()), key=lambda row: _badness(row[1]))
        named = sorted(dict(scored).items(), key=lambda row: -_badness(row[1]))[:NAMED_SAMPLES]
        return [{"index": index, "nll": round(nll, 4) if math.isfinite(nll) else str(nll)} for index, nll in named]


def _badness(nll: float) -> float:
    return nll if math.isfinite(nll) else math.inf


class Guard:
    """Watches the losses of a run; its memory goes into checkpoints, so that a resumed run judges alike."""

    def __init__(self, config: GuardConfig):
        self.config = config
        self.bad_in_a_row = 0
        self.seen, self.mean, self.variance = 0, 0.0, 0.0

    def is_spike(self, loss: float) -> bool:
        """True where a loss stands out from the recent ones."""
        if not math.isfinite(loss):
            return False  # skipped and counted elsewhere
        limit = self.mean + self.config.spike_sigma * math.sqrt(self.variance)
        spike = bool(self.config.spike_sigma) and self.seen >= self.config.spike_window and loss > limit
        self.seen += 1
        weight = max(1.0 / self.seen, 1.0 / self.config.spike_window)
        # a spike counts as the limit: one moves the mean by little, a loss that stays up is soon the new normal
        difference = (limit if spike else loss) - self.mean
        self.mean += weight * difference
        self.variance = (1.0 - weight) * (self.variance + weight * difference * difference)
        return spike

    def too_many_bad(self, skipped: bool) -> bool:
        """Count a step; True when the run has skipped too many in a row."""
        self.bad_in_a_row = self.bad_in_a_row + 1 if skipped else 0
        return self.bad_in_a_row >= self.config.max_bad_steps

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("bad_in_a_row", "seen", "mean", "variance")}

    def load(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
