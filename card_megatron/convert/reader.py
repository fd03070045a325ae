"""Weights out of a distributed checkpoint, one at a time, in one process that knows no layout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from card_megatron.config.errors import CheckpointError
from card_megatron.convert.mapping import Weight, canonical, refuse_misfits

NOT_WEIGHTS = re.compile(r"^(optimizer\.|chained_\d+\.|ema\.|random|rng_state|rerun_state)|_extra_state")
"""What else a checkpoint holds: optimizer, averages, random states, Transformer Engine's own."""


class WeightReader:
    """Reads what torch's distributed checkpoints (Megatron's `torch_dist`) hold, whatever pieces it is stored in."""

    def __init__(self, checkpoint: Path, weights: list[Weight], prefix: str = ""):
        self.checkpoint = checkpoint
        self.reader = FileSystemReader(str(checkpoint))
        try:
            metadata = self.reader.read_metadata()
        except Exception as error:  # a pickle: anything can be wrong with it
            raise CheckpointError(
                f"{checkpoint / '.metadata'} cannot be read ({error}); give the folder of a torch_dist checkpoint"
            ) from error
        self.reader.set_up_storage_reader(metadata, is_coordinator=True)
        self.stored = _stored(metadata.state_dict_metadata, prefix)
        self._refuse_misfits(weights)

    def dtype(self, weight: Weight) -> torch.dtype:
        return self._entry(weight)[1].properties.dtype

    def read(self, weight: Weight) -> torch.Tensor:
        """The whole tensor, of this layer where the checkpoint stacks layers."""
        name, entry = self._entry(weight)
        offsets, sizes = [0] * len(entry.size), list(entry.size)
        if name.stacked:
            assert weight.layer is not None
            offsets[0], sizes[0] = weight.layer, 1
        region = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        target = torch.empty(sizes, dtype=entry.properties.dtype)
        items = create_read_items_for_chunk_list(name.key, entry, [region])
        self.reader.read_data(LoadPlan(items), _Into(target)).wait()
        return target.view(weight.megatron_shape)

    def _entry(self, weight: Weight) -> tuple[StoredName, TensorStorageMetadata]:
        name = weight.megatron if weight.megatron in self.stored else weight.without_layer()
        return self.stored[name]

    def _refuse_misfits(self, weights: list[Weight]) -> None:
        expected = {
            weight.megatron if weight.megatron in self.stored else weight.without_layer(): weight for weight in weights
        }
        refuse_misfits(expected, self.stored, str(self.checkpoint))
        layers = 1 + max((weight.layer for weight in weights if weight.layer is not None), default=-1)
        for key, weight in expected.items():
            name, entry = self.stored[key]
            wanted = (layers, *weight.megatron_shape) if name.stacked else weight.megatron_shape
            if tuple(entry.size) != wanted:
                raise CheckpointError(
                    f"{self.checkpoint}: {name.key} has shape {list(entry.size)}; its configuration says {list(wanted)}"
                )


class StoredName:
    """A weight's name in the checkpoint, and whether it holds one layer or all of them."""

    def __init__(self, key: str):
        self.key = key
        self.stacked = ".layers." in key and not re.search(r"\.layers\.\d+\.", key)


def _stored(entries: dict[str, Any], prefix: str) -> dict[str, tuple[StoredName, TensorStorageMetadata]]:
    """Canonical name -> (stored name, where it is), of everything that is a weight."""
    return {
        canonical(key.removeprefix(prefix)): (StoredName(key), entry)
        for key, entry in entries.items()
        if key.startswith(prefix)
        and not NOT_WEIGHTS.search(key.removeprefix(prefix))
        and isinstance(entry, TensorStorageMetadata)
    }


class _Into(LoadPlanner):
    """Lets torch's reader copy the pieces of one region into one tensor."""

    def __init__(self, target: torch.Tensor):
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        view = self.target
        for dimension, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dimension, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...

    # torch's reader calls nothing else of a planner
    def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None: ...
