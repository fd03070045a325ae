"""card and arm on whole samples: what may be masked, what is supervised, where scores restart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from card_megatron.config.schema import ObjectiveConfig
from card_megatron.objectives import build_objective
from card_megatron.objectives.keys import SampleKey
from card_megatron.objectives.weights import token_weights

MASK, EOD = 99, 2


def corrupt(tokens, supervised=None, index=0, seed=1, **fields):
    tokens = np.asarray(tokens, dtype=np.int64)
    supervised = np.ones(len(tokens), bool) if supervised is None else np.asarray(supervised)
    objective = build_objective(ObjectiveConfig(**fields), mask_id=MASK, eod_id=EOD)
    return objective.corrupt(tokens, np.roll(tokens, -1), supervised, SampleKey(seed, "train", index))


@st.composite
def samples(draw):
    length = draw(st.integers(1, 80))
    tokens = np.array(draw(st.lists(st.sampled_from([EOD, 5, 6, 7]), min_size=length, max_size=length)))
    padded = draw(st.integers(0, length))
    supervised = np.arange(length) < length - padded
    return tokens, supervised


@settings(max_examples=200)
@given(
    samples(),
    st.integers(0, 1000),
    st.sampled_from(["sequence", "document"]),
    st.booleans(),
    st.sampled_from(["algorithm", "appendix"]),
    st.sampled_from([1.0, 1.5, float("inf")]),
)
def test_masks_and_weights(sample, index, segments, keep_first, score, tail_factor):
    tokens, supervised = sample
    options = dict(segments=segments, keep_first=keep_first, score=score, tail_factor=tail_factor)
    noised = corrupt(tokens, supervised, index, **options)
    masked = noised.tokens == MASK
    assert not masked[tokens == EOD].any(), "an end of document was masked"
    assert not masked[~supervised].any(), "padding was masked"
    np.testing.assert_array_equal(noised.tokens[~masked], tokens[~masked])
    np.testing.assert_array_equal(noised.labels, np.roll(tokens, -1))
    assert (noised.weights[~supervised] == 0).all() and (noised.weights[supervised] > 0).all()
    np.testing.assert_array_equal(noised.supervised, supervised)

    starts = [0, *(np.flatnonzero(tokens[:-1] == EOD) + 1)] if segments == "document" else [0]
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        here = slice(start, stop)
        if keep_first:
            assert not masked[start]
        # scores restart with the stretch: its weights are those of the stretch alone
        alone = np.where(supervised[here], token_weights(masked[here], score=score), 0)
        np.testing.assert_array_equal(noised.weights[here], alone.astype(np.float32))
        eligible = supervised[here] & (tokens[here] != EOD)
        if keep_first:
            eligible[0] = False
        if eligible.any():
            assert masked[here].sum() >= 1, "N is at least 1"


def test_the_number_of_masks_follows_t_over_eligible_positions():
    tokens = np.full(101, 5)
    for index in range(50):
        noised = corrupt(tokens, index=index)
        assert (noised.tokens == MASK).sum() == max(1, int(100 * noised.t))


def test_noise_is_a_function_of_seed_split_and_index_alone():
    tokens = np.arange(3, 67)
    first, again, other = (corrupt(tokens, index=index) for index in (4, 4, 5))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert (first.tokens != other.tokens).any()
    assert (first.tokens != corrupt(tokens, index=4, seed=2).tokens).any()


def test_clean_fraction_1_is_arm():
    tokens = np.arange(3, 67)
    clean, arm = corrupt(tokens, clean_fraction=1.0), corrupt(tokens, name="arm")
    for field in ("tokens", "labels", "weights", "supervised", "t"):
        np.testing.assert_array_equal(getattr(clean, field), getattr(arm, field))


def test_clean_fraction_keeps_that_share_and_does_not_move_the_other_masks():
    tokens = np.arange(3, 67)
    half = [corrupt(tokens, index=index, clean_fraction=0.5) for index in range(400)]
    clean = [not (sample.tokens == MASK).any() for sample in half]
    assert 140 < sum(clean) < 260
    for index, sample in enumerate(half):
        # the others are card's, and the clean ones arm's: a mix of both losses
        alone = corrupt(tokens, index=index, name="arm" if clean[index] else "card")
        np.testing.assert_array_equal(sample.tokens, alone.tokens)
        np.testing.assert_array_equal(sample.weights, alone.weights)


def test_without_reweighting_the_masks_stay_and_the_weights_are_one():
    tokens = np.arange(3, 67)
    plain, weighted = corrupt(tokens, reweight=False), corrupt(tokens)
    np.testing.assert_array_equal(plain.tokens, weighted.tokens)
    assert (plain.weights == 1).all() and (weighted.weights < 1).any()


@pytest.mark.parametrize("sampler", ["uniform", "stratified"])
@pytest.mark.parametrize("segments", ["sequence", "document"])
def test_t_stays_in_its_range(sampler, segments):
    tokens = np.tile([5, 6, 7, EOD], 16)
    levels = [
        corrupt(tokens, index=index, t_sampler=sampler, t_min=0.2, t_max=0.6, segments=segments).t
        for index in range(200)
    ]
    assert min(levels) >= 0.2 and max(levels) <= 0.6
    assert abs(np.mean(levels) - 0.4) < 0.03


def test_stretch_without_an_eligible_position_stays_clean():
    noised = corrupt([EOD, EOD, EOD])
    assert (noised.tokens == EOD).all() and (noised.weights == 1).all()
