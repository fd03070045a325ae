"""Means over seeds with their intervals, and differences paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom."""
NORMAL_95 = 1.960


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and the half-width of its 95% interval, None for a single seed."""

    mean: float
    half: float | None
    count: int

    @property
    def apart_from_zero(self) -> bool | None:
        """None where one seed cannot tell."""
        return None if self.half is None else abs(self.mean) > self.half


def interval(values: Sequence[float]) -> Interval:
    """Student's: with two seeds it is 12.7 standard errors wide, and says what two seeds can say."""
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Interval(mean, None, count)
    quantile = STUDENT_95[count - 2] if count - 2 < len(STUDENT_95) else NORMAL_95
    return Interval(mean, quantile * statistics.stdev(values) / math.sqrt(count), count)


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Interval | None:
    """The interval of value - baseline over the seeds that both have; None where they share none."""
    shared = [values[seed] - baseline[seed] for seed in values if seed in baseline]
    return interval(shared) if shared else None


def crossings(ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> list[float]:
    """Where a curve falls below another, by straight lines between points that both have; the abscissas in order."""
    other = dict(theirs)
    points = [(place, value - other[place]) for place, value in ours if place in other]
    found = []
    for (left, before), (right, after) in pairwise(points):
        if before > 0 >= after:
            found.append(left + (right - left) * before / (before - after))
    return found
