"""Context-aware reweighting: how much a prediction counts, given how corrupted its context is."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

Score = Literal["algorithm", "appendix"]

NEGLIGIBLE = 2.0**-100
"""A factor below which a masked token no longer moves a float64 score: a distance that the scan may stop at."""


def corruption_costs(masked: np.ndarray) -> np.ndarray:
    """C_i = [u_i is MASK] * (1 + [u_{i-1} is MASK]), float64, along the last axis."""
    costs = masked.astype(np.float64)
    costs[..., 1:] += masked[..., 1:] & masked[..., :-1]
    return costs


def decayed_sum(costs: np.ndarray, keep: float) -> np.ndarray:
    """S_i = keep * S_{i-1} + C_i along the last axis, by doubling: no loop over positions.

    After round r, S_i holds the last 2**r terms. Distances whose factor is negligible are never reached, so the
    rounds depend on `keep` and not on the length: the scan is linear in the length.
    """
    total = costs.copy()
    shift, factor, length = 1, keep, costs.shape[-1]
    while shift < length and factor > NEGLIGIBLE:
        # the right side is made whole before it is added: numpy would otherwise read sums of this round
        total[..., shift:] += factor * total[..., :-shift]
        shift, factor = 2 * shift, factor * factor
    return total


def token_weights(
    masked: ArrayLike, *, decay: float = 0.5, beta: float = 1.0, score: Score = "algorithm"
) -> np.ndarray:
    """float64[..., length]: w_i = 1 / (beta + S_i), the weight of the prediction made from inputs 0..i.

    `decay` is the paper's p: a masked input j adds C_j (1-p)^(i-j) to S_i, so the nearest one counts fully
    (score "algorithm") or (1-p) times (score "appendix").
    """
    if score not in ("algorithm", "appendix"):
        raise ValueError(f"score={score!r} is not a reading of the paper; use 'algorithm' or 'appendix'")
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"decay={decay} (the paper's p) must lie in [0, 1]")
    if not (beta > 0.0 and math.isfinite(beta)):
        raise ValueError(f"beta={beta} must be positive: a clean context has score 0 and weight 1/beta")
    keep = 1.0 - decay
    scores = decayed_sum(corruption_costs(np.asarray(masked, dtype=bool)), keep)
    if score == "appendix":
        scores *= keep
    return 1.0 / (beta + scores)
