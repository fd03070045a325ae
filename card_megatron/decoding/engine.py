"""Continuous batching: requests in, their texts out, over any backend and strategy.

Every row of the batch advances by its own count. One that ends leaves at once: the last row takes its slot (copied
once), so that the active rows are always the first slots and a pass reads views. Waiting prompts join behind them.

Shapes: B rows, W columns of a pass, M outputs that are wanted, V vocabulary.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from card_megatron.decoding.block import Rows, Strategy
from card_megatron.decoding.cache import Branches
from card_megatron.decoding.sampling import Sampler, SamplingParams

PREFILL_CHUNK = 512
"""A longer prompt is read in pieces: the attention mask of a pass stays small."""


class Backend(Protocol):
    """A model with a cache. On several ranks, every rank calls the same with the same and gets the same."""

    vocab_size: int
    """The true vocabulary; logits may be wider."""
    max_positions: int

    def reserve(self, slots: int, capacity: int) -> int:
        """Make room for `slots` rows of `capacity` tokens; returns the bytes of all ranks' keys and values."""
        ...

    def forward(
        self,
        tokens_BW: np.ndarray,
        starts_B: np.ndarray,
        first_slot: int,
        wanted: np.ndarray | None,
        branches: Branches | None = None,
    ) -> torch.Tensor | None:
        """Feed W tokens to each of B rows from its own position on; they may be overwritten by a later call.

        They are a chain, unless `branches` says otherwise. `wanted` are the outputs that become logits [M, V], as
        indices into B x W; None is all of them, none of them gives None. The caller may write to the logits.
        """
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """A row of `length` final tokens takes another slot."""
        ...

    def agree(self, value: int) -> int:
        """The first rank's value, on every rank."""
        ...


@dataclass
class Request:
    """One text to be continued."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: tuple[int, ...] = ()
    stop: Callable[[list[int]], int | None] | None = None
    """Given the tokens generated so far: how many of them to keep and end there, or None to go on."""
    on_tokens: Callable[[list[int]], None] | None = None
    """Given the tokens that a pass added, in order; a later stop may still take the last ones back."""


@dataclass
class Result:
    """What became of a request."""

    tokens: list[int]
    """The generated tokens, with the end of text where one was reached."""
    ended: str
    """eos, length or stop."""
    filled_in: list[int]
    """The row's pass, from 1, that decided each token."""
    passes: int
    near_ties: int
    """Greedy choices whose two best logits were closer than sampling.NEAR_TIE."""


@dataclass
class Stats:
    """What a run of the decoder cost and gave."""

    passes: int = 0
    prefill_passes: int = 0
    tokens_forwarded: int = 0
    """By decoding passes; the padding of narrower rows does not count, nor do prompts."""
    tokens_produced: int = 0
    row_passes: int = 0
    """Passes, counted once for each row in them."""
    advances: Counter[int] = field(default_factory=Counter)
    """Accept lengths: how often a pass lengthened a row by so many tokens."""
    widest: int = 0
    """Most tokens that one row forwarded in one decoding pass: at most strategy.width, whatever its length."""
    seconds: float = 0.0
    cache_bytes: int = 0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens by which a pass lengthens a row, on average."""
        return self.tokens_produced / max(1, self.row_passes)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_produced / self.seconds if self.seconds else 0.0


def decode(
    backend: Backend,
    requests: Sequence[Request],
    strategy: Strategy,
    *,
    mask_id: int,
    forbidden: Iterable[int] = (),
    batch_size: int = 32,
    prefill_tokens: int = 4096,
) -> tuple[list[Result], Stats]:
    """Continue every request; results are in the requests' order, and do not depend on `batch_size`.

    Memory is bounded by batch_size x the longest request. [MASK] and `forbidden` ids are never chosen.
    """
    check_requests(requests, backend, batch_size)
    if not requests:
        return [], Stats()
    with torch.inference_mode():
        return _Run(backend, requests, strategy, mask_id, forbidden, batch_size, prefill_tokens).run()


def check_requests(requests: Sequence[Request], backend: Backend, batch_size: int) -> None:
    """Refuse what cannot be decoded, before anything is."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    for index, request in enumerate(requests):
        length, new = len(request.prompt), request.max_new_tokens
        if not length:
            raise ValueError(
                f"request {index}: a prompt of 0 ids has no output; begin an empty one with the end of text"
            )
        if new < 1:
            raise ValueError(f"request {index}: max_new_tokens={new} must be at least 1")
        if length + new > backend.max_positions:
            raise ValueError(
                f"request {index}: prompt ({length}) + max_new_tokens ({new}) = {length + new} is beyond the model's "
                f"max_position_embeddings={backend.max_positions}; ask for at most "
                f"{max(0, backend.max_positions - length)} new tokens or shorten the prompt"
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < backend.vocab_size:
            raise ValueError(f"request {index}: prompt ids must lie in [0, {backend.vocab_size}): another tokenizer?")


class _Run:
    """One call of decode()."""

    def __init__(self, backend, requests, strategy, mask_id, forbidden, batch_size, prefill_tokens):
        self.backend, self.requests, self.strategy = backend, requests, strategy
        self.slots, self.prefill_tokens = min(batch_size, len(requests)), prefill_tokens
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        capacity = longest + strategy.width + 1  # a narrow row's padding stands behind its end
        self.rows = Rows(self.slots, capacity, mask_id, max(len(request.eos_ids) for request in requests))
        self.sampler = Sampler(self.slots, backend.vocab_size, forbidden, mask_id)
        self.stats = Stats(cache_bytes=backend.reserve(self.slots, capacity))
        self.talks = any(request.stop or request.on_tokens for request in requests)
        self.results: list[Result | None] = [None] * len(requests)
        self.in_slot: list[int] = []
        """The request in each active slot."""
        self.next = 0
        """The first request that still waits."""

    def run(self) -> tuple[list[Result], Stats]:
        began = time.perf_counter()
        while self.in_slot or self.next < len(self.requests):
            self._admit()
            self._pass()
        self.stats.seconds = time.perf_counter() - began
        return [result for result in self.results if result is not None], self.stats

    def _admit(self) -> None:
        """Waiting prompts join, several at a time: reading one prompt costs a pass, reading eight little more."""
        active, waiting = len(self.in_slot), len(self.requests) - self.next
        free = self.slots - active
        if not waiting or free < min(waiting, max(1, self.slots // 8)):
            return
        joining = range(self.next, self.next + min(free, waiting))
        self.next = joining.stop
        for index in sorted(joining, key=lambda number: -len(self.requests[number].prompt)):
            request, slot = self.requests[index], len(self.in_slot)
            self.rows.put(slot, np.asarray(request.prompt), request.max_new_tokens, request.eos_ids)
            self.sampler.put(slot, request.sampling)
            self.in_slot.append(index)
        self._prefill(active)

    def _prefill(self, first: int) -> None:
        """Keys and values of new prompts, longest first; all but the last token, which the first pass feeds."""
        lengths = self.rows.cached[: len(self.in_slot)]
        while first < len(lengths) and lengths[first]:
            longest = int(lengths[first])
            group = lengths[first : first + max(1, self.prefill_tokens // longest)]
            for start in range(0, longest, PREFILL_CHUNK):
                count = int((group > start).sum())
                stop = min(longest, start + PREFILL_CHUNK)
                began = time.perf_counter()
                tokens = self.rows.tokens[first : first + count, start:stop]
                self.backend.forward(tokens, np.full(count, start), first, np.empty(0, dtype=np.int64))
                self.strategy.saw_prefill(tokens.size, time.perf_counter() - began)
                self.stats.prefill_passes += 1
            first += len(group)

    def _pass(self) -> None:
        began, rows, count = time.perf_counter(), self.rows, len(self.in_slot)
        plan = self.strategy.plan(rows, count, self.backend.agree)
        which, columns = plan.wanted_BW.nonzero()
        width = plan.wanted_BW.shape[1]
        wanted = None if len(which) == plan.wanted_BW.size else which * width + columns
        logits_MV = self.backend.forward(plan.tokens_BW, rows.cached[:count].copy(), 0, wanted, plan.branches)
        assert logits_MV is not None
        choices = self.sampler.choose(
            logits_MV,
            which,
            plan.targets_BW[which, columns],
            rows.tokens,
            confidence=self.strategy.needs_confidence,
        )
        before = rows.decided[:count].copy()
        self.strategy.take(rows, plan, choices)
        self.strategy.saw_pass(count, plan.tokens_BW.size, time.perf_counter() - began)
        advanced = rows.decided[:count] - before
        self.stats.passes += 1
        self.stats.row_passes += count
        self.stats.tokens_forwarded += int(plan.widths_B.sum())
        self.stats.widest = max(self.stats.widest, int(plan.widths_B.max()))
        for length, rows_so_long in enumerate(np.bincount(advanced).tolist()):
            if rows_so_long:
                self.stats.advances[length] += rows_so_long
        self._leave(advanced)

    def _leave(self, advanced: np.ndarray) -> None:
        """Rows at their end leave; from the last slot down, so that the row that fills a gap has been looked at."""
        ended = self.rows.decided[: len(advanced)] >= self.rows.limit[: len(advanced)]
        concerned = advanced > 0 if self.talks else ended
        for slot in concerned.nonzero()[0][::-1].tolist():
            stopped = self.talks and self._tell(self.requests[self.in_slot[slot]], slot, int(advanced[slot]))
            if ended[slot] or stopped:
                self._finish(slot, "stop" if stopped else "eos" if self.rows.met_eos[slot] else "length")

    def _tell(self, request: Request, slot: int, advanced: int) -> bool:
        """Call the request's callbacks; True if its text stops here."""
        if request.stop is None and request.on_tokens is None:
            return False
        generated = self.rows.generated(slot)
        keep = request.stop(generated) if request.stop is not None else None
        if keep is not None:
            self.rows.decided[slot] = self.rows.prompt[slot] + min(keep, len(generated))
        shown = self.rows.generated(slot)[len(generated) - advanced :]
        if request.on_tokens is not None and shown:
            request.on_tokens(shown)
        return keep is not None

    def _finish(self, slot: int, ended: str) -> None:
        rows, index, last = self.rows, self.in_slot[slot], len(self.in_slot) - 1
        text = slice(rows.prompt[slot], rows.decided[slot])
        self.results[index] = Result(
            tokens=rows.tokens[slot, text].tolist(),
            ended=ended,
            filled_in=rows.filled_in[slot, text].tolist(),
            passes=int(rows.passes[slot]),
            near_ties=int(rows.near_ties[slot]),
        )
        self.stats.tokens_produced += int(rows.decided[slot] - rows.prompt[slot])
        if slot != last:
            self.backend.move(last, slot, int(rows.cached[last]))
            rows.move(last, slot)
            self.sampler.move(last, slot)
        self.in_slot[slot] = self.in_slot[last]
        self.in_slot.pop()
