"""The model's weights as a Megatron distributed checkpoint that any layout can read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from card_megatron.model import unwrap


def save_weights(model: list[Any], run_dir: str | Path, step: int) -> Path:
    """Write RUN_DIR/checkpoints/step_N; it has that name only once it is complete. All ranks must call this."""
    final = Path(run_dir) / "checkpoints" / f"step_{step:06d}"
    unfinished = final.with_name(final.name + ".unfinished")
    first = torch.distributed.get_rank() == 0
    if first:
        for leftover in (unfinished, final):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(weights_of(model), str(unfinished))
    torch.distributed.barrier()
    if first:
        os.replace(unfinished, final)
    torch.distributed.barrier()
    return final


def load_weights(model: list[Any], checkpoint: str | Path) -> None:
    """Read weights that any layout saved into this rank's model. All ranks must call this."""
    loaded = dist_checkpointing.load(weights_of(model), str(checkpoint))
    for name, chunk in _named_chunks(model).items():
        chunk.load_state_dict(loaded[name])


def weights_of(model: list[Any]) -> dict[str, Any]:
    """Megatron's sharded state dict: each weight knows its global name, shape and place."""
    return {name: chunk.sharded_state_dict() for name, chunk in _named_chunks(model).items()}


def _named_chunks(model: list[Any]) -> dict[str, Any]:
    chunks = unwrap(model)
    return {"model" if len(chunks) == 1 else f"model{number}": chunk for number, chunk in enumerate(chunks)}
