"""Micro-batches in the one order of the run, whatever the layout: the only state is how many samples are consumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.utils import get_batch_on_this_cp_rank

from card_megatron.data.workers import heed_parent_only

INTEGERS = ("tokens", "labels", "supervised")
PER_SAMPLE = ("index",)
REALS = ("weights", "t")


@dataclass
class Batch:
    """A micro-batch as this rank's model sees it. B rows; S positions, those of this context-parallel rank."""

    tokens: torch.Tensor
    """int64[B, copies * S]: inputs, with noise; an objective may feed its text more than once."""
    labels: torch.Tensor
    """int64[B, S]: clean targets."""
    weights: torch.Tensor
    """float32[B, S]: what each prediction's loss counts."""
    supervised: torch.Tensor
    """int64[B, S]: 1 where a position belongs to the loss's denominator."""
    t: torch.Tensor
    """float32[B]: noise level."""
    index: torch.Tensor
    """int64[B]: place in the order of the run; -1 for a row that fills up a last batch."""


class MicroBatchSampler:
    """Sample indices for one data-parallel rank: consecutive micro-batches of all ranks are consecutive samples.

    The order does not depend on the global batch size, so a batch-size ramp needs nothing here. With `fill_to`,
    batches up to that many are completed with None, so that all ranks make equally many.
    """

    def __init__(self, start: int, end: int, micro_batch_size: int, rank: int, replicas: int, *, fill_to: int = 0):
        self.start, self.end, self.rows = start, end, micro_batch_size
        self.rank, self.stride = rank, micro_batch_size * replicas
        self.batches = max(-(-(end - start) // self.stride), fill_to)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int | None]]:
        for number in range(self.batches):
            first = self.start + number * self.stride + self.rank * self.rows
            yield [index if index < self.end else None for index in range(first, first + self.rows)]


def micro_batches(dataset, sampler: MicroBatchSampler, num_workers: int) -> Iterator[dict[str, torch.Tensor]]:
    """Collated samples, made by worker processes ahead of time."""
    return iter(
        torch.utils.data.DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=num_workers,
            worker_init_fn=heed_parent_only,
            pin_memory=torch.cuda.is_available(),
            # its own generator: the default one belongs to the model, and only some ranks have a loader
            generator=torch.Generator(),
        )
    )


def reads_data() -> bool:
    """True on the ranks that read samples: the first of each tensor-parallel group, in the first and last stage."""
    return parallel_state.get_tensor_model_parallel_rank() == 0 and (
        parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        or parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    )


def next_batch(iterator: Iterator[dict[str, torch.Tensor]] | None) -> Batch:
    """The next micro-batch: read by one rank, broadcast to its tensor-parallel group, cut for context parallelism."""
    read = next(iterator) if iterator is not None else None
    values = tensor_parallel.broadcast_data([*INTEGERS, *PER_SAMPLE], read, torch.int64)
    values |= tensor_parallel.broadcast_data(list(REALS), read, torch.float32)
    whole_sequences = {name: values[name] for name in (*INTEGERS, "weights")}
    return Batch(t=values["t"], index=values["index"], **get_batch_on_this_cp_rank(whole_sequences))
