"""The ELBO of mdlm and bd3lm: no bias against enumeration, and the numbers of training's own forward pass."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from card_megatron.config.errors import ConfigError
from card_megatron.evaluation import bound as bound_module
from card_megatron.evaluation import perplexity
from card_megatron.evaluation.bound import BoundScorer
from card_megatron.evaluation.scorer import Scorer
from card_megatron.evaluation.texts import TextSet
from tests.denoisers import MASK, POSITIONS, VOCAB, enumerated_bound, nll_of, opened

NAMES = ["mdlm", "bd3lm"]
pytestmark = pytest.mark.usefixtures("one_rank")


def some_pairs(seed: int = 0) -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(seed)
    lengths = [(1, 1), (1, 9), (3, 5), (4, 4), (5, 7), (13, 2), (20, 11), (1, POSITIONS - 1), (30, 18), (8, 1)]
    return [tuple(rng.integers(3, 90, count).tolist() for count in pair) for pair in lengths]  # type: ignore[misc]


@pytest.mark.parametrize("name", NAMES)
def test_bounds_are_those_of_training_s_own_forward_pass(name, monkeypatch):
    """Sample by sample: the cache, the shared clean half, batches and pieces change nothing."""
    model, pairs, samples = opened(name), some_pairs(), 3
    monkeypatch.setattr(bound_module, "PASS_WIDTH", 20)  # texts and their noisy blocks in several pieces
    scorer = BoundScorer(model, samples=samples, batch_tokens=130, seed=5)
    scores = scorer.score(pairs)
    for place, (score, (context, continuation)) in enumerate(zip(scores, pairs, strict=True)):
        text, estimates = scorer._text(place, context, continuation, common_noise=False), []
        for sample in range(samples):
            noise = scorer._noise(text, sample)
            masked, weights = np.zeros((2, len(text.tokens)))
            masked[noise.begin :], weights[noise.begin :] = noise.masked, noise.weights
            assert masked[: len(context)].sum() == 0 and masked.any(), "the context is given clean"
            estimates.append((nll_of(model, text.tokens, masked.astype(bool)) * weights).sum())
        assert score.logprob == pytest.approx(-np.mean(estimates), abs=1e-4), place
        assert score.error == pytest.approx(np.std(estimates, ddof=1) / math.sqrt(samples), abs=1e-4)
    assert scorer.scored_here == len(pairs) and scorer.truncated == 0


@pytest.mark.parametrize(("name", "size"), [("mdlm", 4), ("bd3lm", 4), ("bd3lm", 1), ("bd3lm", 3)])
def test_the_bound_has_no_bias(name, size):
    """Within three standard errors of the sum over every set of masks; blocks that the context cuts among them."""
    model = opened(name, size)
    pairs = [([5, 6, 7], [8, 9, 10, 11, 12, 13]), ([5], [40, 41, 42, 43]), ([5, 6, 7, 8], [50])]
    scores = BoundScorer(model, samples=1500, seed=1).score(pairs)
    for (context, continuation), score in zip(pairs, scores, strict=True):
        wanted = -enumerated_bound(model, np.array([*context, *continuation]), len(context))
        assert score.error < 0.04 * abs(wanted), "too wide to say anything"
        # blocks of one scored token have one set of masks: nothing is left to chance but rounding
        assert abs(score.logprob - wanted) < 3 * score.error + 1e-4


def test_blocks_of_one_token_are_the_exact_chain():
    """K' = 1 has no bound but the likelihood, sample by sample alike; 0 is its error."""
    model = opened("bd3lm", 1)
    (score,) = BoundScorer(model, samples=2).score([([5, 6], [7, 8, 9])])
    tokens = np.array([5, 6, 7, 8, 9])
    assert score.logprob == pytest.approx(-nll_of(model, tokens, np.ones(5, bool))[2:].sum(), abs=1e-4)
    assert score.error == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_noise_depends_on_the_seed_the_text_and_the_sample_alone(name):
    model, pairs = opened(name), some_pairs()
    scores = BoundScorer(model, samples=4).score(pairs)
    again = BoundScorer(model, samples=4, batch_tokens=1).score(pairs[::-1])[::-1]
    for one, other in zip(scores, again, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    other_seed = BoundScorer(model, samples=4, seed=1).score(pairs[-2:-1])
    assert abs(other_seed[0].logprob - scores[-2].logprob) > 1e-3
    scorer = BoundScorer(model, samples=4)
    endings = [([5, 6, 7, 8], [10, 11, 12, 13]), ([5, 6, 7, 8], [20, 21, 22, 23])]
    for common in (True, False):
        one, two = (scorer._text(place, *pair, common_noise=common) for place, pair in enumerate(endings))
        same = [np.array_equal(scorer._noise(one, n).masked, scorer._noise(two, n).masked) for n in range(4)]
        assert all(same) == common


@pytest.mark.parametrize("name", NAMES)
def test_errors_of_equal_windows_add_up_and_those_of_others_average(name, monkeypatch):
    model = opened(name)
    model.tokenizer.encode_batch = lambda texts: [np.frombuffer(text.encode(), np.uint8) - 60 for text in texts]

    def error_of(*documents: str) -> float:
        return perplexity.measure(model, TextSet("s", Path("s"), list(documents)), samples=3).nll_sampling_error

    one, other = error_of("abcdefgh"), error_of("hgfedcba")
    assert one > 0 and other > 0
    for tokens_at_once in (perplexity.TOKENS_AT_ONCE, 1):
        monkeypatch.setattr(perplexity, "TOKENS_AT_ONCE", tokens_at_once)
        assert error_of("abcdefgh", "hgfedcba") == pytest.approx(math.hypot(one, other), rel=1e-4)
        assert error_of("abcdefgh", "hgfedcba", "abcdefgh") == pytest.approx(math.hypot(2 * one, other), rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_is_what_one_pass_makes_of_the_masks(name):
    from card_megatron.decoding.diffusion import Denoise, denoise
    from card_megatron.decoding.engine import Request

    model = opened(name)
    prompts = [[5, 6, 7], [8, 9, 10, 11], [30]]
    made, _ = denoise(
        model.backend,
        [Request(prompt, 5) for prompt in prompts],
        Denoise(steps=1),
        **dict(model_block=model.block_size, mask_id=MASK),
    )
    pairs = [(prompt, one.tokens) for prompt, one in zip(prompts, made, strict=True)]
    wrong = [(prompt, [*tokens[:-1], (tokens[-1] + 1) % 90]) for prompt, tokens in pairs]
    scorer = BoundScorer(model, samples=2)
    assert [score.greedy for score in scorer.score([*pairs, *wrong], greedy=True)] == [True] * 3 + [False] * 3
    assert not any(score.greedy for score in scorer.score(pairs)), "it was not asked for"


def test_what_is_too_long_loses_its_beginning_or_is_refused():
    model = opened("mdlm")
    scorer = BoundScorer(model, samples=2)
    assert scorer.max_length == POSITIONS - 1, "the last token is fed, too"
    long = [*range(3, 83)]
    scores = scorer.score([(long, [5, 6]), (long[-(POSITIONS - 2) :], [5, 6])])
    # two rows of one product: which threads add up which of their numbers may differ in the last bits
    assert scores[0].logprob == pytest.approx(scores[1].logprob, abs=1e-5) and scorer.truncated == 1
    with pytest.raises(ConfigError, match=f"48 tokens is beyond max_length={POSITIONS - 1}"):
        scorer.score([([5], [6] * POSITIONS)])
    with pytest.raises(ConfigError, match=rf"ids must lie in \[0, {VOCAB}\)"):
        scorer.score([([5], [VOCAB])])
    assert BoundScorer(model, max_length=POSITIONS).max_length == POSITIONS - 1
    for options, fault in (
        ({"samples": 1}, "samples=1 must be at least 2: one sample has no error bar"),
        ({"max_length": POSITIONS + 1}, rf"max_length=49 must lie in 1 \.\. {POSITIONS}"),
        ({"batch_tokens": 0}, "batch_tokens=0 must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=fault):
            BoundScorer(model, **options)
    with pytest.raises(ConfigError, match="its likelihood is not exact in one pass"):
        Scorer(model)
