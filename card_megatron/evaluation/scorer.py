"""Exact log-likelihoods in one pass, of any model that decoding can open.

A causal model with a clean prefix is an autoregressive one, so CARD's likelihood is exact: what a diffusion model
estimates with many noisy passes is one forward pass here. Sequences are sorted, prefixes that they share are fed once
(evaluation.prefixes), rows of like width make a pass, and replicas take a share each.

Shapes: B rows, W columns of a pass, M outputs, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from card_megatron.config.errors import ConfigError
from card_megatron.decoding.model import OpenModel
from card_megatron.decoding.sampling import argmax
from card_megatron.evaluation.prefixes import Node, Sorted, prefix_forest, shares, sort_sequences

EXACT = frozenset({"arm", "card"})
"""Objectives whose likelihood is exact in one pass; others have a bound alone, and would need another scorer."""
PASS_WIDTH = 512
"""Columns of a pass: a longer stretch is fed in pieces, so that the attention's mask stays small."""
CACHED_TOKENS = 4
"""Tokens in the cache, as a multiple of those of a pass: endings are narrow, and stand behind long contexts."""
LOGITS_OF_A_PASS = 2**27
"""Most logits that a pass may make: 512 MB of them."""
NARROW, ENOUGH = 0.85, 8
"""A pass that has 1 / ENOUGH of the tokens that it may have takes in no row of less than NARROW of its width."""
SLICE = 2**22
"""Logits that are looked at together: what a softmax needs beside them stays small."""

Pair = tuple[Sequence[int], Sequence[int]]
Progress = Callable[[int, int], None]
"""Given how many of this replica's requests are done, and how many it has."""


@dataclass(frozen=True)
class Score:
    """What a model thinks of one continuation."""

    logprob: float
    """Sum over the continuation's tokens; over the true vocabulary, as transformers has it from exported weights."""
    greedy: bool
    """Every token of the continuation is the likeliest one."""
    token_logprobs: tuple[float, ...] = ()
    """Of each token; filled where it was asked for."""
    error: float = 0.0
    """Standard error of logprob, where it is an estimate (evaluation.bound)."""


@dataclass
class _Request:
    """Tokens that are fed, and the outputs that are read: those at positions `first` and behind predict `targets`."""

    fed: list[int]
    targets: np.ndarray
    first: int


class Scorer:
    """Scores continuations of contexts. Every rank must call it with the same pairs, and gets all the results."""

    def __init__(self, model: OpenModel, *, max_length: int | None = None, batch_tokens: int = 8192):
        if model.objective not in EXACT:
            raise ConfigError(
                f"objective {model.objective}: its likelihood is not exact in one pass; "
                f"this works for {' and '.join(sorted(EXACT))}"
            )
        backend = model.backend
        if max_length is not None and not 1 <= max_length <= backend.max_positions:
            raise ConfigError(
                f"max_length={max_length} must lie in 1 .. {backend.max_positions}, the model's max_position_embeddings"
            )
        if batch_tokens < 1:
            raise ConfigError(f"batch_tokens={batch_tokens} must be at least 1")
        self.model, self.backend = model, backend
        self.max_length = max_length or backend.max_positions
        self.batch_tokens = batch_tokens
        self.truncated = 0
        """Pairs that were longer than max_length, and lost tokens on their left."""
        self.scored_here = 0
        """Pairs that this rank's replica has processed."""
        self.forwarded = 0
        """Tokens that this rank's replica has fed, padding aside; shared prefixes count once."""

    def score(
        self,
        pairs: Sequence[Pair],
        *,
        per_token: bool = False,
        progress: Progress | None = None,
        instead: int | None = None,
    ) -> list[Score]:
        """One Score for each (context, continuation), in their order; neither part may be empty.

        `instead` is fed in place of the continuation's tokens: with [MASK], each is predicted through those before it.
        """
        requests = [self._request(index, *pair, instead) for index, pair in enumerate(pairs)]
        known = sort_sequences([request.fed for request in requests])
        mine = shares(known, self.model.replicas)[self.model.replica]
        lengths = [len(request.targets) for request in requests]
        results = _Results(lengths)
        run = _Run(self, requests, known, mine, results, progress)
        with torch.inference_mode():
            run.run()
        self.scored_here += run.total
        self.forwarded += run.forwarded
        if self.model.replicas > 1:
            results.gather(counts=self.model.leads)
        return results.scores(per_token)

    def _request(
        self, index: int, context: Sequence[int], continuation: Sequence[int], instead: int | None
    ) -> _Request:
        """As the harness cuts a pair: the last max_length + 1 tokens, of which the last is predicted and not fed."""
        tokens = check_pair(index, context, continuation, self.max_length, self.backend.vocab_size)
        if len(tokens) > self.max_length + 1:
            self.truncated += 1
            tokens = tokens[-(self.max_length + 1) :]
        fed = tokens[:-1]
        first = len(fed) - len(continuation)
        if instead is not None:
            fed[first + 1 :] = [instead] * (len(continuation) - 1)
        return _Request(fed, np.asarray(continuation, dtype=np.int64), first)


def summed_over_replicas(table: np.ndarray, *, counts: bool) -> np.ndarray:
    """The sum of the tables of all ranks that count."""
    shared = torch.from_numpy(table)
    if not counts:
        shared.zero_()
    if dist.get_backend() == "nccl":
        shared = shared.cuda()
    dist.all_reduce(shared)
    return shared.cpu().numpy()


def check_pair(
    index: int, context: Sequence[int], continuation: Sequence[int], max_length: int, vocab_size: int
) -> list[int]:
    """The tokens of both; refuses what cannot be scored."""
    if not len(context) or not len(continuation):
        raise ValueError(
            f"pair {index}: context ({len(context)} ids) and continuation ({len(continuation)} ids) need an id "
            "each; begin an empty context with the end of text"
        )
    if len(continuation) > max_length:
        raise ConfigError(
            f"pair {index}: a continuation of {len(continuation)} tokens is beyond max_length={max_length}; "
            "score a long text in windows (loglikelihood_rolling, card eval perplexity)"
        )
    tokens = [*context, *continuation]
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ConfigError(
            f"pair {index}: ids must lie in [0, {vocab_size}), the model's vocabulary; "
            "was it trained with another tokenizer?"
        )
    return tokens


class _Results:
    """Of all pairs: one number for each token of each continuation, its greedy flag in a second table."""

    def __init__(self, lengths: Sequence[int]):
        self.edges = np.cumsum([0, *lengths])
        self.logprobs, self.greedy = np.zeros((2, int(self.edges[-1])))

    def put(self, places: np.ndarray, logprobs: np.ndarray, greedy: np.ndarray) -> None:
        self.logprobs[places], self.greedy[places] = logprobs, greedy

    def gather(self, *, counts: bool) -> None:
        """Put the replicas' shares together on all ranks; one rank of each replica counts, the others have the same."""
        self.logprobs, self.greedy = summed_over_replicas(np.stack([self.logprobs, self.greedy]), counts=counts)

    def scores(self, per_token: bool) -> list[Score]:
        if len(self.edges) == 1:
            return []
        sums = np.add.reduceat(self.logprobs, self.edges[:-1]).tolist()
        greedy = np.logical_and.reduceat(self.greedy, self.edges[:-1]).tolist()
        if not per_token:
            return [Score(*found) for found in zip(sums, greedy, strict=True)]
        tokens = self.logprobs.tolist()
        parts = (tuple(tokens[first:last]) for first, last in pairwise(self.edges.tolist()))
        return [Score(*found) for found in zip(sums, greedy, parts, strict=True)]


class _Run:
    """One call of score() on one replica."""

    def __init__(
        self,
        scorer: Scorer,
        requests: list[_Request],
        known: Sorted,
        mine: range,
        results: _Results,
        progress: Progress | None,
    ):
        self.backend, self.batch_tokens = scorer.backend, scorer.batch_tokens
        self.requests, self.known, self.mine, self.results, self.progress = requests, known, mine, results, progress
        self.done, self.total = 0, sum(len(known.readers[index]) for index in mine)
        self.forwarded = 0
        self.rows, self.capacity = 1, 1

    def run(self) -> None:
        """Trees of like length together, longest first: the cache is as long as they are and no longer."""
        trees = prefix_forest(self.known, self.mine)
        longest = {id(tree): max(node.stop for node in tree.walk()) for tree in trees}
        by_length: dict[int, list[Node]] = {}
        for tree in trees:
            by_length.setdefault(_rounded_up(longest[id(tree)]), []).append(tree)
        for length in sorted(by_length, reverse=True):
            group = by_length[length]
            levels = max(tree.depth for tree in group)
            self.capacity = max(longest[id(tree)] for tree in group) + 1
            self.rows = max(1, CACHED_TOKENS * self.batch_tokens // (self.capacity * levels))
            self.backend.reserve(self.rows * levels, self.capacity)
            self._level([(tree, -1) for tree in group], 0)

    def _level(self, nodes: list[tuple[Node, int]], first_slot: int) -> None:
        """Feed nodes whose prefixes stand in slots of the levels above (-1: none), then what is below them."""
        nodes = sorted(nodes, key=lambda item: (-item[0].width, -item[0].start, item[0].first))
        while nodes:
            batch = self._batch(nodes)
            nodes = nodes[len(batch) :]
            for slot, (node, parent) in enumerate(batch, first_slot):
                if node.start:
                    self.backend.move(parent, slot, node.start)
            self._feed([node for node, _ in batch], first_slot)
            below = [(child, slot) for slot, (node, _) in enumerate(batch, first_slot) for child in node.children]
            if below:
                self._level(below, first_slot + len(batch))
            self._report(batch)

    def _batch(self, nodes: list[tuple[Node, int]]) -> list[tuple[Node, int]]:
        """The first nodes that make one pass; they are sorted by width, so the first is the widest."""
        width = nodes[0][0].width
        rows = max(1, min(self.rows, self.batch_tokens // min(width, PASS_WIDTH)))
        count = 0
        for node, _ in nodes[:rows]:
            beyond = node.start + width > self.capacity  # padding is written, too
            # a narrow row would be computed as a wide one: better in a pass of its own kind, once this one is worth it
            narrow = node.width < NARROW * width and count * width * ENOUGH >= self.batch_tokens
            if count and (beyond or narrow):
                break
            count += 1
        return nodes[: max(1, count)]

    def _feed(self, nodes: list[Node], first_slot: int) -> None:
        width, starts_B = nodes[0].width, np.array([node.start for node in nodes])
        tokens_BW = np.zeros((len(nodes), width), dtype=np.int64)
        for row, node in enumerate(nodes):
            tokens_BW[row, : node.width] = self.known.sequences[node.first][node.start : node.stop]
            self.forwarded += node.width
        reads = self._reads(nodes)
        piece = min(PASS_WIDTH, max(1, LOGITS_OF_A_PASS // (self.backend.vocab_size * len(nodes))))
        for begin in range(0, width, piece):
            rows = sum(node.width > begin for node in nodes)
            columns = slice(begin, min(width, begin + piece))
            here = reads[(reads[:, 1] >= columns.start) & (reads[:, 1] < columns.stop)]
            outputs, which = np.unique(here[:, 0] * (columns.stop - begin) + here[:, 1] - begin, return_inverse=True)
            logits_MV = self.backend.forward(tokens_BW[:rows, columns], starts_B[:rows] + begin, first_slot, outputs)
            if logits_MV is not None:
                self.results.put(here[:, 3], *judge(logits_MV[:, : self.backend.vocab_size], which, here[:, 2]))

    def _reads(self, nodes: list[Node]) -> np.ndarray:
        """(row, column, target, place in the results) of every output that some request reads from these nodes."""
        found = []
        for row, node in enumerate(nodes):
            for host in range(node.first, node.last):
                for index in self.known.readers[host]:
                    request = self.requests[index]
                    first, last = max(node.start, request.first), min(node.stop, len(request.fed))
                    if first >= last:
                        continue
                    positions = np.arange(first, last)
                    part = positions - request.first
                    rows = np.full(len(positions), row)
                    places = self.results.edges[index] + part
                    found.append(np.stack([rows, positions - node.start, request.targets[part], places], axis=1))
        return np.concatenate(found) if found else np.zeros((0, 4), dtype=np.int64)

    def _report(self, batch: list[tuple[Node, int]]) -> None:
        for node, _ in batch:
            if not node.children:
                self.done += sum(len(self.known.readers[host]) for host in range(node.first, node.last))
        if self.progress is not None:
            self.progress(self.done, self.total)


def judge(logits_MV: torch.Tensor, which: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(log-probability, is the likeliest) of each target, whose output is logits_MV[which]; in fp32."""
    normaliser = np.empty(len(logits_MV), dtype=np.float32)
    best = np.empty(len(logits_MV), dtype=np.int64)
    rows = max(1, SLICE // logits_MV.shape[1])
    for begin in range(0, len(logits_MV), rows):
        part = logits_MV[begin : begin + rows].float()
        normaliser[begin : begin + rows] = part.logsumexp(dim=1).cpu().numpy()
        best[begin : begin + rows] = argmax(part).cpu().numpy()
    at = (torch.from_numpy(index).to(logits_MV.device) for index in (which, targets))
    chosen = logits_MV[tuple(at)].float().cpu().numpy()
    return chosen.astype(np.float64) - normaliser[which], best[which] == targets


def _rounded_up(length: int) -> int:
    """A power of two, 64 at least."""
    return max(64, 1 << (length - 1).bit_length())
