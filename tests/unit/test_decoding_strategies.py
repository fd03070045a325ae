"""Strategies on transformers models: what they decode is what slow, cacheless decoders say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from card_megatron.decoding.block import Confidence, autoregressive
from card_megatron.decoding.engine import Request, decode
from card_megatron.decoding.hf_backend import HFBackend
from card_megatron.decoding.sampling import SamplingParams
from card_megatron.decoding.verify import Verify
from tests.decoders import (
    EOS,
    MASK,
    PAD,
    POSITIONS,
    slow_ar,
    slow_confidence,
    some_prompts,
    trained_on_cycles,
    untrained,
    whole_forward,
)

NEW = 24


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small products on several threads wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model():
    return trained_on_cycles()


@pytest.fixture(scope="module")
def backend(model) -> HFBackend:
    return HFBackend(model)


def run(backend, prompts, strategy, *, new=NEW, batch_size=32, sampling=None, eos_ids=(EOS,)):
    requests = [
        Request(prompt, new, sampling(index) if sampling else SamplingParams(), eos_ids=eos_ids)
        for index, prompt in enumerate(prompts)
    ]
    results, stats = decode(backend, requests, strategy, mask_id=MASK, forbidden=[PAD], batch_size=batch_size)
    assert stats.widest <= strategy.width  # the cache: no pass feeds a row more than this, however long it is
    assert all(result.near_ties == 0 for result in results), "another seed: rounding could decide here"
    return results, stats


def texts(results) -> list[list[int]]:
    return [result.tokens for result in results]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_cached_logits_are_the_uncached(kind):
    model = untrained(kind)
    backend = HFBackend(model)
    backend.reserve(3, 40)
    tokens = np.random.default_rng(0).integers(0, 60, (3, 30))
    whole = torch.stack([model(input_ids=torch.from_numpy(row[None]), use_cache=False).logits[0] for row in tokens])
    backend.forward(tokens[:, :9], np.zeros(3, dtype=np.int64), 0, np.empty(0, dtype=np.int64))
    lengths = np.array([9, 5, 1])  # rows go on from where they are: what stood behind is overwritten
    for width in (1, 4, 7, 1, 2):
        piece = np.stack([row[start : start + width] for row, start in zip(tokens, lengths, strict=True)])
        logits = backend.forward(piece, lengths, 0, None).view(3, width, -1)
        for row, start in enumerate(lengths):
            torch.testing.assert_close(logits[row], whole[row, start : start + width], rtol=0, atol=1e-5)
        some = backend.forward(piece, lengths, 0, np.array([0, 2 * width + width - 1]))
        torch.testing.assert_close(some, torch.stack((logits[0, 0], logits[2, -1])), rtol=0, atol=1e-5)
        lengths = lengths + np.array([width, max(1, width - 1), 1])
    assert model.config._attn_implementation == "sdpa"  # the model itself is as it was
    assert type(model.lm_head) is torch.nn.Linear
    assert backend.model.lm_head.weight is model.lm_head.weight


@pytest.mark.parametrize("batch_size", [1, 7, 32])
def test_ar_is_the_naive_loop(model, backend, batch_size):
    prompts = some_prompts(14)
    results, stats = run(backend, prompts, autoregressive(), batch_size=batch_size)
    slow = whole_forward(model)
    assert texts(results) == [slow_ar(slow, prompt, NEW) for prompt in prompts]
    assert stats.widest == 1
    assert set(stats.advances) == {1}
    assert all(result.filled_in == list(range(1, len(result.tokens) + 1)) for result in results)


@pytest.mark.parametrize(
    "setting",
    [
        dict(block=1, tau=0.9, max_passes=1, commit="block", min_fill=1),
        dict(block=4, tau=0.5, max_passes=4, commit="block", min_fill=1),
        dict(block=8, tau=0.8, max_passes=3, commit="block", min_fill=1),
        dict(block=8, tau=0.6, max_passes=16, commit="prefix", min_fill=1),
        dict(block=5, tau=0.7, max_passes=3, commit="prefix", min_fill=1),
        dict(block=6, tau=0.9, max_passes=4, commit="block", min_fill=0),
        dict(block=6, tau=0.9, max_passes=4, commit="prefix", min_fill=0),
        dict(block=7, tau=0.0, max_passes=1, commit="block", min_fill=1),
        dict(block=16, tau=0.9, max_passes=16, commit="block", min_fill=1),
    ],
    ids=str,
)
def test_confidence_is_its_definition(model, backend, setting):
    prompts = some_prompts(10, longest=60)
    results, stats = run(backend, prompts, Confidence(**setting), batch_size=4)
    slow = whole_forward(model)
    expected = [slow_confidence(slow, prompt, NEW, **setting) for prompt in prompts]
    assert texts(results) == [tokens for tokens, _ in expected]
    assert [result.filled_in for result in results] == [filled_in for _, filled_in in expected]
    assert stats.tokens_produced == sum(len(tokens) for tokens, _ in expected)


@pytest.mark.parametrize("commit", ["block", "prefix"])
def test_a_tau_that_nothing_exceeds_fills_from_the_left(backend, commit):
    """One slot a pass, each from a complete context: the text of ar, whatever stands behind the slot."""
    prompts = some_prompts(10)
    strategy = Confidence(block=6, tau=1.0, max_passes=6, commit=commit)
    assert texts(run(backend, prompts, strategy)[0]) == texts(run(backend, prompts, autoregressive())[0])


def verify(drafts: int | str) -> Verify:
    """A number of drafts, 'branches N', or 'adaptive'."""
    if isinstance(drafts, int):
        return Verify(drafts, adaptive=False)
    return Verify(8) if drafts == "adaptive" else Verify(int(drafts.split()[1]), adaptive=False, branches=True)


@pytest.mark.parametrize("batch_size", [1, 32])
@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 5, 8, "branches 1", "branches 2", "branches 4", "adaptive"])
def test_greedy_verify_is_greedy_ar(backend, drafts, batch_size):
    prompts = some_prompts(32 if batch_size > 1 else 8)
    strategy = verify(drafts)
    verified, stats = run(backend, prompts, strategy, batch_size=batch_size)
    plain, _ = run(backend, prompts, autoregressive(), batch_size=batch_size)
    assert texts(verified) == texts(plain)
    if drafts not in (0, "adaptive"):
        assert stats.tokens_per_pass > 1.15  # drafts are accepted here, and rejected too
        assert len(stats.advances) > 1


def test_shapes_may_change_at_every_pass(backend):
    """Branches behind what a long tail drafted would be wider than the cache has room for."""
    prompts = some_prompts(16, longest=60)
    strategy, rng = Verify(8), np.random.default_rng(0)
    strategy.length.choose = lambda rows: int(rng.integers(len(strategy.length.shapes)))
    widths = {shape: shape.tokens(shape.drafts) for shape in strategy.length.shapes}
    assert strategy.width == max(widths.values()) == 25
    verified, _ = run(backend, prompts, strategy, batch_size=3)  # which asserts that no pass is wider
    assert texts(verified) == texts(run(backend, prompts, autoregressive())[0])


def sampled(index: int) -> SamplingParams:
    choices = (
        SamplingParams(temperature=1.0, seed=index),
        SamplingParams(temperature=0.8, top_k=5, seed=index),
        SamplingParams(temperature=1.2, top_p=0.9, repetition_penalty=1.3, seed=index),
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(temperature=0.7, min_p=0.1, seed=-index),
    )
    return choices[index % len(choices)]


@pytest.mark.parametrize("drafts", [1, 3, 8, "branches 3", "adaptive"])
def test_sampled_verify_is_sampled_ar_with_the_same_seeds(backend, drafts):
    prompts = some_prompts(30, longest=40)
    strategy = verify(drafts)
    verified, _ = run(backend, prompts, strategy, sampling=sampled, eos_ids=(EOS, 7))
    plain, _ = run(backend, prompts, autoregressive(), sampling=sampled, eos_ids=(EOS, 7), batch_size=3)
    assert texts(verified) == texts(plain)
    assert len({result.ended for result in plain}) == 2
    again, _ = run(backend, prompts, strategy, sampling=lambda index: SamplingParams(1.0, seed=99 + index))
    assert texts(again) != texts(plain)


@pytest.mark.parametrize(
    "strategy",
    [
        autoregressive(),
        Confidence(6, 0.7, 4),
        Confidence(6, 0.7, 4, commit="prefix"),
        Verify(4, adaptive=False),
        Verify(2, adaptive=False, branches=True),
    ],
    ids=["ar", "block", "prefix", "verify", "branches"],
)
@pytest.mark.parametrize("sampling", [None, sampled], ids=["greedy", "sampled"])
def test_a_row_alone_is_the_row_in_a_batch_of_128(backend, strategy, sampling):
    prompts = some_prompts(128, longest=100)
    crowd, _ = run(backend, prompts, strategy, sampling=sampling, batch_size=128, new=12)
    for index in range(0, 128, 17):
        alone, _ = run(
            backend, prompts[index : index + 1], strategy, sampling=sampling and (lambda _, i=index: sampled(i)), new=12
        )
        assert alone[0] == crowd[index]


def test_mask_and_padding_never_come_out():
    model = untrained("llama")
    model.lm_head.weight.data[[MASK, PAD]] *= 20  # what this model would say most of the time
    backend = HFBackend(model)
    for strategy in (autoregressive(), Confidence(4, 0.2, 3), Verify(3, adaptive=False)):
        results, _ = run(backend, some_prompts(20, longest=9), strategy, sampling=lambda i: SamplingParams(2.0, seed=i))
        said = {token for result in results for token in result.tokens}
        assert len(said) > 20
        assert not said & {MASK, PAD}


def slow_branches(logits, prompt: list[int], new: int, k: int) -> list[int]:
    """The passes' advances by definition: every pass has k drafts, each branch's from a forward pass of its own."""
    text, drafts, advances, limit = list(prompt), [], [], len(prompt) + new
    while len(text) < limit and (not advances or text[-1] != EOS):
        before, branch_drafts = len(text), []
        for trunk in range(len(drafts) + 1):  # [c, d_1..d_trunk, MASK x k]
            outputs = logits(text + drafts[:trunk] + [MASK] * k)
            branch_drafts.append(outputs[-k:].argmax(dim=1).tolist())
        exact = logits(text + drafts).argmax(dim=1).tolist()[len(text) - 1 :]
        accepted = next((i for i, d in enumerate(drafts) if d != exact[i]), len(drafts))
        emitted = exact[: accepted + 1]
        if EOS in emitted:
            emitted = emitted[: emitted.index(EOS) + 1]
        text = (text + emitted)[:limit]
        drafts = branch_drafts[accepted][: limit - len(text)]
        advances.append(len(text) - before)
    return advances


@pytest.mark.parametrize("drafts", [1, 3])
def test_branches_draft_behind_whatever_was_accepted(model, backend, drafts):
    """Pass by pass what slow forwards of every branch alone say: no branch sees another, or stands elsewhere."""
    slow = whole_forward(model)
    for prompt in some_prompts(8, longest=40):
        (result,), _ = run(backend, [prompt], Verify(drafts, adaptive=False, branches=True))
        passes = np.bincount(result.filled_in)[1:]
        assert [count for count in passes.tolist() if count] == slow_branches(slow, prompt, NEW, drafts)


def test_positions_beyond_the_model_are_refused_before_decoding(backend):
    with pytest.raises(ValueError, match=r"250.*\+ max_new_tokens \(7\) = 257.*=256; ask for at most 6"):
        run(backend, [[1], [1] * 250], autoregressive(), new=7)
    results, _ = run(backend, [[1] * (POSITIONS - 7)], Verify(8, adaptive=False), new=7)  # drafts stay inside
    assert len(results[0].tokens) <= 7


def test_models_that_the_cache_cannot_serve_are_refused():
    model = untrained("qwen2")
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="sliding windows"):
        HFBackend(model)
