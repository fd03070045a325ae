"""The engine on a model whose every probability is known: distributions, ends, order, and the length of drafts."""

from __future__ import annotations

import itertools

import pytest
import torch

from card_megatron.decoding.block import Confidence, autoregressive
from card_megatron.decoding.draft_length import DraftLength
from card_megatron.decoding.engine import Request, decode
from card_megatron.decoding.sampling import SamplingParams
from card_megatron.decoding.verify import Verify
from tests.decoders import MarkovBackend

V, MASK = 6, 5


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small products on several threads wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def table(sharpness: float = 1.0) -> torch.Tensor:
    """Conditionals of the next token; the row of [MASK] makes drafts that are right now and then."""
    return sharpness * torch.randn(V, V, generator=torch.Generator().manual_seed(1))


def successor() -> MarkovBackend:
    """Counts: 0, 1, 2, 3, 4, 0, …"""
    rows = torch.full((V, V), -20.0)
    for token in range(V):
        rows[token, (token + 1) % 5] = 20.0
    return MarkovBackend(rows)


def counted(start: int, length: int) -> list[int]:
    return [(start + step) % 5 for step in range(1, length + 1)]


@pytest.mark.parametrize(
    "strategy",
    [autoregressive(), Verify(2, adaptive=False), Verify(2, adaptive=False, branches=True)],
    ids=["ar", "verify", "branches"],
)
def test_sampled_text_follows_the_model(strategy):
    """Chi-square of three-token texts, over 120,000 draws; filters on: the distribution is the filtered one."""
    backend, texts = MarkovBackend(table()), 40_000
    params = [SamplingParams(temperature=0.8, min_p=0.02, seed=seed) for seed in range(texts)]
    requests = [Request([2], 3, sampling) for sampling in params]
    results, stats = decode(backend, requests, strategy, mask_id=MASK, batch_size=4000)
    logits = table().double()
    logits[:, MASK] = float("-inf")
    chance = (logits / 0.8).softmax(1)
    chance[chance < 0.02 * chance.amax(1, keepdim=True)] = 0
    chance /= chance.sum(1, keepdim=True)
    expected = {
        (a, b, c): texts * float(chance[2, a] * chance[a, b] * chance[b, c])
        for a, b, c in itertools.product(range(5), repeat=3)
    }
    counts = dict.fromkeys(expected, 0)
    for result in results:
        counts[tuple(result.tokens)] += 1
    assert all(counts[text] == 0 for text in expected if not expected[text])
    cells = [text for text in expected if expected[text] >= 5]
    chi_square = sum((counts[text] - expected[text]) ** 2 / expected[text] for text in cells)
    degrees = len(cells) - 1
    assert degrees > 60
    assert chi_square < degrees + 3.5 * (2 * degrees) ** 0.5
    if strategy.width > 1:
        assert stats.advances[2] > 1000 and stats.advances[1] > 1000  # accepted and rejected


STRATEGIES = {
    "ar": lambda: autoregressive(),
    "block": lambda: Confidence(4, 0.9, 4),
    "prefix": lambda: Confidence(4, 0.9, 4, commit="prefix"),
    "verify": lambda: Verify(3, adaptive=False),
    "branches": lambda: Verify(3, adaptive=False, branches=True),
    "adaptive": lambda: Verify(4),
}


@pytest.mark.parametrize("name", ["ar", "prefix", "verify", "adaptive"])
@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_every_request_gets_its_own_length_in_its_own_place(name, batch_size):
    backend = successor()
    backend.table[MASK] = table()[0]  # drafts are no use
    requests = [Request([index % 5] * (1 + index % 7), 1 + (index * 5) % 11) for index in range(40)]
    strategy = Confidence(1, 0.9, 1, commit="prefix") if name == "prefix" else STRATEGIES[name]()
    results, stats = decode(backend, requests, strategy, mask_id=MASK, batch_size=batch_size)
    assert [result.tokens for result in results] == [counted(index % 5, 1 + (index * 5) % 11) for index in range(40)]
    assert {result.ended for result in results} == {"length"}
    assert stats.tokens_produced == sum(len(result.tokens) for result in results)
    assert sum(length * count for length, count in stats.advances.items()) == stats.tokens_produced
    assert sum(stats.advances.values()) == stats.row_passes
    assert max(rows for rows, _ in backend.calls) <= batch_size
    # a row that leaves costs one copy at most, and none when it was the last
    assert len(backend.moves) <= len(requests)
    assert all(target < source < batch_size for source, target, _ in backend.moves)


def test_the_batch_shrinks_when_nobody_waits():
    backend = successor()
    decode(backend, [Request([0], new) for new in (1, 2, 3, 4)], autoregressive(), mask_id=MASK)
    assert backend.calls == [(4, 1), (3, 1), (2, 1), (1, 1)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_text_ends_at_its_end_token(name):
    requests = [Request([0], 30, eos_ids=(3,)), Request([3], 30, eos_ids=(2, 4)), Request([0], 2, eos_ids=(4,))]
    backend = successor()
    backend.table[MASK] = backend.table[2]  # each mask says 3, and confidently: what stands behind the first is dropped
    results, _ = decode(backend, requests, STRATEGIES[name](), mask_id=MASK)
    several = name in ("block", "prefix")
    assert [result.tokens for result in results] == ([[1, 3], [4], [1, 3]] if several else [[1, 2, 3], [4], [1, 2]])
    assert [result.ended for result in results] == ["eos", "eos", "length"]


@pytest.mark.parametrize("name", ["ar", "verify", "adaptive"])
def test_a_stop_callback_ends_the_text_and_streaming_tells_every_token_once(name):
    streamed: list[list[int]] = [[], []]

    def stop(tokens: list[int]) -> int | None:
        return tokens.index(4) if 4 in tokens else None

    requests = [
        Request([0], 20, stop=stop, on_tokens=streamed[0].extend),
        Request([0], 9, on_tokens=streamed[1].extend),
    ]
    results, stats = decode(successor(), requests, STRATEGIES[name](), mask_id=MASK)
    assert [result.tokens for result in results] == [[1, 2, 3], counted(0, 9)]
    assert [result.ended for result in results] == ["stop", "length"]
    assert streamed == [[1, 2, 3], counted(0, 9)]
    assert stats.tokens_produced == 12


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], 4), "request 1: a prompt of 0 ids"),
        (Request([1], 0), "request 1: max_new_tokens=0 must be at least 1"),
        (Request([1] * 60, 5), r"prompt \(60\) \+ max_new_tokens \(5\) = 65 .*=64; ask for at most 4"),
        (Request([V], 1), r"request 1: prompt ids must lie in \[0, 6\)"),
    ],
)
def test_what_cannot_be_decoded_is_refused_before_anything_is(request_, message):
    backend = successor()
    with pytest.raises(ValueError, match=message):
        decode(backend, [Request([1], 3), request_], autoregressive(), mask_id=MASK)
    assert not backend.calls


@pytest.mark.parametrize(
    "make",
    [
        lambda: Confidence(block=0),
        lambda: Confidence(tau=-1),
        lambda: Confidence(max_passes=0),
        lambda: Confidence(commit="row"),
        lambda: Confidence(min_fill=2),
        lambda: Verify(-1),
        lambda: Verify(3, adaptive=True, branches=True),
    ],
)
def test_wrong_strategies_are_refused(make):
    with pytest.raises(ValueError, match="must be"):
        make()


def simulate(rate: float, cost, rows: int, tokens: int = 400, prefill: int = 0) -> tuple[float, DraftLength]:
    """Speed over that of plain passes, where drafts are accepted at `rate` and a pass takes cost(tokens) seconds."""
    length, generator = DraftLength(8), torch.Generator().manual_seed(0)
    if prefill:
        length.saw_prefill(prefill, cost(prefill))
    done, drafts, seconds = [0] * rows, [0] * rows, 0.0
    while min(done) < tokens:
        new = length.shapes[length.choose(rows)]
        width = new.tokens(max(drafts))
        tried, accepted = [0] * 8, [0] * 8
        for row in range(rows):
            right = [*(torch.rand(drafts[row], generator=generator) < rate).tolist(), False]
            passed = right.index(False)
            for depth in range(min(passed + 1, drafts[row])):
                tried[depth] += 1
                accepted[depth] += depth < passed
            done[row] += passed + 1
            drafts[row] = new.drafts if new.branches or passed == drafts[row] else 0
        length.saw_drafts(tried, accepted)
        length.saw_pass(rows, rows * width, cost(rows * width))
        seconds += cost(rows * width)
    return sum(done) / rows * cost(rows) / seconds, length


def test_drafts_grow_where_they_pay():
    flat = lambda tokens: 1.0 + 0.02 * tokens  # noqa: E731
    assert simulate(0.9, flat, rows=1, prefill=30)[0] > 2.2
    assert simulate(0.9, flat, rows=1)[0] > 2.0  # also where no prompt told the cost
    assert simulate(0.6, flat, rows=1, prefill=30)[0] > 1.4


@pytest.mark.parametrize("rows", [1, 8, 32, 128])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("fixed", [0.1, 1.0, 10.0, 40.0])
def test_drafts_never_cost_much(rows, rate, fixed):
    for prefill in (0, 20 * rows):
        speed, _ = simulate(rate, lambda tokens: fixed + 1.0 * tokens, rows, tokens=150, prefill=prefill)
        assert speed > 0.95, (prefill, speed)
