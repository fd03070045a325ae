"""Choosing tokens from logits: filters of each request's own, and noise that is a function of what is chosen.

The noise of a choice is keyed by (the request's seed, position in the row, token id) and added to the filtered logits
(the Gumbel trick: the argmax of logits + Gumbel noise is a sample of their softmax). Nothing is stateful, so a row's
text does not depend on the batch, the slot, the layout, nor on how many tokens a pass decides: a draft and the
verification of its position share their noise.

Shapes: M choices, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

NEAR_TIE = 1e-4
"""Two best logits closer than this may change places with the batch size: rounding differs."""
GOLDEN_STEP = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's increment, as int64 has it
FINALISER = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen; the default is greedy."""

    temperature: float = 0.0
    """0 takes the best token; filters apply to sampling alone, the repetition penalty to both."""
    top_k: int = 0
    """Keep the k best; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest best tokens whose probabilities reach this."""
    min_p: float = 0.0
    """Keep tokens at least this likely, relative to the best."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens that stand before the position (multiplies negative ones)."""
    seed: int = 0

    def __post_init__(self):
        for name, valid, rule in (
            ("temperature", self.temperature >= 0, "at least 0; 0 is greedy"),
            ("top_k", self.top_k >= 0, "at least 0; 0 keeps all"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]; 1 keeps all"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]; 0 keeps all"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0; 1 changes nothing"),
        ):
            if not valid:  # also where it is nan
                raise ValueError(f"{name}={getattr(self, name)} must be {rule}")


@dataclass
class Choices:
    """M choices; what it costs to know more than the tokens is spent only where it was asked for."""

    tokens: np.ndarray
    near_tie: np.ndarray
    """Greedy choices whose two best logits were closer than NEAR_TIE."""
    confidence: np.ndarray | None
    """Top probability over the allowed vocabulary: no filter, no penalty, temperature 1."""


class Sampler:
    """Chooses for the rows of a batch, each by the parameters that its slot was given."""

    def __init__(self, slots: int, vocab_size: int, forbidden: Iterable[int], mask_id: int):
        self.vocab_size, self.mask_id = vocab_size, mask_id
        self.forbidden = torch.tensor(sorted({mask_id, *forbidden}), dtype=torch.int64)
        if not 0 <= int(self.forbidden[0]) <= int(self.forbidden[-1]) < vocab_size:
            raise ValueError(
                f"forbidden ids {self.forbidden.tolist()} must lie in the vocabulary of {vocab_size}; "
                "ids beyond it are never chosen anyway"
            )
        self.temperature, self.top_p, self.min_p, self.penalty = np.zeros((4, slots), dtype=np.float32)
        self.top_k, self.seed = np.zeros((2, slots), dtype=np.int64)

    def put(self, slot: int, params: SamplingParams) -> None:
        self.temperature[slot], self.top_k[slot] = params.temperature, params.top_k
        self.top_p[slot], self.min_p[slot] = params.top_p, params.min_p
        self.penalty[slot], self.seed[slot] = params.repetition_penalty, signed64(params.seed)

    def move(self, source: int, target: int) -> None:
        for column in (self.temperature, self.top_k, self.top_p, self.min_p, self.penalty, self.seed):
            column[target] = column[source]

    def choose(
        self,
        logits_MV: torch.Tensor,
        rows_M: np.ndarray,
        positions_M: np.ndarray,
        tokens: np.ndarray,
        *,
        confidence: bool = False,
    ) -> Choices:
        """Tokens for `positions_M` of the rows in slots `rows_M`; the logits are written to.

        `tokens` is the table of all slots' tokens, [MASK] where undecided, which the repetition penalty looks into.
        """
        logits = logits_MV[:, : self.vocab_size].float()
        logits.index_fill_(1, self.forbidden.to(logits.device), float("-inf"))
        sure = top_probability(logits).cpu().numpy() if confidence else None
        if (penalised := self.penalty[rows_M] != 1).any():
            self._penalise(logits, rows_M, positions_M, tokens, penalised)
        sampled = self.temperature[rows_M] > 0
        if sampled.all():
            best = argmax(self._noisy(logits, rows_M, positions_M))
            near_tie = torch.zeros(len(rows_M), dtype=torch.bool)
        else:
            best = argmax(logits)
            close = logits > logits.gather(1, best[:, None]) - NEAR_TIE
            near_tie = close.sum(1) > 1
            if sampled.any():
                which = torch.from_numpy(sampled.nonzero()[0]).to(logits.device)
                best[which] = argmax(self._noisy(logits[which], rows_M[sampled], positions_M[sampled]))
                near_tie[which] = False
        return Choices(best.cpu().numpy(), near_tie.cpu().numpy(), sure)

    def _penalise(self, logits, rows_M, positions_M, tokens, penalised) -> None:
        """In place. What a position has seen: all real tokens before it, drafts among them."""
        rows, positions = rows_M[penalised], positions_M[penalised]
        before = np.arange(positions.max(initial=0))[None, :] < positions[:, None]
        # undecided and later positions count as [MASK], whose logit is -inf whatever divides it
        seen = np.where(before, tokens[rows, : before.shape[1]], self.mask_id)
        which = torch.from_numpy(penalised.nonzero()[0]).to(logits.device)
        strength = torch.from_numpy(self.penalty[rows]).to(logits.device)[:, None]
        part, seen_ids = logits[which], torch.from_numpy(seen).to(logits.device)
        chosen = part.gather(1, seen_ids)
        part.scatter_(1, seen_ids, torch.where(chosen < 0, chosen * strength, chosen / strength))
        logits[which] = part

    def _noisy(self, logits_MV: torch.Tensor, rows_M: np.ndarray, positions_M: np.ndarray) -> torch.Tensor:
        def column(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values[rows_M]).to(logits_MV.device)

        scores = filtered(
            logits_MV / column(self.temperature)[:, None],
            top_k=column(self.top_k) if self.top_k[rows_M].any() else None,
            top_p=column(self.top_p) if (self.top_p[rows_M] < 1).any() else None,
            min_p=column(self.min_p) if self.min_p[rows_M].any() else None,
        )
        positions = torch.from_numpy(np.ascontiguousarray(positions_M)).to(logits_MV.device)
        return scores + keyed_gumbel(column(self.seed), positions, logits_MV.shape[1])


def filtered(
    scores_MV: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """-inf where a filter drops a token; the filters [M], their rules and their order are transformers' own."""
    never = float("-inf")
    if top_k is not None:
        size = scores_MV.shape[1]
        keep = torch.where(top_k > 0, top_k.clamp(max=size), size)
        most = int(keep.where(keep < size, 1).max())
        worst_kept = scores_MV.topk(most, dim=1).values.gather(1, keep.clamp(max=most)[:, None] - 1)
        scores_MV = scores_MV.masked_fill((scores_MV < worst_kept) & (keep < size)[:, None], never)
    if top_p is not None:
        ascending, order = scores_MV.sort(dim=1)
        unlikely = ascending.softmax(dim=1).cumsum(dim=1) <= (1 - top_p)[:, None]
        unlikely[:, -1] = False
        unlikely &= (top_p < 1)[:, None]
        scores_MV = scores_MV.masked_fill(torch.zeros_like(unlikely).scatter_(1, order, unlikely), never)
    if min_p is not None:
        probability = scores_MV.softmax(dim=1)
        floor = min_p[:, None] * probability.amax(dim=1, keepdim=True)
        scores_MV = scores_MV.masked_fill(probability < floor, never)
    return scores_MV


def top_probability(logits_MV: torch.Tensor) -> torch.Tensor:
    return (logits_MV.amax(dim=1) - logits_MV.logsumexp(dim=1)).exp()


def argmax(scores_MV: torch.Tensor) -> torch.Tensor:
    """The first of the best; on the CPU by numpy, whose argmax is vectorised and torch's is not."""
    if scores_MV.device.type == "cpu":
        return torch.from_numpy(scores_MV.numpy().argmax(axis=1))
    return scores_MV.argmax(dim=1)


def keyed_gumbel(seeds_M: torch.Tensor, positions_M: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise [M, V], a pure function of (seed, position, token id)."""
    # -log1p(-u) is exponential, and exact to float32's last bits where it is small: there the winners are
    return -torch.log(-torch.log1p(-keyed_uniform(seeds_M, positions_M, vocab_size)))


def keyed_uniform(seeds_M: torch.Tensor, positions_M: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Numbers [M, V] in (0, 1): the splitmix64 sequence of a key that (seed, position) hash to, at the token's id."""
    key = scrambled(scrambled(seeds_M + GOLDEN_STEP) + (positions_M + 1) * GOLDEN_STEP)
    ids = torch.arange(1, vocab_size + 1, device=seeds_M.device) * GOLDEN_STEP
    bits = shifted(scrambled(key[:, None] + ids), 11)
    return ((bits.float() + 0.5) * 2.0**-53).clamp_(max=1 - 2.0**-24)


def scrambled(state: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser; torch's int64 wraps as uint64 does."""
    for shift, factor in FINALISER:
        state = (state ^ shifted(state, shift)) * factor
    return state ^ shifted(state, 31)


def shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right; torch's own keeps the sign."""
    return (state >> bits) & (2 ** (64 - bits) - 1)


def signed64(number: int) -> int:
    """Any integer as the int64 with the same low 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
