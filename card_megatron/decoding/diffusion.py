"""Texts of masked diffusion: the tokens of a block begin as [MASK], and every pass decides some of them.

mdlm: the block is the whole continuation, or `block` tokens of it at a time. Everything sees everything, what is still
masked behind the block too, so a pass feeds the whole text.
bd3lm: blocks of the model's own size, on the grid that begins with the text. A finished block is fed once more, as
real tokens and together with the first pass of the next one; then its keys and values are final and stay in the cache.

Of a block's K open tokens pass i of N decides ceil(K i / N) - ceil(K (i-1) / N): each as many as its noise level says,
where independent choices would make the number itself random. `random` takes them in an order that is drawn
beforehand, and with N = K samples the model's any-order factorisation exactly; `confidence` takes the likeliest first.
A position is decided once, so its noise is keyed by (seed, position) as everywhere (decoding.sampling).

Shapes: B rows, W columns of a pass, M outputs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from card_megatron.decoding.cache import Branches
from card_megatron.decoding.engine import Backend, Request, Result, Stats, check_requests
from card_megatron.decoding.sampling import NEAR_TIE, Sampler
from card_megatron.objectives.keys import SampleKey

ORDERS = ("random", "confidence")


@dataclass(frozen=True)
class Denoise:
    """How blocks are filled."""

    block: int | None = None
    """Tokens of a block; None: of mdlm the whole continuation, of bd3lm the model's own blocks."""
    steps: int | None = None
    """Passes for each block; None, or more than it has tokens: one for each token."""
    order: str | None = None
    """Which tokens a pass decides; None: random where tokens are sampled, confidence where they are greedy."""

    def __post_init__(self) -> None:
        for name, value in (("block", self.block), ("steps", self.steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.order not in (None, *ORDERS):
            raise ValueError(f"order={self.order} must be {' or '.join(ORDERS)}")


def denoise(
    backend: Backend,
    requests: Sequence[Request],
    how: Denoise,
    *,
    model_block: int | None,
    mask_id: int,
    forbidden: Iterable[int] = (),
    batch_size: int = 32,
) -> tuple[list[Result], Stats]:
    """Continue every request; results are in the requests' order, and do not depend on `batch_size`.

    `model_block` is the block size of block diffusion; None for mdlm.
    """
    if model_block is not None and how.block not in (None, model_block):
        raise ValueError(f"block={how.block}: the model was trained on blocks of {model_block}; leave it out")
    check_requests(requests, backend, batch_size)
    stats, results = Stats(), dict[int, Result]()
    began = time.perf_counter()
    # texts of like length together: all rows of a pass are as wide as the widest
    order = sorted(
        range(len(requests)), key=lambda index: -len(requests[index].prompt) - requests[index].max_new_tokens
    )
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            group = order[start : start + batch_size]
            run = _Run(backend, [requests[index] for index in group], how, model_block, mask_id, forbidden, stats)
            results.update(zip(group, run.run(), strict=True))
    stats.seconds = time.perf_counter() - began
    return [results[index] for index in range(len(requests))], stats


class _Text:
    """One row: its tokens with [MASK] where nothing is decided, and the block [first, stop) that is being filled."""

    def __init__(self, number: int, request: Request, tokens: np.ndarray, how: Denoise, model_block: int | None):
        self.number, self.request, self.tokens, self.how, self.model_block = number, request, tokens, how, model_block
        self.prompt = len(request.prompt)
        self.limit = self.prompt + request.max_new_tokens
        tokens[: self.prompt] = request.prompt
        self.filled_in = np.zeros(len(tokens), dtype=np.int64)
        self.passes = self.near_ties = self.cached = 0
        self.ended: str | None = None
        by_confidence = request.sampling.temperature == 0 if how.order is None else how.order == "confidence"
        self.priority = None if by_confidence else SampleKey(request.sampling.seed, "order", 0).rng().random(self.limit)
        """Of each position: the lowest are decided first."""
        self._open(self.prompt)

    def _open(self, first: int) -> None:
        self.first, self.begun = first, self.passes
        if self.model_block is None:
            self.stop = min(self.limit, first + (self.how.block or self.limit))
            self.fed = self.limit
        else:
            end = (first // self.model_block + 1) * self.model_block
            # whole blocks, as in training, also where the text ends within one: the rest stays masked
            self.stop, self.fed = min(self.limit, end), min(end, len(self.tokens))

    def last_seen(self, columns: np.ndarray) -> np.ndarray:
        """The last column that each of them sees."""
        if self.model_block is None:
            return np.full(len(columns), self.fed - 1)
        return np.minimum((columns // self.model_block + 1) * self.model_block, self.fed) - 1

    def open_positions(self, mask_id: int) -> np.ndarray:
        return self.first + np.flatnonzero(self.tokens[self.first : self.stop] == mask_id)

    def take(self, positions: np.ndarray, tokens: np.ndarray, near_tie: np.ndarray, sure: np.ndarray | None) -> int:
        """Decide as many of the open positions as this pass has to; returns how many these were."""
        self.passes += 1
        size = self.stop - self.first
        steps = min(size, self.how.steps or size)
        done, due = size - len(positions), -(-size * (self.passes - self.begun) // steps)
        if self.priority is None:
            assert sure is not None
            rank = -sure
        else:
            rank = self.priority[positions]
        chosen = np.argsort(rank, kind="stable")
        taken, next_one = chosen[: due - done], chosen[due - done : due - done + 1]
        if self.priority is None and len(next_one) and rank[next_one[0]] - rank[taken[-1]] < NEAR_TIE:
            self.near_ties += 1  # rounding may take another position
        self.tokens[positions[taken]] = tokens[taken]
        self.filled_in[positions[taken]] = self.passes
        self.near_ties += int(near_tie[taken].sum())
        if self.model_block is not None:
            self.cached = self.first // self.model_block * self.model_block
        if due == size:
            self._close()
        return len(taken)

    def _close(self) -> None:
        """The block is full: its text is told, and ends or goes on."""
        request, end = self.request, self.stop
        new = self.tokens[self.first : end]
        ends = np.flatnonzero(np.isin(new, request.eos_ids))
        if len(ends):
            end, self.ended = self.first + int(ends[0]) + 1, "eos"
        elif end == self.limit:
            self.ended = "length"
        generated = self.tokens[self.prompt : end].tolist()
        keep = request.stop(generated) if request.stop is not None else None
        if keep is not None:
            end, self.ended = self.prompt + min(keep, len(generated)), "stop"
        if request.on_tokens is not None and end > self.first:
            request.on_tokens(self.tokens[self.first : end].tolist())
        self.limit = end if self.ended else self.limit
        if not self.ended:
            self._open(self.stop)

    def result(self) -> Result:
        assert self.ended is not None
        text = slice(self.prompt, self.limit)
        return Result(
            self.tokens[text].tolist(), self.ended, self.filled_in[text].tolist(), self.passes, self.near_ties
        )


class _Run:
    """Texts that grow side by side; one that ends leaves, and the last one takes its slot."""

    def __init__(self, backend, requests, how, model_block, mask_id, forbidden, stats):
        self.backend, self.mask_id, self.stats = backend, mask_id, stats
        ends = [len(request.prompt) + request.max_new_tokens for request in requests]
        if model_block is not None:
            ends = [min(-(-end // model_block) * model_block, backend.max_positions) for end in ends]
        self.table = np.full((len(requests), max(ends)), mask_id, dtype=np.int64)
        self.texts = [
            _Text(number, request, self.table[number, : ends[number]], how, model_block)
            for number, request in enumerate(requests)
        ]
        self.sampler = Sampler(len(requests), backend.vocab_size, forbidden, mask_id)
        for text in self.texts:
            self.sampler.put(text.number, text.request.sampling)
        # behind a row's end stands the padding of a pass: two blocks at most, for the first pass begins at 0
        capacity = max(ends) + 2 * (model_block or 0)
        stats.cache_bytes = max(stats.cache_bytes, backend.reserve(len(requests), capacity))

    def run(self) -> list[Result]:
        active = list(self.texts)
        while active:
            self._pass(active)
            for slot in range(len(active) - 1, -1, -1):
                if active[slot].ended:  # from the last slot down: the row that fills a gap has been looked at
                    last = active.pop()
                    if slot < len(active):
                        active[slot] = last
                        self.backend.move(len(active), slot, last.cached)
        return [text.result() for text in self.texts]

    def _pass(self, active: list[_Text]) -> None:
        widths = [text.fed - text.cached for text in active]
        rows, width = len(active), max(widths)
        tokens_BW = np.full((rows, width), self.mask_id, dtype=np.int64)
        columns_BW = np.tile(np.arange(width), (rows, 1))
        last_BW = columns_BW.copy()  # padding sees itself
        wanted, which, positions = [], [], []
        for row, text in enumerate(active):
            tokens_BW[row, : widths[row]] = text.tokens[text.cached : text.fed]
            last_BW[row, : widths[row]] = text.last_seen(np.arange(text.cached, text.fed)) - text.cached
            places = text.open_positions(self.mask_id)
            wanted.append(row * width + places - text.cached)
            which.append(np.full(len(places), text.number))
            positions.append(places)
        logits_MV = self.backend.forward(
            tokens_BW,
            np.array([text.cached for text in active]),
            0,
            np.concatenate(wanted),
            Branches(columns_BW, last_BW, last_BW, last_BW),
        )
        assert logits_MV is not None
        confident = any(text.priority is None for text in active)
        choices = self.sampler.choose(
            logits_MV, np.concatenate(which), np.concatenate(positions), self.table, confidence=confident
        )
        edges = np.cumsum([0, *(len(places) for places in positions)])
        self.stats.passes += 1
        for row, text in enumerate(active):
            part = slice(edges[row], edges[row + 1])
            sure = None if choices.confidence is None else choices.confidence[part]
            taken = text.take(positions[row], choices.tokens[part], choices.near_tie[part], sure)
            self.stats.advances[taken] += 1
            self.stats.row_passes += 1
            self.stats.tokens_forwarded += widths[row]
            self.stats.widest = max(self.stats.widest, widths[row])
            if text.ended:
                self.stats.tokens_produced += text.limit - text.prompt
