"""Filters against transformers' own; noise that is keyed; ids that must never come out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from card_megatron.decoding.sampling import (
    Sampler,
    SamplingParams,
    filtered,
    keyed_gumbel,
    keyed_uniform,
    scrambled,
    signed64,
)

V, MASK = 50, 49
INF = float("-inf")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small products on several threads wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def logits() -> torch.Tensor:
    return 3 * torch.randn(40, V, generator=torch.Generator().manual_seed(0))


def sampler_for(params: SamplingParams, rows: int, forbidden=()) -> Sampler:
    sampler = Sampler(rows, V, forbidden, MASK)
    for slot in range(rows):
        sampler.put(slot, params)
    return sampler


def choose(sampler, logits, positions=None, tokens=None, rows=None, **options):
    rows = np.arange(len(logits)) if rows is None else rows
    positions = np.full(len(logits), 3) if positions is None else positions
    tokens = np.full((len(logits), 8), MASK) if tokens is None else tokens
    return sampler.choose(logits.clone(), rows, positions, tokens, **options)


@pytest.mark.parametrize("top_k", [0, 1, 7, 50, 99])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_filters_are_those_of_transformers(logits, top_k, top_p, min_p):
    expected = logits
    for wanted, processor in (
        (top_k, lambda: theirs.TopKLogitsWarper(top_k)),
        (top_p < 1, lambda: theirs.TopPLogitsWarper(top_p)),
        (min_p, lambda: theirs.MinPLogitsWarper(min_p)),
    ):
        if wanted:
            expected = processor()(None, expected)
    rows = len(logits)
    ours = filtered(
        logits,
        top_k=torch.full((rows,), top_k),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
    )
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_rows_have_filters_of_their_own(logits):
    top_k, top_p = torch.tensor([0, 3] * 20), torch.tensor([0.5, 1.0, 0.8, 0.2] * 10)
    together = filtered(logits, top_k=top_k, top_p=top_p)
    for row in range(len(logits)):
        alone = filtered(logits[row : row + 1], top_k=top_k[row : row + 1], top_p=top_p[row : row + 1])
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_repetition_penalty_is_transformers_and_looks_at_earlier_positions_only(logits, temperature):
    tokens = np.random.default_rng(0).integers(0, 48, (len(logits), 8))
    tokens[:, 2] = MASK  # an undecided slot between decided ones is nothing that was said
    positions = np.arange(len(logits)) % 7 + 1
    params = SamplingParams(temperature=temperature, repetition_penalty=1.7, seed=4)
    ours = choose(sampler_for(params, len(logits)), logits, positions, tokens).tokens
    for row, position in enumerate(positions):
        seen = torch.tensor([[token for token in tokens[row, :position] if token != MASK]])
        scores = theirs.RepetitionPenaltyLogitsProcessor(1.7)(seen, logits[row : row + 1].clone())
        scores[:, MASK] = INF
        if temperature:
            noise = keyed_gumbel(torch.tensor([4]), torch.tensor([int(position)]), V)
            scores = scores / temperature + noise
        assert ours[row] == int(scores.argmax())


def test_forbidden_ids_never_come_out(logits):
    logits[:, [5, 6, MASK]] = 1e4
    wide = torch.cat((logits, torch.full((40, 14), 1e5)), dim=1)  # padding of the vocabulary
    for params in (SamplingParams(), SamplingParams(temperature=5.0, seed=1)):
        sampler = sampler_for(params, 40, forbidden=(5, 6))
        for position in range(1, 60):
            chosen = choose(sampler, wide, np.full(40, position)).tokens
            assert not np.isin(chosen, (5, 6, MASK)).any()
            assert chosen.max() < V


def test_confidence_is_of_the_allowed_vocabulary_without_filters(logits):
    params = SamplingParams(temperature=0.3, top_k=2, repetition_penalty=2.0)
    tokens = np.zeros((40, 8), dtype=np.int64)
    confidence = choose(sampler_for(params, 40), logits, tokens=tokens, confidence=True).confidence
    logits[:, MASK] = INF
    np.testing.assert_allclose(confidence, logits.softmax(1).max(1).values.numpy(), rtol=1e-5)


def test_near_ties_are_of_greedy_choices(logits):
    logits[:20, 3] = logits[:20, 4] = 30.0
    logits[:10, 4] += 5e-5
    assert choose(sampler_for(SamplingParams(), 40), logits).near_tie.tolist() == [True] * 20 + [False] * 20
    assert not choose(sampler_for(SamplingParams(temperature=1.0), 40), logits).near_tie.any()


def test_a_choice_does_not_depend_on_the_batch(logits):
    sampler = Sampler(40, V, (), MASK)
    for slot in range(40):
        params = SamplingParams(temperature=0.5 * (slot % 3), top_k=slot % 5, top_p=1 - 0.1 * (slot % 4), seed=slot)
        sampler.put(slot, params)
    positions = np.arange(40)
    together = choose(sampler, logits, positions).tokens
    for row in range(40):
        tokens = np.full((40, 8), MASK)
        alone = choose(sampler, logits[row : row + 1], positions[row : row + 1], tokens, np.array([row])).tokens
        assert alone[0] == together[row]


def test_the_hash_is_splitmix64():
    def reference(state: int) -> int:
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    numbers = [0, 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15, 123456789]
    ours = scrambled(torch.tensor([signed64(number) for number in numbers])).tolist()
    assert ours == [signed64(reference(number)) for number in numbers]


def test_keyed_noise_is_uniform_and_independent():
    seeds, positions = torch.arange(300).repeat_interleave(10), torch.arange(10).repeat(300)
    uniform = keyed_uniform(seeds, positions, 256).double()
    count = uniform.numel()
    assert 0 < uniform.min() < 1e-5 and 1 - 1e-5 < uniform.max() < 1
    histogram = torch.histc(uniform, bins=64, min=0, max=1)
    chi_square = float(((histogram - count / 64) ** 2 / (count / 64)).sum())
    assert chi_square < 63 + 4 * (2 * 63) ** 0.5
    assert len(uniform.float().unique()) > 0.95 * count  # no stretch of noise comes twice
    table = uniform.view(300, 10, 256) - 0.5
    for one, other in (
        (table[1:], table[:-1]),  # neighbouring seeds
        (table[:, 1:], table[:, :-1]),  # positions
        (table[..., 1:], table[..., :-1]),  # ids
        (table[1:, :-1], table[:-1, 1:]),  # seed and position against each other
        (table[:, 1:, :-1], table[:, :-1, 1:]),
    ):
        correlation = float((one * other).mean() * 12)
        assert abs(correlation) < 4 / one.numel() ** 0.5


def test_gumbel_noise_samples_a_softmax():
    scores = torch.tensor([2.0, 1.0, 0.0, -3.0, -8.0])
    draws = 400_000
    noise = keyed_gumbel(torch.arange(draws), torch.full((draws,), 17), 5)
    counts = torch.bincount((scores + noise).argmax(1), minlength=5).double()
    expected = scores.double().softmax(0) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 4 + 4 * 8**0.5


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": 2}, {"repetition_penalty": 0}]
)
def test_wrong_parameters_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* must be"):
        SamplingParams(**wrong)
