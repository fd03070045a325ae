"""Weights out of a distributed checkpoint, one at a time, in one process that knows no layout."""

from __future__ import annotations

import io
import re
import struct
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
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
        self.room = torch.empty(0, dtype=torch.uint8)
        self._refuse_misfits(weights)

    def dtype(self, weight: Weight) -> torch.dtype:
        return self._entry(weight)[1].properties.dtype

    def read(self, weight: Weight) -> torch.Tensor:
        """The whole tensor, of this layer where the checkpoint stacks layers. The next read may overwrite it."""
        name, entry = self._entry(weight)
        offsets, sizes = [0] * len(entry.size), list(entry.size)
        if name.stacked:
            assert weight.layer is not None
            offsets[0], sizes[0] = weight.layer, 1
        region = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        pieces = create_read_items_for_chunk_list(name.key, entry, [region])
        if len(pieces) == 1 and (only := self._piece(pieces[0])).numel() == region.sizes.numel():
            return only.view(weight.megatron_shape)
        if sum(torch.Size(piece.lengths).numel() for piece in pieces) != region.sizes.numel():
            raise CheckpointError(f"{self.checkpoint}: the pieces of {name.key} do not make up the whole of it")
        target = torch.empty(sizes, dtype=entry.properties.dtype)
        for piece in pieces:
            part = narrowed(self._piece(piece), piece.storage_offsets, piece.lengths)
            narrowed(target, piece.dest_offsets, piece.lengths).copy_(part)
        return target.view(weight.megatron_shape)

    def _piece(self, item: ReadItem) -> torch.Tensor:
        """One stored tensor: its bytes straight from the file where torch.save put them in one run, else by torch.load.

        torch.load reads through Python objects and copies twice; at gigabytes that is most of a conversion's time.
        """
        stored = self.reader.storage_data[item.storage_index]
        with (self.checkpoint / stored.relative_path).open("rb", buffering=0) as file:
            archive: Any = Slice(file, stored.offset, stored.length)
            with torch.serialization.skip_data():
                layout = torch.load(archive, map_location="cpu", weights_only=True)
            start = bytes_of_only_storage(archive)
            if start is None or not layout.is_contiguous() or layout.storage_offset() or stored.transform_descriptors:
                archive.seek(0)
                return torch.load(archive, map_location="cpu", weights_only=True)
            if len(self.room) < layout.nbytes:
                self.room = torch.empty(layout.nbytes, dtype=torch.uint8)
            room = self.room[: layout.nbytes]
            file.seek(stored.offset + start)
            rest = memoryview(room.numpy().data)
            while rest:
                count = file.readinto(rest)
                if not count:
                    raise CheckpointError(f"{file.name} ends too early; `card checkpoint verify` tells more")
                rest = rest[count:]
            return room.view(layout.dtype).view(layout.shape)

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


def narrowed(tensor: torch.Tensor, starts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    return tensor[tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))]


class Slice(io.RawIOBase):
    """A stretch of a file as a file of its own."""

    def __init__(self, file: io.FileIO, start: int, length: int):
        self.file, self.start, self.length, self.position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer).cast("B")[: max(0, self.length - self.position)]
        self.file.seek(self.start + self.position)
        count = self.file.readinto(wanted) or 0
        self.position += count
        return count


def bytes_of_only_storage(archive: Slice) -> int | None:
    """Where the one storage of a torch.save archive, a zip, begins; None where it has several, or is compressed."""
    with zipfile.ZipFile(archive) as zipped:
        members = zipped.infolist()
    storages = [member for member in members if re.search(r"/data/\d+$", member.filename)]
    orders = [member for member in members if member.filename.endswith("/byteorder")]
    if len(storages) != 1 or any(member.compress_type != zipfile.ZIP_STORED for member in (*storages, *orders)):
        return None
    for member in orders:  # read here: the archive may have been written without checksums, which zipfile wants
        archive.seek(_start_of(archive, member))
        if archive.read(member.file_size).decode() != sys.byteorder:
            return None
    return _start_of(archive, storages[0])


def _start_of(archive: Slice, member: zipfile.ZipInfo) -> int:
    """Behind a local header of 30 bytes, a name and an extra field, whose lengths it holds."""
    archive.seek(member.header_offset + 26)
    name, extra = struct.unpack("<HH", archive.read(4))
    return member.header_offset + 30 + name + extra
