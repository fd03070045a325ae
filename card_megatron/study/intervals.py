"""Means over seeds with their intervals, and differences paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

STUDENT_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom."""


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
    return Interval(mean, student_95(count - 1) * statistics.stdev(values) / math.sqrt(count), count)


def student_95(freedom: int) -> float:
    if freedom <= len(STUDENT_95):
        return STUDENT_95[freedom - 1]
    return 1.959964 + 2.37227 / freedom + 2.8225 / freedom**2  # Cornish-Fisher: right to 4 digits from here on


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Interval | None:
    """The interval of value - baseline over the seeds that both have; None where they share none."""
    shared = [values[seed] - baseline[seed] for seed in values if seed in baseline]
    return interval(shared) if shared else None


def pooled(values: Mapping[str, Mapping[int, float]], baseline: str) -> dict[str, Interval]:
    """Differences of all runs from the baseline, with one spread for all: value = run + seed + chance, least squares.

    Two seeds of one run say next to nothing of chance; two seeds of many like runs say it well. Where every run has
    every seed, the differences are those of `paired`. A run that shares no seed with the others is left out.
    """
    cells = [(run, seed, value) for run, seeds in values.items() for seed, value in seeds.items()]
    if not values.get(baseline):
        return {}
    runs, seeds = list(values), sorted({seed for _, seed, _ in cells})
    # a column a run, and a column a seed but for the first, whose part the runs carry
    design = np.array([[*(run == one for one in runs), *(seed == one for one in seeds[1:])] for run, seed, _ in cells])
    design = design.astype(float)
    observed = np.array([value for _, _, value in cells])
    inverse = np.linalg.pinv(design)
    fitted = inverse @ observed
    freedom = len(cells) - int(np.linalg.matrix_rank(design))
    found = {}
    for run, known in values.items():
        contrast = np.zeros(design.shape[1])
        contrast[runs.index(run)] += 1.0
        contrast[runs.index(baseline)] -= 1.0
        told_apart = known and np.allclose(contrast @ inverse @ design, contrast)
        if run != baseline and told_apart:
            half = None
            if freedom:
                spread = math.sqrt(float(np.sum((observed - design @ fitted) ** 2)) / freedom)
                half = student_95(freedom) * spread * float(np.linalg.norm(contrast @ inverse))
            found[run] = Interval(float(contrast @ fitted), half, len(known))
    return found


def crossings(ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> list[float]:
    """Where a curve falls below another, by straight lines between points that both have; the abscissas in order."""
    other = dict(theirs)
    points = [(place, value - other[place]) for place, value in ours if place in other]
    found, above = [], False
    for (left, before), (right, after) in pairwise(points):
        above = before > 0 or (above and before == 0)  # a curve that touches the other and turns back does not cross
        if above and after < 0:
            found.append(left + (right - left) * before / (before - after))
    return found
