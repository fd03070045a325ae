"""mdlm and bd3lm: what is masked and scored, and that their losses are bounds without bias."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from card_megatron.config.schema import ObjectiveConfig
from card_megatron.model import build_model, build_transformer_config
from card_megatron.objectives import build_objective, mdlm
from card_megatron.objectives.keys import SampleKey
from card_megatron.objectives.mdlm import T_FLOOR
from tests.configs import load

MASK, EOD = 99, 2


def objective(name, **fields):
    return build_objective(ObjectiveConfig(name=name, **fields), mask_id=MASK, eod_id=EOD)


def corrupt(labels, supervised=None, index=0, name="mdlm", **fields):
    labels = np.asarray(labels)
    supervised = np.ones(len(labels), bool) if supervised is None else np.asarray(supervised)
    return objective(name, **fields).corrupt(np.roll(labels, 1), labels, supervised, SampleKey(1, "train", index))


# ---------------------------------------------------------------- samples


@st.composite
def samples(draw):
    blocks, block_size = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    length = blocks * block_size
    labels = np.array(draw(st.lists(st.sampled_from([EOD, 5, 6, 7]), min_size=length, max_size=length)))
    supervised = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    return labels, supervised, block_size


@settings(max_examples=200)
@given(
    samples(),
    st.integers(0, 1000),
    st.sampled_from(["mdlm", "bd3lm"]),
    st.sampled_from([None, "uniform"]),
    st.sampled_from(["count", "bernoulli"]),
)
def test_masks_and_weights(sample, index, name, sampler, masks):
    labels, supervised, block_size = sample
    fields = {"block_size": block_size} if name == "bd3lm" else {}
    noised = corrupt(labels, supervised, index, name, t_sampler=sampler, masks=masks, **fields)
    length = len(labels)
    if name == "bd3lm":
        np.testing.assert_array_equal(noised.tokens[length:], labels)
    tokens, scored = noised.tokens[:length], noised.weights > 0
    assert not scored[~supervised].any()
    assert (tokens[scored] == MASK).all(), "a token that can be seen is scored"
    behind = np.arange(length) > np.max(np.flatnonzero(supervised), initial=-1)
    assert (tokens[behind] == MASK).all(), "padding can be seen"
    np.testing.assert_array_equal(tokens[~scored & ~behind], labels[~scored & ~behind])
    np.testing.assert_array_equal(noised.labels, labels)
    np.testing.assert_array_equal(noised.supervised, supervised)
    for start in range(0, length, block_size if name == "bd3lm" else length):
        block = slice(start, start + (block_size if name == "bd3lm" else length))
        weights = noised.weights[block][scored[block]]
        assert len(set(weights)) <= 1, "a block has one noise level"
        if masks == "count" and supervised[block].any():
            assert scored[block].any()
            assert weights[0] == np.float32(supervised[block].sum() / len(weights))


@pytest.mark.parametrize("name", ["mdlm", "bd3lm"])
def test_noise_levels_fill_their_range_evenly_and_depend_on_the_key_alone(name):
    labels = np.arange(3, 67)
    drawn = objective(name, t_min=0.25, t_max=0.75)
    keys = [SampleKey(1, "train", index) for index in range(64)]
    levels = np.concatenate([drawn.noise_levels(4, key, key.rng()) for key in keys])
    assert levels.min() >= 0.25 and levels.max() <= 0.75
    # low discrepancy: of 256 levels each sixteenth of the range has its share, to within two
    assert np.abs(np.histogram(levels, 16, (0.25, 0.75))[0] - 16).max() <= 2
    # and in every batch of 8 samples of 8 blocks: counts of a golden ratio's steps, taken 8 times, would hardly move
    for start in range(0, 64, 8):
        batch = np.concatenate([drawn.noise_levels(8, key, key.rng()) for key in keys[start : start + 8]])
        assert np.abs(np.histogram(batch, 32, (0.25, 0.75))[0] - 2).max() <= 2
    first, again, other = (corrupt(labels, index=index, name=name) for index in (4, 4, 5))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert (first.tokens != other.tokens).any()
    whole = drawn.for_validation().config
    assert (whole.t_min, whole.t_max, whole.masks) == (0.0, 1.0, "count")


@pytest.mark.parametrize(("name", "t_min", "t_max"), [("mdlm", 0.3, 0.35), ("bd3lm", 0.45, 0.95), ("bd3lm", 0.0, 0.5)])
def test_a_clipped_schedule_keeps_levels_and_shares_of_masks_in_its_range(name, t_min, t_max):
    """Of every block, as its authors train: else two of five blocks of four tokens would leave it."""
    block = 4 if name == "bd3lm" else 64
    fields = {"block_size": 4} if name == "bd3lm" else {}
    drawn = [
        corrupt(range(3, 67), index=index, name=name, t_min=t_min, t_max=t_max, masks="bernoulli", **fields)
        for index in range(100)
    ]
    used = np.concatenate([1 / sample.weights[sample.weights > 0] for sample in drawn])
    assert used.min() >= max(t_min, T_FLOOR) - 1e-6 and used.max() <= t_max + 1e-6
    assert np.mean([sample.t for sample in drawn]) == pytest.approx((t_min + t_max) / 2, abs=0.01)
    shares = np.stack([sample.weights > 0 for sample in drawn]).reshape(-1, block).mean(1)
    assert shares.min() >= t_min and shares.max() <= t_max and len({*shares}) > 1


def test_redrawn_masks_are_those_of_their_level_given_the_range():
    """Counts of a block against the binomial of its level, cut to the range; every place of a count alike."""
    drawn = [
        corrupt(range(3, 67), index=index, name="bd3lm", block_size=4, t_min=0.4, t_max=0.6, masks="bernoulli")
        for index in range(400)
    ]
    masked = np.stack([sample.weights > 0 for sample in drawn]).reshape(-1, 4)
    assert (masked.sum(1) == 2).all(), "of 4 tokens 40% to 60% are 2"
    assert np.abs(masked.mean(0) - 0.5).max() < 4 * 0.5 / math.sqrt(len(masked))
    wider = [
        corrupt(range(3, 67), index=index, name="bd3lm", block_size=4, t_min=0.5, t_max=0.75, masks="bernoulli")
        for index in range(400)
    ]
    counts = np.stack([sample.weights > 0 for sample in wider]).reshape(-1, 4).sum(1)
    levels = np.linspace(0.5, 0.75, 1001)
    two, three = 6 * levels**2 * (1 - levels) ** 2, 4 * levels**3 * (1 - levels)
    share = float(np.mean(two / (two + three)))
    assert np.mean(counts == 2) == pytest.approx(share, abs=4 * 0.5 / math.sqrt(len(counts)))


def test_a_range_that_no_count_meets_lets_every_draw_stand():
    """A block of 4 with one supervised token: none of its shares is 45% to 95%."""
    supervised = np.zeros(4, bool)
    supervised[0] = True
    fields = {"block_size": 4, "t_min": 0.45, "t_max": 0.95, "masks": "bernoulli"}
    drawn = [corrupt([5, 6, 7, 8], supervised, index, "bd3lm", **fields) for index in range(50)]
    assert {bool(sample.weights[0] > 0) for sample in drawn} == {True, False}
    assert all((sample.weights[1:] == 0).all() for sample in drawn)


def test_an_end_of_document_is_learned_like_any_token():
    masked = sum((corrupt([5, 6, EOD, 7], index=index).tokens == MASK) for index in range(400))
    assert (np.abs(masked / 400 - 0.625) < 0.1).all()  # counts 1 .. 4 of 4, equally likely


# ---------------------------------------------------------------- bounds, against enumeration


class ToyDenoiser:
    """A random but fixed nll of each token, for each set of masks: what an arbitrary network could say."""

    def __init__(self, length: int):
        rng = np.random.default_rng(0)
        self.nll = {masks: rng.exponential(2.0, length) for masks in itertools.product([False, True], repeat=length)}

    def __call__(self, masked: np.ndarray) -> np.ndarray:
        return self.nll[tuple(masked.tolist())]


def exact_bound(nll, length: int, floor: float = 0.0) -> float:
    """The sum over all sets of masks of their probability, integrated over t with weight 1/t: no sampling.

    Without a floor the integral is a beta function. With one, levels below it are raised to it (`bernoulli`).
    """
    total = 0.0
    nodes, widths = np.polynomial.legendre.leggauss(64)
    levels, widths = floor + (1 - floor) * (nodes + 1) / 2, widths * (1 - floor) / 2
    for masks in itertools.product([False, True], repeat=length):
        count = sum(masks)
        if count == 0:
            continue
        if floor == 0.0:
            weight = math.factorial(count - 1) * math.factorial(length - count) / math.factorial(length)
        else:
            weight = float((widths * levels ** (count - 1) * (1 - levels) ** (length - count)).sum())
            weight += floor**count * (1 - floor) ** (length - count)
        total += weight * nll(np.array(masks))[list(masks)].sum()
    return total


@pytest.mark.parametrize("floor", [None, T_FLOOR, 0.2])
@pytest.mark.parametrize("sampler", ["stratified", "uniform"])
def test_mdlm_estimates_its_bound_without_bias(monkeypatch, floor, sampler):
    """Within three standard errors of the enumeration.

    By counts, which have no t near 0; and with masks on their own, where a floor of 0.2 shows what is done there. (At
    the real one a mask of weight 1,000 comes once in 250,000 samples: the next test integrates over masks instead.)
    """
    monkeypatch.setattr(mdlm, "T_FLOOR", floor or T_FLOOR)
    length, draws, masks = 4, 20_000, "bernoulli" if floor else "count"
    nll, drawn = ToyDenoiser(length), objective("mdlm", masks=masks, t_sampler=sampler)
    labels, supervised = np.array([5, 6, 7, 8]), np.ones(length, bool)
    losses, lowest = np.zeros(draws), 1.0
    for index in range(draws):
        sample = drawn.corrupt(labels, labels, supervised, SampleKey(3, "train", index))
        losses[index] = (nll(sample.tokens == MASK) * sample.weights).sum()
        lowest = min(lowest, sample.t)
    assert lowest == (floor or 1 / length)
    wanted = exact_bound(nll, length, floor or 0.0)
    assert abs(losses.mean() - wanted) < 3 * losses.std() / math.sqrt(draws)


@pytest.mark.parametrize("sampler", ["stratified", "uniform"])
def test_levels_near_0_count_as_they_should(sampler):
    """The real floor, with the mean over all masks of a level done exactly: what is left is the sampling of t."""
    length, draws = 4, 20_000
    nll, drawn = ToyDenoiser(length), objective("mdlm", masks="bernoulli", t_sampler=sampler)
    keys = [SampleKey(3, "train", index) for index in range(draws)]
    levels = np.maximum(np.concatenate([drawn.noise_levels(1, key, key.rng()) for key in keys]), T_FLOOR)
    losses = np.zeros(draws)
    for masks in itertools.product([False, True], repeat=length):
        if any(masks):
            chance = levels ** sum(masks) * (1 - levels) ** (length - sum(masks))
            losses += chance / levels * nll(np.array(masks))[list(masks)].sum()
    near_0 = levels <= 0.01
    wanted = exact_bound(nll, length, T_FLOOR)
    assert abs(losses.mean() - wanted) < 3 * losses.std() / math.sqrt(draws)
    without = np.where(near_0, 0.0, losses).mean()
    assert abs(without - wanted) > 3 * losses.std() / math.sqrt(draws), "a bound that loses them must be seen"


def test_a_floor_moves_the_bound_by_little_and_counts_not_at_all():
    nll = ToyDenoiser(4)
    assert exact_bound(nll, 4, T_FLOOR) == pytest.approx(exact_bound(nll, 4), rel=2e-3)
    # all counts and all sets of a count alike, weight K/N: the beta function's own value
    by_count = sum(
        nll(np.array(masks))[list(masks)].sum() * (4 / sum(masks)) / (4 * math.comb(4, sum(masks)))
        for masks in itertools.product([False, True], repeat=4)
        if any(masks)
    )
    assert by_count == pytest.approx(exact_bound(nll, 4), rel=1e-12)


# ---------------------------------------------------------------- the model


SMALL = (
    "model.vocab_size=200; model.num_layers=2; model.hidden_size=32; model.ffn_hidden_size=48; "
    "data.sequence_length=8; model.num_query_groups=2; objective.name={name}"
)


def built(name: str, more: str = ""):
    config = load(SMALL.format(name=name) + more)
    (model,) = build_model(config, build_transformer_config(config), mask_id=MASK)
    return model.eval()


def losses(model, tokens, labels):
    with torch.no_grad():
        return model(torch.as_tensor(tokens), None, None, labels=torch.as_tensor(labels)).double().numpy()


LABELS = np.array([5, 6, 7, EOD, 9, 10, 11, 12])


@pytest.mark.usefixtures("one_rank")
def test_mdlm_sees_both_sides_and_never_predicts_a_mask():
    model = built("mdlm")
    tokens, labels = torch.randint(0, 90, (2, 8)), torch.randint(0, 90, (2, 8))
    changed = tokens.clone()
    changed[:, 7] += 1
    with torch.no_grad():
        assert (model(tokens, None, None)[:, 0] != model(changed, None, None)[:, 0]).any()
        logits = model(tokens, None, None)
    logits[..., 200:] = logits[..., MASK] = float("-inf")
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(torch.as_tensor(losses(model, tokens, labels)).flatten().float(), expected)
    model.train()
    model(tokens, None, None, labels=labels).sum().backward()
    outputs_only = built("mdlm", "; model.share_embeddings_and_output_weights=false")
    outputs_only(tokens, None, None, labels=labels).sum().backward()
    assert (outputs_only.output_layer.weight.grad[[MASK, 250]] == 0).all()


@pytest.mark.usefixtures("one_rank")
def test_mdlm_through_the_model_estimates_the_enumerated_bound():
    model, length = built("mdlm"), 4
    labels = LABELS[:length]
    every = [np.array(masks) for masks in itertools.product([False, True], repeat=length)]
    found = losses(model, np.stack([np.where(masks, MASK, labels) for masks in every]), np.tile(labels, (16, 1)))
    table = {tuple(masks.tolist()): nll for masks, nll in zip(every, found, strict=True)}
    wanted = exact_bound(lambda masks: table[tuple(masks.tolist())], length)
    drawn = [corrupt(labels, index=index) for index in range(2000)]
    nll = losses(model, np.stack([s.tokens for s in drawn]), np.tile(labels, (2000, 1)))
    estimates = (nll * np.stack([s.weights for s in drawn])).sum(1)
    assert abs(estimates.mean() - wanted) < 3 * estimates.std() / math.sqrt(2000)


@pytest.mark.usefixtures("one_rank")
def test_bd3lm_gives_every_block_the_clean_text_before_it_and_nothing_else():
    """The first against mdlm's model of the same weights, later ones by what moves them; the cache has their values."""
    block, model, plain = 4, built("bd3lm", "; objective.block_size=4"), built("mdlm")
    noisy = np.where([0, 1, 1, 0, 1, 0, 0, 1], MASK, LABELS)
    together = losses(model, np.concatenate([noisy, LABELS])[None], LABELS[None])[0]
    first = losses(plain, noisy[None, :block], LABELS[None, :block])[0]
    np.testing.assert_allclose(together[:block], first, rtol=1e-5)
    # a changed clean token moves later noisy blocks alone; a changed noisy token its own block alone
    for place, moved in ((8 + 1, slice(4, 8)), (8 + 5, slice(0, 0)), (1, slice(0, 4)), (6, slice(4, 8))):
        tokens = np.concatenate([noisy, LABELS])
        tokens[place] = 42
        differs = losses(model, tokens[None], LABELS[None])[0] != together
        expected = np.zeros(8, bool)
        expected[moved] = True
        np.testing.assert_array_equal(differs, expected)


@pytest.mark.usefixtures("one_rank")
def test_the_output_layer_of_bd3lm_sees_the_noisy_half_alone():
    model, seen = built("bd3lm", "; objective.block_size=4"), []
    model.output_layer.register_forward_pre_hook(lambda layer, given: seen.append(given[0].shape[0]))
    losses(model, np.concatenate([LABELS, LABELS])[None], LABELS[None])
    assert seen == [len(LABELS)]


@pytest.mark.usefixtures("one_rank")
def test_blocks_of_one_token_at_t_1_are_the_exact_chain_of_conditionals():
    """p(x_1) p(x_2 | x_1) ...: beside as many separate passes of causal attention over [x_1 .. x_{n-1}, MASK]."""
    chain = built("bd3lm", "; objective.block_size=1")
    sample = corrupt(LABELS, name="bd3lm", block_size=1, t_min=1.0, t_max=1.0)
    assert (sample.weights == 1).all() and (sample.tokens[:8] == MASK).all()
    together = losses(chain, sample.tokens[None], LABELS[None])[0]
    causal = built("arm")
    for place in range(8):
        tokens = np.append(LABELS[:place], MASK)
        with torch.no_grad():
            logits = causal(torch.as_tensor(tokens)[None], None, None)[0, -1]
        logits[200:] = logits[MASK] = float("-inf")
        alone = F.cross_entropy(logits, torch.tensor(LABELS[place]))
        assert together[place] == pytest.approx(float(alone), rel=1e-5), place


@pytest.mark.usefixtures("one_rank")
def test_bd3lm_through_the_model_estimates_the_enumerated_bound():
    model, length, size = built("bd3lm", "; objective.block_size=2"), 4, 2
    labels = LABELS[:length]
    wanted = 0.0
    for start in range(0, length, size):

        def nll(masks, start=start):
            noisy = labels.copy()
            noisy[start : start + size][masks] = MASK
            return losses(model, np.concatenate([noisy, labels])[None], labels[None])[0][start : start + size]

        wanted += exact_bound(nll, size)
    drawn = [corrupt(labels, index=index, name="bd3lm", block_size=size) for index in range(2000)]
    nlls = losses(model, np.stack([s.tokens for s in drawn]), np.tile(labels, (2000, 1)))
    estimates = (nlls * np.stack([s.weights for s in drawn])).sum(1)
    assert abs(estimates.mean() - wanted) < 3 * estimates.std() / math.sqrt(2000)
