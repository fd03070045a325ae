"""Who this process is among the others, and the process group that joins them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """This process among all (`rank` of `world_size`) and on its machine (`local_rank`)."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def ranks_from_environment(environment: Mapping[str, str] = os.environ) -> Ranks:
    """The ranks that torchrun sets; a lone process where nothing is set."""
    return Ranks(
        rank=int(environment.get("RANK", 0)),
        world_size=int(environment.get("WORLD_SIZE", 1)),
        local_rank=int(environment.get("LOCAL_RANK", 0)),
    )


def init_process_group(ranks: Ranks, *, store: dist.Store | None = None, timeout_minutes: float = 30.0) -> None:
    """Join the ranks: NCCL and this rank's GPU where there is CUDA, gloo elsewhere."""
    if dist.is_initialized():
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(ranks.local_rank)
    if store is None and ranks.world_size == 1:
        store = dist.HashStore()  # a lone process needs no port, so two runs on a laptop cannot clash
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=ranks.rank if store is not None else -1,
        world_size=ranks.world_size if store is not None else -1,
        timeout=timedelta(minutes=timeout_minutes),
    )
