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
        self.nlls.append((nll_BS * batch.supervised).sum(1) / batch.supervised.sum(1).clamp(min=1))

    def worst(self) -> list[dict[str, Any]]:
        """The samples of all ranks with the worst nll, non-finite first. Every rank must call this."""
        mine: dict[int, float] = {}
        if self.indices:
            rows = zip(torch.cat(self.indices).tolist(), torch.cat(self.nlls).tolist(), strict=True)
            mine = {index: nll for index, nll in rows if index >= 0}
        everyone: list[dict[int, float]] = [{} for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(everyone, mine)
        together = {index: nll for part in everyone for index, nll in part.items()}
        ordered = sorted(together.items(), key=lambda row: -row[1] if math.isfinite(row[1]) else -math.inf)
        named = ordered[:NAMED_SAMPLES]
        return [{"index": index, "nll": round(nll, 4) if math.isfinite(nll) else str(nll)} for index, nll in named]


class Guard:
    """Watches the losses of a run; its memory goes into checkpoints, so that a resumed run judges alike."""

    def __init__(self, config: GuardConfig):
        self.config = config
        self.bad_in_a_row = 0
        self.seen, self.mean, self.variance = 0, 0.0, 0.0

    def is_spike(self, loss: float) -> bool:
        """True where a loss stands out from the recent ones. A spike is not learned from."""
        if not math.isfinite(loss):
            return False  # skipped and counted elsewhere
        settled = self.seen >= self.config.spike_window
        deviation = math.sqrt(self.variance)
        if self.config.spike_sigma and settled and loss > self.mean + self.config.spike_sigma * deviation:
            return True
        self.seen += 1
        weight = max(1.0 / self.seen, 1.0 / self.config.spike_window)
        difference = loss - self.mean
        self.mean += weight * difference
        self.variance = (1.0 - weight) * (self.variance + weight * difference * difference)
        return False

    def too_many_bad(self, skipped: bool) -> bool:
        """Count a step; True when the run has skipped too many in a row."""
        self.bad_in_a_row = self.bad_in_a_row + 1 if skipped else 0
        return self.bad_in_a_row >= self.config.max_bad_steps

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("bad_in_a_row", "seen", "mean", "variance")}

    def load(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
