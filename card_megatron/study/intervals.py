"""Means over seeds with their intervals, and differences paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

ROUNDING = 1e-12
"""Differences below this part of the values that they are between are rounding, and no differences."""


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
    return Interval(mean, student(count - 1) * statistics.stdev(values) / math.sqrt(count), count)


def student(freedom: int, coverage: float = 0.95) -> float:
    """The t between whose signs Student's distribution has this share: by halving."""
    low, high = 0.0, 1.0
    while share_within(high, freedom) < coverage:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if share_within(middle, freedom) < coverage else (low, middle)
    return high


def share_within(t: float, freedom: int) -> float:
    """P(|T| < t), the finite series of whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle, odd = math.atan(t / math.sqrt(freedom)), freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for step in range(2 + odd, freedom + 1, 2):
        total += term
        term *= (step - 1) / step * math.cos(angle) ** 2
    return (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Interval | None:
    """The interval of value - baseline over the seeds that both have; None where they share none."""
    shared = [difference(values[seed], baseline[seed]) for seed in values if seed in baseline]
    return interval(shared) if shared else None


def difference(value: float, other: float) -> float:
    return 0.0 if math.isclose(value, other, rel_tol=ROUNDING) else value - other


def pooled(values: Mapping[str, Mapping[int, float]], baseline: str) -> dict[str, Interval]:
    """Differences of all runs from the baseline, with one spread for all: value = run + seed + chance, least squares.

    Two seeds of one run say next to nothing of chance; two seeds of many like runs say it well. Where every run has
    every seed, the differences are those of `paired`. A run that shares no seed with the others is left out.

    The intervals hold together (Bonferroni): of many variants that do nothing, one in twenty would else look as if.
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
    contrasts = {}
    for run, known in values.items():
        contrast = np.array([float(name == run) - float(name == baseline) for name in runs] + [0.0] * (len(seeds) - 1))
        told_apart = known and np.allclose(contrast @ inverse @ design, contrast)
        if run != baseline and told_apart:
            contrasts[run] = contrast
    found = {}
    for run, contrast in contrasts.items():
        half, mean = None, float(contrast @ fitted)
        if freedom:
            spread = math.sqrt(float(np.sum((observed - design @ fitted) ** 2)) / freedom)
            wide = student(freedom, 1 - 0.05 / len(contrasts))
            half = wide * spread * float(np.linalg.norm(contrast @ inverse))
        rounding = ROUNDING * float(np.abs(observed).max())
        found[run] = Interval(0.0 if abs(mean) < rounding else mean, half, len(values[run]))
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
