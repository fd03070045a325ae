"""Soft tail masking against its definition, and the properties that the paper's algorithm promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from card_megatron.objectives.keys import SampleKey
from card_megatron.objectives.noise import soft_tail_mask

lengths = st.integers(1, 300)
levels = st.floats(0, 1)
factors = st.one_of(st.floats(1, 10), st.just(math.inf))


@given(lengths, levels, factors, st.integers(0, 2**32))
def test_exactly_n_masks_all_inside_the_window(length, t, tail_factor, seed):
    masked = soft_tail_mask(length, t, tail_factor, np.random.default_rng(seed))
    count = max(1, math.floor(length * t))
    window = length if math.isinf(tail_factor) else min(length, math.floor(count * tail_factor))
    assert masked.shape == (length,) and masked.dtype == bool
    assert masked.sum() == count
    assert not masked[: length - window].any()


@given(lengths, levels, st.integers(0, 2**32))
def test_tail_factor_1_is_the_strict_tail(length, t, seed):
    masked = soft_tail_mask(length, t, 1.0, np.random.default_rng(seed))
    assert masked[length - masked.sum() :].all()


def test_every_subset_of_the_window_is_equally_likely():
    # L=6, t=0.5: N=3, W=4, so 4 subsets; 4,000 draws put 1,000 +- 5 sigma on each
    rng = np.random.default_rng(0)
    draws = [tuple(soft_tail_mask(6, 0.5, 1.5, rng)[2:]) for _ in range(4000)]
    counts = [draws.count(subset) for subset in set(draws)]
    assert len(counts) == 4
    assert all(abs(count - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75) for count in counts)


def test_random_baseline_reaches_everywhere():
    rng = np.random.default_rng(1)
    reached = np.any([soft_tail_mask(40, 0.05, math.inf, rng) for _ in range(600)], axis=0)
    assert reached.all()


def test_nothing_to_mask():
    assert soft_tail_mask(0, 0.5, 1.5, np.random.default_rng(0)).shape == (0,)


@pytest.mark.parametrize(("t", "tail_factor"), [(-0.1, 1.5), (1.1, 1.5), (0.5, 0.9), (0.5, math.nan), (math.nan, 1.5)])
def test_illegal_values_are_named(t, tail_factor):
    with pytest.raises(ValueError, match=r"t=|tail_factor="):
        soft_tail_mask(10, t, tail_factor, np.random.default_rng(0))


def test_a_samples_randomness_is_its_own():
    def draw(*key):
        return SampleKey(*key).rng().integers(0, 2**63, 8).tolist()

    assert draw(1, "train", 5) == draw(1, "train", 5)
    others = [draw(2, "train", 5), draw(1, "validation/books", 5), draw(1, "train", 6), draw(1, "train", 2**40 + 5)]
    assert all(other != draw(1, "train", 5) for other in others)


def test_stratified_levels_cover_the_interval_evenly():
    levels = np.sort([SampleKey(7, "train", 1000 + index).stratified() for index in range(200)])
    gaps = np.diff([*levels, levels[0] + 1])
    assert gaps.max() < 2.5 / 200  # independent draws leave gaps of about ln(200)/200
