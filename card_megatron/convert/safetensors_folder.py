"""A folder of .safetensors files, written and read tensor by tensor: one is in memory, however large the model.

The library's own save_file() wants all tensors of a file at once, and its safe_open() maps whole files. The format is
its header's length, the header (JSON: name -> dtype, shape, offsets), and the tensors' bytes.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch

from card_megatron.config.errors import CheckpointError, ConfigError

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
INDEX = "model.safetensors.index.json"


@dataclass
class Group:
    """Tensors that are made together, from one read; make() gives them in this order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    make: Callable[[], list[torch.Tensor]]

    @property
    def bytes(self) -> int:
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        return [prod(shape) * self.dtype.itemsize for shape in self.shapes]


@dataclass
class File:
    """One .safetensors file to be."""

    groups: list[Group] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups)


def pack(groups: Iterable[Group], most_bytes: int) -> list[File]:
    """Files of at most that size, in order; a group that is larger by itself gets a file of its own."""
    files = [File()]
    for group in groups:
        if files[-1].groups and files[-1].bytes + group.bytes > most_bytes:
            files.append(File())
        files[-1].groups.append(group)
    return files


def write_folder(
    folder: Path, groups: Iterable[Group], most_bytes: int, written: Callable[[int], object] = lambda count: None
) -> int:
    """Write all files and, where there are several, their index; returns the bytes of the tensors."""
    files = pack(groups, most_bytes)
    names = (
        ["model.safetensors"]
        if len(files) == 1
        else [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    )
    for name, file in zip(names, files, strict=True):
        _write(folder / name, file, written)
    total = sum(file.bytes for file in files)
    if len(files) > 1:
        where = {
            tensor: name
            for name, file in zip(names, files, strict=True)
            for group in file.groups
            for tensor in group.names
        }
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def _write(path: Path, file: File, written: Callable[[int], object]) -> None:
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for group in file.groups:
        for name, shape, size in zip(group.names, group.shapes, group.sizes, strict=True):
            described = {"dtype": NAMES[group.dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            header[name] = described  # type: ignore[assignment]
            offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format wants the data aligned
    with path.open("wb", buffering=0) as out:
        _write_all(out, struct.pack("<Q", len(encoded)) + encoded)
        for group in file.groups:
            tensors = group.make()
            for tensor, shape in zip(tensors, group.shapes, strict=True):
                assert tuple(tensor.shape) == shape, f"{group.names}: made {tuple(tensor.shape)}, planned {shape}"
                plain = tensor.to(group.dtype).contiguous()
                _write_all(out, plain.view(-1).view(torch.uint8).numpy().data)
            written(group.bytes)
        os.fsync(out.fileno())


def _write_all(out, data) -> None:
    """A raw write may take less than it was given."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[out.write(rest) :]


class SafetensorsFolder:
    """The tensors of a folder by name."""

    def __init__(self, folder: Path):
        if (folder / INDEX).is_file():
            try:
                names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise ConfigError(f"{folder / INDEX} has no weight_map that can be read ({error})") from error
        elif (folder / "model.safetensors").is_file():
            names = ["model.safetensors"]
        else:
            raise ConfigError(
                f"{folder} has no model.safetensors and no {INDEX}; save the model with safetensors "
                "(save_pretrained of transformers does)"
            )
        self.where = {name: place for file in names for name, place in _places(folder / file).items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.where[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.where[name].dtype

    def read(self, name: str) -> torch.Tensor:
        place = self.where[name]
        tensor = torch.empty(place.shape, dtype=place.dtype)
        with place.path.open("rb", buffering=0) as file:
            file.seek(place.start)
            rest = memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
            while rest and (count := file.readinto(rest)):
                rest = rest[count:]
        if rest:
            raise CheckpointError(f"{place.path} ends within {name}")
        return tensor


@dataclass(frozen=True)
class Place:
    """Where a tensor stands."""

    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _places(path: Path) -> dict[str, Place]:
    """Of all tensors of a file; refuses one that is cut short or holds what we cannot read."""
    kinds = {name: dtype for dtype, name in NAMES.items()}
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        places = {
            name: Place(path, 8 + length + entry["data_offsets"][0], tuple(entry["shape"]), kinds[entry["dtype"]])
            for name, entry in header.items()
        }
        size = 8 + length + max(entry["data_offsets"][1] for entry in header.values())
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            if last - first != prod(entry["shape"]) * kinds[entry["dtype"]].itemsize:
                raise ValueError(f"{name} has {last - first} bytes, which its shape {entry['shape']} does not have")
    except KeyError as error:
        raise CheckpointError(f"{path} holds tensors of type {error}; {', '.join(kinds)} can be read") from error
    except (OSError, ValueError, TypeError, struct.error) as error:
        raise CheckpointError(f"{path} is no .safetensors file: {error}") from error
    if path.stat().st_size != size:
        raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes; its header says {size:,}")
    return places
