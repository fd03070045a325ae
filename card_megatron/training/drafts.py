"""How well the model drafts: accept lengths of block decoding on validation text, by two forward passes.

The last K inputs of each sample become [MASK]: the outputs there are the next token and K drafts behind it. A second
pass over that token and the drafts gives the model's own choices after them; drafts count up to the first that differs.
It is what decoding's `verify` does, without a cache, in the layout of the training run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from card_megatron.config.schema import ObjectiveConfig
from card_megatron.data.loader import Batch, next_batch
from card_megatron.model.attention import zigzag_positions
from card_megatron.objectives import Objective
from card_megatron.objectives.arm import clean_sample
from card_megatron.objectives.base import Sample
from card_megatron.objectives.keys import SampleKey
from card_megatron.training.state import TrainState


class Tail(Objective):
    """Replaces the last K inputs of each sample: by [MASK], or by what is given for it."""

    def __init__(self, count: int, *, mask_id: int, eod_id: int, instead: dict[int, list[int]] | None = None):
        super().__init__(ObjectiveConfig(), mask_id=mask_id, eod_id=eod_id)
        self.count, self.instead = count, instead or {}

    def corrupt(self, tokens: np.ndarray, labels: np.ndarray, supervised: np.ndarray, key: SampleKey) -> Sample:
        tokens = tokens.copy()
        tokens[-self.count :] = self.instead.get(key.index, self.mask_id)
        return clean_sample(tokens, labels, supervised)


Passes = Callable[[Objective, Callable], list[dict[int, list[int]]]]
"""Runs the model over the samples that an objective makes, with a forward step of ours; returns what it collected."""


def draft_metrics(state: TrainState, passes: Passes) -> dict[str, float]:
    """Mean accept length of K drafts, and passes per token of `verify` at that length. All ranks must call this.

    A pass that verifies gives 1 + accept length tokens; after a rejection a pass has nothing to verify, and gives one.
    """
    count = state.config.eval.drafts
    objective = partial(Tail, count, mask_id=state.objective.mask_id, eod_id=state.objective.eod_id)
    drafted = on_all_ranks(passes(objective(), forward_step(state, count + 1)))
    # the next token and all drafts but the last are inputs now; its output position is beyond the sample
    inputs = {index: tokens[:-1] for index, tokens in drafted.items()}
    chosen = on_all_ranks(passes(objective(instead=inputs), forward_step(state, count)))
    lengths = [accept_length(tokens[1:], chosen[index]) for index, tokens in drafted.items()]
    mean = sum(lengths) / max(1, len(lengths))
    whole = sum(length == count for length in lengths) / max(1, len(lengths))
    return {"accept_length": mean, "passes_per_token": 1 / (1 + mean / (2 - whole))}


def accept_length(drafts: list[int], chosen: list[int]) -> int:
    """Drafts before the first that the model would not have chosen."""
    for length, (draft, choice) in enumerate(zip(drafts, chosen, strict=True)):
        if draft != choice:
            return length
    return len(drafts)


def forward_step(state: TrainState, last: int) -> Callable:
    """Megatron's forward_step_func that collects sample -> best tokens of its last positions."""

    def step(iterator: Any, chunk: Any):
        batch = None
        if get_attr_wrapped_model(chunk, "pre_process") or get_attr_wrapped_model(chunk, "post_process"):
            batch = next_batch(iterator)
        logits = chunk(None if batch is None else batch.tokens, None, None)
        return logits, None if batch is None else partial(collect, state, batch, last)

    return step


def collect(state: TrainState, batch: Batch, last: int, logits_BSV: torch.Tensor):
    """The form that Megatron's schedules want: (loss, count, what is kept)."""
    best_BS = whole_sequence(best_tokens(logits_BSV, state))[:, -last:]
    kept = {index: tokens for index, tokens in zip(batch.index.tolist(), best_BS.tolist(), strict=True) if index >= 0}
    return logits_BSV.new_zeros(()), torch.zeros((), dtype=torch.int, device=logits_BSV.device), kept


def best_tokens(logits_BSV: torch.Tensor, state: TrainState) -> torch.Tensor:
    """int64[B, S]: the argmax over the true vocabulary without [MASK], of which this rank may hold a part."""
    first = parallel_state.get_tensor_model_parallel_rank() * logits_BSV.shape[-1]
    logits = logits_BSV.detach().float().clone()
    ids = torch.arange(first, first + logits.shape[-1], device=logits.device)
    assert state.config.model.vocab_size is not None
    logits[..., (ids >= state.config.model.vocab_size) | (ids == state.objective.mask_id)] = float("-inf")
    values, places = logits.max(dim=-1)
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return places
    all_values, all_ids = (gathered(x, group) for x in (values, places + first))
    return all_ids.gather(0, all_values.argmax(dim=0, keepdim=True))[0]


def whole_sequence(best_BS: torch.Tensor) -> torch.Tensor:
    """The positions of all context-parallel ranks, in order."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return best_BS
    parts = gathered(best_BS, group)
    order = torch.cat([zigzag_positions(best_BS.shape[1] * group.size(), group.size(), r) for r in range(group.size())])
    return torch.cat(list(parts), dim=1)[:, order.argsort().to(best_BS.device)]


def gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """[ranks, ...] of a group."""
    everyone = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(everyone, x.contiguous(), group=group)
    return torch.stack(everyone)


def on_all_ranks(collected: list[dict[int, list[int]]]) -> dict[int, list[int]]:
    """What any rank knows: only the last stage has outputs, and each replica has its own samples."""
    mine = {index: tokens for part in collected for index, tokens in part.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return dict(sorted({index: tokens for part in everyone for index, tokens in part.items()}.items()))
