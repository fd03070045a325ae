"""Texts of mdlm and bd3lm against a decoder that has no cache and no batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from card_megatron.decoding.diffusion import Denoise, denoise
from card_megatron.decoding.engine import Request
from card_megatron.decoding.sampling import SamplingParams
from card_megatron.objectives.keys import SampleKey
from tests.denoisers import EOD, MASK, PAD, built, opened, slow_denoise

NAMES = ["mdlm", "bd3lm"]
PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [30], [*range(40, 53)]]
pytestmark = pytest.mark.usefixtures("one_rank")


def texts(model, how, prompts=PROMPTS, new=10, batch_size=32, **sampling):
    requests = [
        Request(prompt, new, SamplingParams(**sampling, seed=number), eos_ids=(EOD,))
        for number, prompt in enumerate(prompts)
    ]
    options = dict(model_block=model.block_size, mask_id=MASK, forbidden=[PAD], batch_size=batch_size)
    return denoise(model.backend, requests, how, **options)


@pytest.mark.parametrize("order", ["random", "confidence"])
@pytest.mark.parametrize(
    ("name", "block", "steps"),
    [("mdlm", None, None), ("mdlm", None, 3), ("mdlm", 4, 2), ("bd3lm", 4, None), ("bd3lm", 4, 2)],
)
def test_greedy_texts_are_those_of_whole_forwards(name, block, steps, order):
    model = opened(name)
    found, stats = texts(model, Denoise(block if name == "mdlm" else None, steps, order))
    for number, (prompt, one) in enumerate(zip(PROMPTS, found, strict=True)):
        drawn = SampleKey(number, "order", 0).rng().random(len(prompt) + 10).tolist()
        wanted = slow_denoise(model, prompt, 10, block=block, steps=steps, order=drawn if order == "random" else None)
        assert (one.tokens, one.filled_in) == wanted, number
    assert stats.tokens_produced == sum(len(one.tokens) for one in found)
    assert stats.row_passes == sum(one.passes for one in found)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_does_not_depend_on_its_batch(name, temperature):
    model, how = opened(name), Denoise(steps=3)
    together, _ = texts(model, how, temperature=temperature)
    for batch_size in (1, 3):
        assert texts(model, how, batch_size=batch_size, temperature=temperature)[0] == together
    assert texts(model, how, temperature=temperature)[0] == together
    if temperature:
        assert len({tuple(one.tokens) for one in texts(model, how, [[5]] * 4, temperature=1.0)[0]}) > 1, "seeds"
    assert not {MASK, PAD} & {token for one in together for token in one.tokens}


def test_as_many_steps_as_tokens_decide_one_each_and_fewer_share_them():
    model = opened("mdlm")
    for steps, counts in ((None, [1] * 10), (10, [1] * 10), (99, [1] * 10), (3, [4, 3, 3]), (1, [10])):
        (one,), stats = texts(model, Denoise(steps=steps), [[5, 6]])
        if one.ended == "length":
            assert [one.filled_in.count(number + 1) for number in range(one.passes)] == counts
        assert one.passes == len(counts) == stats.passes
    (one,), stats = texts(opened("bd3lm"), Denoise(steps=2), [[5, 6, 7, 8]], new=8)
    assert stats.widest == 8, "a finished block once more and the next one: the prefix stays in the cache"


def test_blocks_of_one_token_are_the_chain_of_single_forwards():
    """p(x_n | x_1 .. x_{n-1}) as causal attention over [x_1 .. x_{n-1}, MASK] has it, with the same weights."""
    model, causal = opened("bd3lm", 1), built("arm")
    found, _ = texts(model, Denoise())
    for prompt, one in zip(PROMPTS, found, strict=True):
        text = list(prompt)
        for _ in range(10):
            with torch.no_grad():
                logits = causal(torch.tensor([[*text, MASK]]), None, None)[0, -1, :120]
            logits[[MASK, PAD]] = float("-inf")
            text.append(int(logits.argmax()))
            if text[-1] == EOD:
                break
        assert one.tokens == text[len(prompt) :]


@pytest.mark.parametrize("name", NAMES)
def test_sampled_tokens_have_the_model_s_probabilities(name):
    """One new token, 2,000 seeds: the share of each token is its probability, within five standard errors."""
    from tests.denoisers import whole_logits

    model, draws = opened(name), 2000
    text = np.array([5, 6, MASK])
    logits = whole_logits(model, text, text)[-1]
    logits[PAD] = float("-inf")
    wanted = logits.softmax(-1).numpy()
    requests = [Request([5, 6], 1, SamplingParams(temperature=1.0, seed=seed)) for seed in range(draws)]
    found, _ = denoise(
        model.backend, requests, Denoise(), model_block=model.block_size, mask_id=MASK, forbidden=[PAD], batch_size=500
    )
    shares = np.bincount([one.tokens[0] for one in found], minlength=120) / draws
    assert (np.abs(shares - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / draws) + 1e-3).all()


@pytest.mark.parametrize("name", NAMES)
def test_stops_and_streams_are_told_by_blocks(name):
    model, told = opened(name), []
    (whole,), _ = texts(model, Denoise(4 if name == "mdlm" else None), [[5, 6, 7]])

    def stop(tokens):
        return 6 if len(tokens) >= 6 else None

    request = Request([5, 6, 7], 10, stop=stop, on_tokens=told.extend)
    (one,), _ = denoise(
        model.backend,
        [request],
        Denoise(4 if name == "mdlm" else None),
        **dict(model_block=model.block_size, mask_id=MASK, forbidden=[PAD]),
    )
    assert one.ended == "stop" and one.tokens == told == whole.tokens[:6]


def test_what_cannot_be_is_refused():
    model = opened("bd3lm")
    for fields, fault in (
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"block": 0}, "block=0 must be at least 1"),
        ({"order": "left"}, "order=left must be random or confidence"),
        ({"block": 8}, "block=8: the model was trained on blocks of 4; leave it out"),
    ):
        with pytest.raises(ValueError, match=fault):
            texts(model, Denoise(**fields))
    with pytest.raises(ValueError, match="beyond the model's"):
        texts(model, Denoise(), new=100)
