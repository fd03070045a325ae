"""A distributed checkpoint (Megatron's `torch_dist`) of weights alone, written tensor by tensor by one process."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from card_megatron.convert.mapping import Weight

Make = Callable[[Weight], torch.Tensor]


def write_checkpoint(
    folder: Path,
    weights: list[Weight],
    layers: int,
    dtype_of: Callable[[Weight], torch.dtype],
    make: Make,
    written: Callable[[int], object] = lambda count: None,
) -> None:
    """Shards and .metadata; layers are stacked under one name, as Megatron stacks layers that are alike."""
    planner = _OneByOne(weights, layers, dtype_of, make, written)
    writer = dcp.FileSystemWriter(str(folder), single_file_per_rank=True, thread_count=1, sync_files=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as was asked for
        checked = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # the manifest has a checksum of the whole file
        try:
            dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:  # torch's own, which is no Exception
            (failure, _) = next(iter(error.failures.values()))
            raise failure from error
        finally:
            torch.serialization.set_crc32_options(checked)


class _OneByOne(SavePlanner):
    """Plans from shapes alone, and makes a tensor only when torch's writer asks for it."""

    def __init__(self, weights: list[Weight], layers: int, dtype_of: Any, make: Make, written: Any):
        self.weights, self.make, self.written = {}, make, written
        self.items = []
        for weight in weights:
            self.items.append(_item(weight, layers, dtype_of(weight)))
            self.weights[self.items[-1].index.fqn, tuple(self.items[-1].index.offset or ())] = weight

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None: ...

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self.items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        weight = self.weights[write_item.index.fqn, tuple(write_item.index.offset or ())]
        assert write_item.tensor_data is not None
        tensor = self.make(weight)
        assert tuple(tensor.shape) == weight.megatron_shape, f"{weight.megatron}: made {tuple(tensor.shape)}"
        tensor = tensor.to(write_item.tensor_data.properties.dtype)
        self.written(tensor.nbytes)
        # torch.save writes whole storages: a view of a larger one must not bring it along
        tensor = tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor.contiguous()
        return tensor.unsqueeze(0) if weight.layer is not None else tensor


def _item(weight: Weight, layers: int, dtype: torch.dtype) -> WriteItem:
    shape, offset = list(weight.megatron_shape), [0] * len(weight.megatron_shape)
    chunk, whole = shape, shape
    if weight.layer is not None:
        chunk, whole, offset = [1, *shape], [layers, *shape], [weight.layer, *offset]
    return WriteItem(
        index=MetadataIndex(weight.without_layer(), torch.Size(offset)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offset), torch.Size(chunk)),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(whole),
        ),
    )
