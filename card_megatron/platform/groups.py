"""Megatron's process groups inside the one that joins all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from card_megatron.config.schema import ParallelConfig
from card_megatron.platform.ranks import Ranks, init_process_group


def join_model_parallel(ranks: Ranks, parallel: ParallelConfig, seed: int, *, cuda_graphs: bool = False) -> None:
    """The process group, Megatron's groups inside it, and the seeds of dropout. Call platform.install() before.

    CUDA graphs need random states that a graph can replay.
    """
    from megatron.core import parallel_state, tensor_parallel

    init_process_group(ranks, timeout_minutes=parallel.distributed_timeout_minutes)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, use_cudagraphable_rng=cuda_graphs)


@contextlib.contextmanager
def model_parallel(ranks: Ranks, parallel: ParallelConfig, seed: int = 1234) -> Iterator[None]:
    """Megatron's groups for as long as the context lasts; a process group that was there before stays."""
    from megatron.core import parallel_state

    there_before = dist.is_initialized()
    join_model_parallel(ranks, parallel, seed)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        if not there_before:
            dist.destroy_process_group()
