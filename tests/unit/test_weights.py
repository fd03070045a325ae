"""Token weights against the double sum that defines them, for every reading of the paper."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from card_megatron.objectives.weights import token_weights


def weights_by_definition(masked, decay, beta, score):
    """w_i = 1/(beta + sum_{j<=i} C_j (1-p)^(i-j [+1]))."""
    extra = 1 if score == "appendix" else 0
    weights = []
    for i in range(len(masked)):
        total = 0.0
        for j in range(i + 1):
            cost = masked[j] * (1 + (masked[j - 1] if j else 0))
            total += cost * (1.0 - decay) ** (i - j + extra)
        weights.append(1.0 / (beta + total))
    return np.array(weights)


masks = hnp.arrays(bool, st.integers(0, 120))
decays = st.floats(0, 1)
betas = st.floats(1e-3, 100)
scores = st.sampled_from(["algorithm", "appendix"])


@settings(max_examples=300)
@given(masks, decays, betas, scores)
def test_equal_to_the_definition(masked, decay, beta, score):
    ours = token_weights(masked, decay=decay, beta=beta, score=score)
    np.testing.assert_allclose(ours, weights_by_definition(masked.astype(int), decay, beta, score), rtol=1e-12)


@given(hnp.arrays(bool, st.tuples(st.integers(1, 4), st.integers(1, 50))))
def test_rows_of_a_batch_do_not_mix(masked):
    np.testing.assert_array_equal(token_weights(masked), [token_weights(row) for row in masked])


def test_values_by_hand():
    # C = 0 1 2 0; S = 0 1 2.5 1.25
    weights = token_weights([False, True, True, False])
    np.testing.assert_allclose(weights, [1, 1 / 2, 1 / 3.5, 1 / 2.25])
    appendix = token_weights([False, True, True, False], score="appendix")
    np.testing.assert_allclose(appendix, [1, 1 / 1.5, 1 / 2.25, 1 / 1.625])


def test_clean_context_has_weight_one():
    np.testing.assert_array_equal(token_weights(np.zeros(50, bool)), np.ones(50))


def test_a_prediction_does_not_see_later_masks():
    masked = np.zeros(64, bool)
    masked[40:] = True
    assert (token_weights(masked)[:40] == 1).all()


@pytest.mark.parametrize("length", [1024, 32768])
def test_long_sequences_neither_overflow_nor_drift(length):
    masked = np.random.default_rng(0).random(length) < 0.5
    expected, score = [], 0.0
    for position, hidden in enumerate(masked):
        score = 0.5 * score + hidden * (1 + (masked[position - 1] if position else False))
        expected.append(1 / (1 + score))
    np.testing.assert_allclose(token_weights(masked), expected, rtol=1e-12)


@pytest.mark.parametrize("bad", [{"decay": -0.1}, {"decay": 1.1}, {"beta": 0.0}, {"beta": -1.0}, {"score": "letter"}])
def test_illegal_values_are_named(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        token_weights([True, False], **bad)
