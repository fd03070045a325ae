"""The process group that joins this process with the others, whatever started them."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from card_megatron.config.errors import ConfigError
from card_megatron.launchers import Ranks, meeting_point, ranks_from_environment, refuse_missing_gpus, refuse_taken_port

__all__ = ["Ranks", "gpu_of", "init_process_group", "ranks_from_environment"]


def init_process_group(ranks: Ranks, *, store: dist.Store | None = None, timeout_minutes: float = 30.0) -> None:
    """Join the ranks: NCCL and this rank's GPU where there is CUDA, gloo elsewhere."""
    if dist.is_initialized():
        return
    cuda = torch.cuda.is_available()
    refuse_missing_gpus(cuda)
    if cuda:
        torch.cuda.set_device(gpu_of(ranks))
    if store is None and ranks.world_size == 1:
        store = dist.HashStore()  # a lone process needs no port, so two runs on a laptop cannot clash
    if store is None:
        export(ranks)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=ranks.rank if store is not None else -1,
        world_size=ranks.world_size if store is not None else -1,
        timeout=timedelta(minutes=timeout_minutes),
    )


def export(ranks: Ranks) -> None:
    """What torchrun sets, under every launcher: torch and libraries beside it read these names."""
    if ranks.launcher in ("torchrun", None):
        return
    address, port = meeting_point(ranks)
    if ranks.rank == 0:
        refuse_taken_port(port)
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    os.environ.update(RANK=str(ranks.rank), WORLD_SIZE=str(ranks.world_size), LOCAL_RANK=str(ranks.local_rank))


def gpu_of(ranks: Ranks) -> int:
    """The GPU of a rank: its local rank's, or the only one that SLURM lets it see."""
    count = torch.cuda.device_count()
    if count <= 1:
        return 0
    if ranks.local_rank < count:
        return ranks.local_rank
    raise ConfigError(
        f"local rank {ranks.local_rank} has no GPU: {count} are visible; start as many ranks on a node as it has GPUs"
    )
