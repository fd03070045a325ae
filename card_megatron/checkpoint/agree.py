"""Ranks that must do the same thing next: each says what went wrong for it, and all hear all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def problems_on_all_ranks(problem: str | None) -> list[str]:
    """What went wrong anywhere, with the rank that said it; the same list on every rank."""
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, problem)
    return [f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None]


def on_first_rank(work: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Let rank 0 do file work: (its result, its problems) on every rank, so that no rank goes on alone."""
    result, problem = None, None
    if dist.get_rank() == 0:
        try:
            result = work()
        except OSError as error:
            problem = f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")
    answer = [result, problem]
    dist.broadcast_object_list(answer, src=0)
    return answer[0], [answer[1]] if answer[1] is not None else []
