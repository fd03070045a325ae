"""Likelihoods in one pass with shared prefixes: those of transformers' whole forward passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from card_megatron.config.errors import ConfigError
from card_megatron.data.tokenizers import MockTokenizer
from card_megatron.decoding.hf_backend import HFBackend
from card_megatron.decoding.model import OpenModel
from card_megatron.evaluation import prefixes
from card_megatron.evaluation.scorer import Scorer
from tests.decoders import POSITIONS, VOCAB, untrained
from tests.scoring import some_pairs, whole_forward_scores


@pytest.fixture(scope="module")
def model():
    return untrained()


@pytest.fixture(scope="module")
def opened(model) -> OpenModel:
    return OpenModel(HFBackend(model), MockTokenizer(VOCAB), "card", Path("nowhere"))


@pytest.fixture(scope="module")
def pairs():
    return some_pairs(VOCAB, POSITIONS)


@pytest.fixture(scope="module")
def expected(model, pairs):
    return whole_forward_scores(model, pairs, POSITIONS, VOCAB)


@pytest.mark.parametrize("batch_tokens", [16, 300, 8192])
def test_scores_are_those_of_whole_forward_passes(opened, pairs, expected, batch_tokens):
    scorer, heard = Scorer(opened, batch_tokens=batch_tokens), []
    scores = scorer.score(pairs, per_token=True, progress=lambda done, total: heard.append((done, total)))
    for score, (of_tokens, greedy) in zip(scores, expected, strict=True):
        assert score.logprob == pytest.approx(of_tokens.sum(), abs=1e-4)
        np.testing.assert_allclose(score.token_logprobs, of_tokens, atol=1e-4)
        assert score.greedy == greedy
    assert heard[-1] == (len(pairs), len(pairs)) and heard == sorted(heard)
    assert scorer.scored_here == len(pairs)
    assert scorer.truncated == sum(len(context) + len(rest) > POSITIONS + 1 for context, rest in pairs) == 2
    assert scorer.score(pairs)[0].token_logprobs == ()


def test_padding_rows_have_no_probability_and_mask_has(model, pairs):
    """The model as one whose vocabulary ends four rows before its output does."""
    short = [(context, rest) for context, rest in pairs if max(context + rest) < VOCAB - 4]
    backend = HFBackend(model, vocab_size=VOCAB - 4)
    scores = Scorer(OpenModel(backend, MockTokenizer(VOCAB - 4), "arm", Path("nowhere"))).score(short)
    expected = whole_forward_scores(model, short, POSITIONS, VOCAB - 4)
    assert len(short) > 5
    for score, (of_tokens, greedy) in zip(scores, expected, strict=True):
        assert score.logprob == pytest.approx(of_tokens.sum(), abs=1e-4) and score.greedy == greedy


def test_greedy_is_true_where_the_model_would_say_it(model, opened):
    context = list(range(20))
    said: list[int] = []
    for _ in range(6):
        ids = context + said
        logits = model(torch.tensor([ids])).logits[0, -1]
        said.append(int(logits.argmax()))
    wrong = [*said[:-1], (said[-1] + 1) % VOCAB]
    assert [score.greedy for score in Scorer(opened).score([(context, said), (context, wrong)])] == [True, False]


def test_a_shared_prefix_is_fed_once(opened):
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(0, VOCAB, count).tolist()

    shots, documents = tokens(64), [tokens(20) for _ in range(6)]
    endings = [[tokens(5) for _ in range(4)] for _ in documents]
    pairs = [(shots + context, ending) for context, four in zip(documents, endings, strict=True) for ending in four]
    scorer = Scorer(opened)
    scorer.score(pairs)
    # 64 once, 20 for each document, 4 for each ending: its last token is predicted and not fed
    assert scorer.forwarded == 64 + 6 * 20 + 24 * 4
    before = scorer.forwarded
    scorer.score([(shots, [token]) for token in range(30)])  # one-token endings cost nothing beside the context
    assert scorer.forwarded == before + 64


def test_what_is_too_long_is_cut_from_the_left(opened):
    rng = np.random.default_rng(1)
    context, rest = rng.integers(0, VOCAB, 100).tolist(), rng.integers(0, VOCAB, 7).tolist()
    scorer = Scorer(opened, max_length=50)
    cut, whole = scorer.score([(context[-44:], rest), (context, rest)])
    assert scorer.truncated == 1 and cut.logprob == whole.logprob
    assert Scorer(opened).score([(context, rest)])[0].logprob != pytest.approx(whole.logprob, abs=1e-3)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (([], [1]), "pair 0: context .0 ids. and continuation .1 ids. need an id each"),
        (([1], []), "need an id each"),
        (([1], [VOCAB]), "another tokenizer"),
        (([1], [1] * (POSITIONS + 1)), "score a long text in windows"),
    ],
)
def test_pairs_that_cannot_be_scored_are_refused(opened, pair, message):
    with pytest.raises(ValueError, match=message):
        Scorer(opened).score([pair])


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"objective": "mdlm"}, {}, "objective mdlm: its likelihood is not exact in one pass"),
        ({}, {"max_length": POSITIONS + 1}, f"must lie in 1 .. {POSITIONS}"),
        ({}, {"batch_tokens": 0}, "batch_tokens=0 must be at least 1"),
    ],
)
def test_scorers_that_cannot_be_are_refused(opened, changes, options, message):
    with pytest.raises(ConfigError, match=message):
        Scorer(replace(opened, **changes), **options)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=60), min_size=1, max_size=12), st.integers(1, 5))
def test_every_token_of_every_sequence_is_in_the_trees_once(sequences, parts):
    known = prefixes.sort_sequences(sequences)
    assert sorted(reader for readers in known.readers for reader in readers) == list(range(len(sequences)))
    for host, readers in zip(known.sequences, known.readers, strict=True):
        assert all(host[: len(sequences[reader])].tolist() == sequences[reader] for reader in readers)
    shares = prefixes.shares(known, parts)
    assert [index for share in shares for index in share] == list(range(len(known.sequences)))
    for share in shares:
        covered: dict[int, list[int]] = {index: [] for index in share}
        for tree in prefixes.prefix_forest(known, share):
            for node in tree.walk():
                stretch = known.sequences[node.first][: node.stop]
                for index in range(node.first, node.last):
                    assert (known.sequences[index][: node.stop] == stretch).all()
                    covered[index] += range(node.start, node.stop)
        assert all(places == list(range(len(known.sequences[index]))) for index, places in covered.items())


def test_replicas_get_shares_of_the_same_size():
    rng = np.random.default_rng(0)
    known = prefixes.sort_sequences([rng.integers(0, 50, rng.integers(5, 60)).tolist() for _ in range(400)])
    sizes = [sum(len(known.sequences[index]) for index in share) for share in prefixes.shares(known, 4)]
    assert max(sizes) < 1.03 * min(sizes)
