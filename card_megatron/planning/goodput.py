"""How much of a run's time is progress, when machines fail: checkpoint interval against failure rate."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

GPU_MTBF_HOURS = 50_700
"""Hours between failures of one GPU with its share of node, network and software: Llama 3's 54 days on 16,384 H100s had
419 unexpected interruptions (arXiv:2407.21783, section 3.3.4)."""

NO_PROGRESS = 6.0
"""Mean times between failures that an interval with its save and a restart may take. By Daly's formula less than 2% of
the time is progress beyond it, and a simulation would have to live through hundreds of failures for every save."""


@dataclass(frozen=True)
class Failures:
    """What goes wrong and what it costs, in seconds."""

    mtbf: float
    """Mean time between failures of the whole run; they come independently."""
    restart: float
    """From a failure to the first new step: requeue, start, load."""
    save: float
    """Training time that one checkpoint costs."""

    @classmethod
    def of(cls, gpus: int, *, restart: float, save: float, gpu_mtbf_hours: float = GPU_MTBF_HOURS) -> Failures:
        return cls(gpu_mtbf_hours * 3600 / gpus, restart, save)


def best_interval(failures: Failures) -> float:
    """Young's and Daly's first-order optimum: seconds of progress between checkpoints."""
    return math.sqrt(2 * failures.save * failures.mtbf)


def progresses(interval: float, failures: Failures) -> bool:
    """False where nearly every attempt at a checkpoint fails."""
    return (interval + failures.save + failures.restart) / failures.mtbf <= NO_PROGRESS


def expected_goodput(interval: float, failures: Failures) -> float:
    """Daly's exact expectation for failures that also strike while saving and while restarting."""
    mtbf = failures.mtbf
    seconds = mtbf * math.exp(failures.restart / mtbf) * math.expm1((interval + failures.save) / mtbf)
    return interval / seconds


def simulated_goodput(interval: float, failures: Failures, *, saves: int = 2000, seed: int = 0) -> float:
    """Progress over wall-clock of one seeded run with this many checkpoints, event by event."""
    rng = random.Random(seed)
    clock, next_failure = 0.0, rng.expovariate(1 / failures.mtbf)
    for _ in range(saves):
        needed = interval + failures.save
        while clock + needed > next_failure:  # all since the last checkpoint is lost, and a restart comes first
            clock = next_failure
            next_failure = clock + rng.expovariate(1 / failures.mtbf)
            needed = failures.restart + interval + failures.save
        clock += needed
    return saves * interval / clock
