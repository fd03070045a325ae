"""What a checkpoint holds, and how it goes back: weights, optimizer, schedule, random states, progress, average."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.utils import (
    extract_sharded_tensors_and_factories,
    force_all_tensors_to_non_fp8,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from card_megatron.checkpoint.optimizer_state import layout_metadata
from card_megatron.config.errors import CheckpointError


class Average(Protocol):
    """The moving average of the weights, as far as a checkpoint knows it."""

    def to_save(self, model_state: Any) -> Any: ...

    def to_load(self, model_state: Any) -> Any: ...

    def load(self, loaded: Any) -> None: ...


@dataclass
class Contents:
    """The parts of a run that a checkpoint keeps. `progress` is plain data, the same on every rank."""

    model: list[Any]
    optimizer: Any
    scheduler: Any
    ema: Average | None
    progress: dict[str, Any]


def weights_of(model: list[Any], *, numbered_layers: bool = False) -> dict[str, Any]:
    """Megatron's sharded state dict: each weight knows its global name, shape and place.

    Layers that are alike are stacked under one name; `numbered_layers` has a name for each, as others may save them.
    """
    metadata = layout_metadata() | ({"non_homogeneous_layers": True} if numbered_layers else {})
    return {name: chunk.sharded_state_dict(metadata=dict(metadata)) for name, chunk in _named_chunks(model).items()}


def to_save(contents: Contents) -> dict[str, Any]:
    """Everything, as references to what training works on. Every rank must call this."""
    for chunk in contents.model:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)  # the gather of updated weights is still to come
    weights = weights_of(contents.model)
    force_all_tensors_to_non_fp8(weights)  # weights that are stored in FP8 are saved as bf16, which every layer reads
    state = {
        **weights,
        "optimizer": contents.optimizer.sharded_state_dict(weights, is_loading=False, metadata=layout_metadata()),
        "scheduler": contents.scheduler.state_dict(),
        "progress": contents.progress,
        "random": _random_slot(random_states()),
    }
    if contents.ema is not None:
        state["ema"] = contents.ema.to_save(weights)
    return state


def load(contents: Contents, checkpoint: Path, *, same_layout: bool, has_ema: bool) -> dict[str, Any]:
    """Put a checkpoint of any layout back into a run; returns its progress. All ranks must call this.

    Random states belong to a rank of a layout: in another layout they stay as they were seeded.
    """
    weights = weights_of(contents.model)
    ours = [dict(group) for group in contents.optimizer.param_groups]
    wanted = {
        **weights,
        "optimizer": contents.optimizer.sharded_state_dict(weights, is_loading=True, metadata=layout_metadata()),
    }
    if contents.ema is not None and has_ema:
        wanted["ema"] = contents.ema.to_load(weights)
    if same_layout:
        wanted["random"] = _random_slot(None)
    loaded = _load(wanted, checkpoint)
    _load_into(contents.model, loaded)
    with torch.no_grad():
        contents.optimizer.load_state_dict(loaded["optimizer"])
    _keep_configured(contents.optimizer, ours)
    contents.scheduler.num_steps = 0
    contents.scheduler.step(loaded["scheduler"]["num_steps"])
    if contents.ema is not None and has_ema:
        contents.ema.load(loaded["ema"])
    if same_layout:
        set_random_states(loaded["random"])
    return loaded["progress"]


def load_weights(model: list[Any], checkpoint: Path, prefix: str = "") -> None:
    """Put the weights of a checkpoint of any layout into a model. All ranks must call this.

    `prefix` stands before their names in the checkpoint, as it does for averaged weights.
    """
    try:
        held = [name for name in dist_checkpointing.load_tensors_metadata(str(checkpoint)) if name.startswith(prefix)]
    except Exception as error:
        raise CheckpointError(f"{checkpoint} has no metadata that can be read: {error}") from error
    names = [name.removeprefix(prefix) for name in held]
    wanted = weights_of(model, numbered_layers=any(re.search(r"\.layers\.\d+\.", name) for name in names))
    shards, _ = extract_sharded_tensors_and_factories(wanted)
    for shard in nested_values(shards):
        shard.key = prefix + shard.key
    loaded, not_asked, not_there = _load(wanted, checkpoint, strict=StrictHandling.RETURN_ALL)
    # Transformer Engine's FP8 state: a checkpoint of local layers has none, and the weights do without
    if lacking := sorted(name for name in not_there if "_extra_state" not in name):
        raise CheckpointError(f"{checkpoint} lacks {', '.join(lacking)}, which this model has")
    weights = tuple(f"{prefix}{module}." for module in ("embedding", "decoder", "output_layer", "mtp"))
    if left := sorted(name for name in not_asked if name.startswith(weights) and "_extra_state" not in name):
        raise CheckpointError(f"{checkpoint} has {', '.join(left)}, which this model lacks")
    _load_into(model, loaded)


def _load(wanted: dict[str, Any], checkpoint: Path, **options: Any) -> Any:
    try:
        # a rank asks only for the averages that it has a part of: Megatron's check wants rank 0 to ask for everything
        return dist_checkpointing.load(wanted, str(checkpoint), validate_access_integrity=False, **options)
    except CheckpointException as error:  # torch's, of all ranks; no Exception
        failures = [f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items()]
        raise CheckpointError(f"{checkpoint} does not load: {'; '.join(failures)}") from error
    except Exception as error:
        raise CheckpointError(f"{checkpoint} does not load: {type(error).__name__}: {error}") from error


def _load_into(model: list[Any], loaded: dict[str, Any]) -> None:
    for name, chunk in _named_chunks(model).items():
        problems = chunk.load_state_dict(loaded[name], strict=False)
        if lacking := [key for key in problems.missing_keys if "_extra_state" not in key] + problems.unexpected_keys:
            raise CheckpointError(f"weights that do not fit the model: {', '.join(lacking)}")


def _named_chunks(model: list[Any]) -> dict[str, Any]:
    chunks = unwrap_model(model)
    return {"model" if len(chunks) == 1 else f"model{number}": chunk for number, chunk in enumerate(chunks)}


def _keep_configured(optimizer: Any, ours: list[dict[str, Any]]) -> None:
    """A loaded group brings the checkpoint's learning rates and betas: those of the configuration count."""
    for group, configured in zip(optimizer.param_groups, ours, strict=True):
        for name, value in configured.items():
            if name not in ("params", "step"):
                group[name] = value


# ---------------------------------------------------------------- random states


def random_states() -> dict[str, Any]:
    """All generators of this rank: dropout draws from them, data and noise do not."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])


def _random_slot(states: dict[str, Any] | None) -> ShardedObject:
    return ShardedObject("random", states, (dist.get_world_size(),), (dist.get_rank(),))
