"""What all ranks must know after a step, in one small sum over all of them: the loss, and who asks for what."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from card_megatron.config.schema import CheckpointConfig
from card_megatron.training import signals
from card_megatron.training.metrics import read_report

SAVE_NOW = "save_now"
LOOK_EVERY_SECONDS = 2.0
"""How often rank 0 looks for RUN_DIR/save_now: a look costs little, but not on every file system."""


@dataclass
class Verdict:
    """The same on every rank."""

    report: list[float]
    """This step's report over the global batch."""
    loss: float
    signal: int | None
    """A signal that some rank received."""
    save: str | None
    """Why to save now, if there is a reason other than the step count."""


class Control:
    """Asks all ranks after each step."""

    def __init__(self, run_dir: str | Path, config: CheckpointConfig):
        self.config, self.request = config, Path(run_dir) / SAVE_NOW
        self.first = torch.distributed.get_rank() == 0
        self.last_save = self.last_look = time.monotonic()

    def ask(self, report: torch.Tensor, normalize: str) -> Verdict:
        """Sum over all ranks; this is also where a step's work on the device is waited for."""
        received = signals.received()
        asked = [received == number for number in signals.SIGNALS]
        asked += [self._requested(), self._time_is_up()]
        sums = torch.cat([report, torch.tensor(asked, dtype=report.dtype, device=report.device)])
        torch.distributed.all_reduce(sums)
        values = sums.tolist()
        summed, raised = values[: len(report)], values[len(report) :]
        by_signal = [number for number, flag in zip(signals.SIGNALS, raised, strict=False) if flag]
        save = "RUN_DIR/save_now" if raised[-2] else "interval_minutes" if raised[-1] else None
        loss = read_report(summed, normalize)["loss"]
        return Verdict(summed, math.nan if loss is None else loss, by_signal[0] if by_signal else None, save)

    def saved(self) -> None:
        """A save has begun: start the clock again and answer the request."""
        self.last_save = time.monotonic()
        if self.first:
            with contextlib.suppress(OSError):  # a file system that became read-only says so for a missing file too
                self.request.unlink(missing_ok=True)

    def _requested(self) -> bool:
        now = time.monotonic()
        if not self.first or now - self.last_look < LOOK_EVERY_SECONDS:
            return False
        self.last_look = now
        return self.request.exists()

    def _time_is_up(self) -> bool:
        minutes = self.config.interval_minutes
        return self.first and minutes is not None and time.monotonic() - self.last_save >= 60 * minutes
