"""Likelihoods of masked diffusion, which have a bound alone: the ELBO, by a stated number of noise samples.

Of a text (context, continuation) the context is given clean, and a sample masks N of the continuation's K tokens (for
bd3lm: of each block's) and weighs their nll by K/N, as objectives.mdlm has it: the mean over samples is an estimate
without bias of an upper bound of the continuation's nll. [MASK] has no probability.

The noise is a function of (seed, the text's name, the sample's number), never of a batch, a rank or their number. Noise
levels are spread evenly over a text's samples, so the standard error, which is that of independent ones, errs upwards.

mdlm: everything sees everything, so that every sample is a pass over the whole text.
bd3lm: the clean text is fed once, block by block, and stays in the cache; the noisy blocks of all samples are fed
behind it, each at its own positions, and see the clean blocks before theirs and themselves. So S samples of L tokens
cost L (1 + S), where the [noisy ; clean] of training would cost 2 L S.

Shapes: B rows, W columns of a pass, M outputs, T texts, S samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from card_megatron.config.errors import ConfigError
from card_megatron.config.schema import ObjectiveConfig
from card_megatron.decoding.cache import Branches
from card_megatron.decoding.model import OpenModel
from card_megatron.evaluation.scorer import (
    LOGITS_OF_A_PASS,
    PASS_WIDTH,
    Pair,
    Progress,
    Score,
    Scorer,
    check_pair,
    judge,
    summed_over_replicas,
)
from card_megatron.evaluation.store import request_key
from card_megatron.objectives import OBJECTIVES, Mdlm, build_objective
from card_megatron.objectives.keys import SampleKey


def has_bound(model: OpenModel) -> bool:
    """Its likelihood is a bound, and not exact."""
    return model.objective in OBJECTIVES and OBJECTIVES[model.objective].likelihood == "bound"


def scorer_for(
    model: OpenModel, *, max_length: int | None = None, batch_tokens: int = 8192, samples: int, seed: int = 0
) -> Scorer | BoundScorer:
    """The scorer that a model's objective has; `samples` and `seed` are a bound's."""
    if has_bound(model):
        return BoundScorer(model, max_length=max_length, batch_tokens=batch_tokens, samples=samples, seed=seed)
    return Scorer(model, max_length=max_length, batch_tokens=batch_tokens)


@dataclass(frozen=True)
class _Text:
    """Tokens that are fed; those from `first` on are the continuation."""

    place: int
    """Among the pairs of a call."""
    tokens: np.ndarray
    first: int
    name: str
    """Of its noise."""


@dataclass(frozen=True)
class _Noise:
    """What one sample does to a text, from position `begin` on."""

    begin: int
    masked: np.ndarray
    weights: np.ndarray


class BoundScorer:
    """Scores continuations of contexts. Every rank must call it with the same pairs, and gets all the results."""

    def __init__(
        self,
        model: OpenModel,
        *,
        max_length: int | None = None,
        batch_tokens: int = 8192,
        samples: int = 32,
        seed: int = 0,
    ):
        longest = model.backend.max_positions - 1
        if longest < 1 or (max_length is not None and not 1 <= max_length <= longest + 1):
            raise ConfigError(
                f"max_length={max_length} must lie in 1 .. {longest + 1}, the model's max_position_embeddings"
            )
        if batch_tokens < 1:
            raise ConfigError(f"batch_tokens={batch_tokens} must be at least 1")
        if samples < 2:
            raise ConfigError(f"samples={samples} must be at least 2: one sample has no error bar")
        self.model, self.backend, self.samples, self.seed = model, model.backend, samples, seed
        self.max_length = min(max_length or longest, longest)
        """Tokens behind the first one; the last is fed, too, other than to a causal model, and so this is one less."""
        self.batch_tokens = batch_tokens
        config = ObjectiveConfig(name=model.objective, block_size=model.block_size or 1)  # type: ignore[arg-type]
        built = build_objective(config, mask_id=model.tokenizer.mask, eod_id=model.tokenizer.eod)
        self.objective = cast(Mdlm, built)
        """With noise levels of the whole range, spread evenly, and masks by count, whatever it was trained with."""
        self.truncated = self.scored_here = self.forwarded = 0
        """As evaluation.scorer.Scorer has them; tokens count for every sample that feeds them."""

    def score(
        self,
        pairs: Sequence[Pair],
        *,
        common_noise: bool = False,
        greedy: bool = False,
        progress: Progress | None = None,
    ) -> list[Score]:
        """One Score for each (context, continuation), in their order; neither part may be empty.

        common_noise: continuations of one context share their noise, so that their differences have less of it. Not
        for texts that are added up: their errors would add up, too. greedy: also look whether the continuation is
        what one pass makes of all its masks (for bd3lm: of each block's, given the blocks before).
        """
        texts = [self._text(place, *pair, common_noise=common_noise) for place, pair in enumerate(pairs)]
        # texts of like length together, and to each replica some of every length
        mine = sorted(texts, key=lambda text: (-len(text.tokens), text.place))[
            self.model.replica :: self.model.replicas
        ]
        self.found_TS = np.zeros((len(texts), self.samples + 1))
        """nll of each sample; the last column counts what a pass over all masks gets wrong."""
        self.columns = self.samples + greedy
        with torch.inference_mode():
            done = 0
            for batch in self._batches(mine):
                if self.model.block_size is None:
                    self._score_whole(batch)
                else:
                    self._score_blocks(batch, self.model.block_size)
                done += sum(sample == self.columns - 1 for _, sample in batch)
                if progress is not None:
                    progress(done, len(mine))
        self.scored_here += len(mine)
        return self._gathered(len(texts), greedy)

    def _text(self, place: int, context: Sequence[int], continuation: Sequence[int], *, common_noise: bool) -> _Text:
        tokens = check_pair(place, context, continuation, self.max_length, self.backend.vocab_size)
        self.truncated += len(tokens) > self.max_length + 1
        tokens = tokens[-(self.max_length + 1) :]
        first = len(tokens) - len(continuation)
        name = request_key("noise", tokens[:first], *([] if common_noise else [tokens[first:]]))
        return _Text(place, np.asarray(tokens, dtype=np.int64), first, name)

    def _noise(self, text: _Text, sample: int) -> _Noise:
        """Of the continuation alone: beginnings of equal continuations have equal noise where the name is the same."""
        size, length = self.model.block_size, len(text.tokens)
        begin = text.first if size is None else text.first - text.first % size
        end = length if size is None else begin + -(-(length - begin) // size) * size
        positions = np.arange(begin, end)
        scored = (positions >= text.first) & (positions < length)
        if sample == self.samples:
            masked, weights = scored, scored.astype(float)
        else:
            masked, weights, _ = self.objective.noise(scored, SampleKey(self.seed, text.name, sample))
        return _Noise(begin, masked[: length - begin], weights[: length - begin])

    def _batches(self, texts: list[_Text]) -> Iterator[list[tuple[_Text, int]]]:
        """Passes over (text, sample), widest first. A text of bd3lm has one row for all its samples: its last one."""
        whole = self.model.block_size is None
        rows = [(text, sample) for text in texts for sample in (range(self.columns) if whole else [self.columns - 1])]
        first = 0
        while first < len(rows):
            length = len(rows[first][0].tokens)
            # bd3lm's passes over noisy blocks are PASS_WIDTH wide, whatever the text's length
            width = length if whole else max(length, PASS_WIDTH)
            count = max(1, min(self.batch_tokens, LOGITS_OF_A_PASS // self.backend.vocab_size) // width)
            yield rows[first : first + count]
            first += count

    # ------------------------------------------------------------ mdlm

    def _score_whole(self, batch: list[tuple[_Text, int]]) -> None:
        width = max(len(text.tokens) for text, _ in batch)
        tokens_BW = np.full((len(batch), width), self.objective.mask_id, dtype=np.int64)
        columns_BW = np.tile(np.arange(width), (len(batch), 1))
        last_BW = columns_BW.copy()  # padding sees itself
        reads = []
        for row, (text, sample) in enumerate(batch):
            noise = self._noise(text, sample)
            noisy = text.tokens.copy()
            noisy[noise.begin :][noise.masked] = self.objective.mask_id
            tokens_BW[row, : len(noisy)] = noisy
            last_BW[row, : len(noisy)] = len(noisy) - 1
            places = np.flatnonzero(noise.masked)
            reads.append(self._reads(text, sample, noise, places, row * width + noise.begin + places))
            self.forwarded += len(noisy)
        self.backend.reserve(len(batch), width)
        starts_B = np.zeros(len(batch), dtype=np.int64)
        self._judge(tokens_BW, starts_B, Branches(columns_BW, last_BW, last_BW, last_BW), reads)

    # ------------------------------------------------------------ bd3lm

    def _score_blocks(self, batch: list[tuple[_Text, int]], size: int) -> None:
        texts = [text for text, _ in batch]
        piece = max(1, PASS_WIDTH // size) * size  # whole blocks
        longest = max(len(text.tokens) for text in texts)
        self.backend.reserve(len(texts), longest + piece)
        self._feed_clean(texts, size, piece)
        starts_B = np.array([len(text.tokens) for text in texts])
        queues = [list(self._noisy_blocks(text, size)) for text in texts]
        for begin in range(0, max(len(queue) for queue in queues), piece // size):
            parts = [queue[begin : begin + piece // size] for queue in queues]
            width = max(sum(len(tokens) for _, tokens, *_ in part) for part in parts)
            tokens_BW = np.full((len(texts), width), self.objective.mask_id, dtype=np.int64)
            positions_BW = np.tile(np.arange(width), (len(texts), 1))
            trunk_BW, branch_BW, last_BW = (positions_BW.copy() for _ in range(3))  # padding
            reads = []
            for row, (text, part) in enumerate(zip(texts, parts, strict=True)):
                column, behind = 0, len(text.tokens)
                for start, tokens, noise, sample in part:
                    here = slice(column, column + len(tokens))
                    tokens_BW[row, here] = tokens
                    positions_BW[row, here] = start - behind + np.arange(len(tokens))
                    trunk_BW[row, here], branch_BW[row, here], last_BW[row, here] = (
                        *(start - behind - 1, column, column + len(tokens) - 1),
                    )
                    offset = start - noise.begin
                    places = offset + np.flatnonzero(noise.masked[offset : offset + len(tokens)])
                    reads.append(self._reads(text, sample, noise, places, row * width + column + places - offset))
                    column += len(tokens)
                self.forwarded += column
            self._judge(tokens_BW, starts_B, Branches(positions_BW, trunk_BW, branch_BW, last_BW), reads)

    def _feed_clean(self, texts: list[_Text], size: int, piece: int) -> None:
        """Keys and values of the clean blocks before the last: a clean block sees itself and those before it."""
        needed = [(len(text.tokens) - 1) // size * size for text in texts]
        for begin in range(0, max(needed), piece):
            rows = sum(stop > begin for stop in needed)  # the longest texts come first
            width = min(piece, needed[0] - begin)
            tokens_BW = np.zeros((rows, width), dtype=np.int64)
            for row, text in enumerate(texts[:rows]):
                stop = min(needed[row], begin + width)
                tokens_BW[row, : stop - begin] = text.tokens[begin:stop]
                self.forwarded += stop - begin
            columns_BW = np.tile(np.arange(width), (rows, 1))
            last_BW = np.minimum((columns_BW // size + 1) * size, width) - 1
            branches = Branches(columns_BW, last_BW, last_BW, last_BW)
            self.backend.forward(tokens_BW, np.full(rows, begin), 0, np.empty(0, dtype=np.int64), branches)

    def _noisy_blocks(self, text: _Text, size: int) -> Iterator[tuple[int, np.ndarray, _Noise, int]]:
        """(first position, tokens, noise of its sample, sample) of every block that has something to score."""
        for sample in range(self.columns):
            noise = self._noise(text, sample)
            noisy = text.tokens.copy()
            noisy[noise.begin :][noise.masked] = self.objective.mask_id
            for start in range(noise.begin, len(text.tokens), size):
                yield start, self._whole_block(noisy[start : start + size], size), noise, sample

    def _whole_block(self, tokens: np.ndarray, size: int) -> np.ndarray:
        """What stands behind the end of a text is unknown, and masked, as in training."""
        return np.concatenate([tokens, np.full(size - len(tokens), self.objective.mask_id)])

    # ------------------------------------------------------------ results

    def _reads(
        self, text: _Text, sample: int, noise: _Noise, places: np.ndarray, outputs: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """(output, target, text, sample, weight) of masked `places`, which count from the noise's begin."""
        whole = np.full(len(places), text.place), np.full(len(places), sample)
        return outputs, text.tokens[noise.begin + places], *whole, noise.weights[places]

    def _judge(
        self, tokens_BW: np.ndarray, starts_B: np.ndarray, branches: Branches, reads: list[tuple[np.ndarray, ...]]
    ) -> None:
        outputs, targets, texts, samples, weights = (np.concatenate(column) for column in zip(*reads, strict=True))
        logits_MV = self.backend.forward(tokens_BW, starts_B, 0, outputs, branches)
        if logits_MV is None:
            return
        logits_MV[:, self.objective.mask_id] = float("-inf")
        logprobs, best = judge(logits_MV[:, : self.backend.vocab_size], np.arange(len(outputs)), targets)
        values = np.where(samples == self.samples, ~best, -weights * logprobs)
        np.add.at(self.found_TS, (texts, samples), values)

    def _gathered(self, texts: int, greedy: bool) -> list[Score]:
        if self.model.replicas > 1:
            self.found_TS = summed_over_replicas(self.found_TS, counts=self.model.leads)
        nll_TS, wrong_T = self.found_TS[:, :-1], self.found_TS[:, -1]
        errors = nll_TS.std(axis=1, ddof=1) / math.sqrt(self.samples)
        return [
            Score(-float(nll_TS[place].mean()), greedy and not wrong_T[place], error=float(errors[place]))
            for place in range(texts)
        ]
