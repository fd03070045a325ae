"""Whole runs, interrupted and resumed, inside ranks that are there already."""

from __future__ import annotations

import gc
import json
import os
import signal
from pathlib import Path
from typing import Any

from card_megatron.config import RunConfig

TIMINGS = ("step_seconds", "tokens_per_second", "tokens_per_second_per_rank", "eta_seconds", "slowest", "seconds")


def train(config: RunConfig, *, stop_at: int | None = None, stop_rank: int = 0, number: int = signal.SIGTERM) -> dict:
    """A run in the process group that is there; a real signal to one rank ends it after step `stop_at`."""
    from megatron.core import parallel_state

    from card_megatron.platform import ranks_from_environment
    from card_megatron.training import loop, signals
    from card_megatron.training.preflight import preflight
    from card_megatron.training.run import train_in_group
    from card_megatron.training.watchdog import Watchdog

    ranks, step = ranks_from_environment(), loop.train_step

    def step_and_signal(state):
        result = step(state)
        if state.step == stop_at and ranks.rank == stop_rank:
            os.kill(os.getpid(), number)
        return result

    signals.install()
    loop.train_step = step_and_signal
    watchdog = Watchdog(config.run_dir, ranks.rank, ranks.world_size, 5)
    try:
        return train_in_group(preflight(config, ranks), watchdog, console=False)
    finally:
        loop.train_step = step
        signals.reset()
        watchdog.close()
        parallel_state.destroy_model_parallel()
        gc.collect()


def train_in_turn(turns: list[tuple[RunConfig, dict[str, Any]]]) -> list[dict]:
    """Several runs one after the other in one set of ranks."""
    return [train(config, **options) for config, options in turns]


def records(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in lines]


def events(run_dir: str | Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (Path(run_dir) / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == name]


def tensors(checkpoint: str | Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, whole, read by torch alone."""
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = dcp.FileSystemReader(str(checkpoint)).read_metadata()
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=str(checkpoint), no_dist=True)
    return state
