"""Soft tail masking: which inputs become [MASK]."""

from __future__ import annotations

import math

import numpy as np


def mask_count(length: int, t: float) -> int:
    """N = max(1, floor(L t)): how many of `length` positions are masked at noise level t."""
    return max(1, math.floor(length * t))


def window_size(length: int, count: int, tail_factor: float) -> int:
    """W = min(L, floor(N * tail_factor)): how long the tail is that the masks fall in."""
    return length if math.isinf(tail_factor) else min(length, math.floor(count * tail_factor))


def soft_tail_mask(length: int, t: float, tail_factor: float, rng: np.random.Generator) -> np.ndarray:
    """bool[length]: a uniformly random subset of exactly N positions among the last W.

    tail_factor 1 is the strict tail, inf the random baseline. A length of 0 has nothing to mask.
    """
    if not 0.0 <= t <= 1.0:
        raise ValueError(f"t={t} is not a noise level; it lies in [0, 1]")
    if not tail_factor >= 1.0:
        raise ValueError(
            f"tail_factor={tail_factor} leaves a window smaller than its masks; use 1 (strict tail) or more"
        )
    masked = np.zeros(length, dtype=bool)
    if length == 0:
        return masked
    count = mask_count(length, t)
    window = window_size(length, count, tail_factor)
    masked[length - window + rng.choice(window, size=count, replace=False, shuffle=False)] = True
    return masked
