"""Megatron's .bin/.idx, written and joined as arrays: no document becomes a Python object on its way.

PREFIX.bin holds the ids of all documents, one after the other. PREFIX.idx holds how many ids each has, where it begins,
and which of them begin a document (all of them: one sequence a document). PREFIX.json is ours: where it came from.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from card_megatron.config.errors import ConfigError

MAGIC = b"MMIDIDX\x00\x00"
CODES: dict[np.dtype, int] = {np.dtype(np.uint16): 8, np.dtype(np.int32): 4}
"""Megatron's numbers for the types that token ids have."""
MANIFEST_FORMAT = 1


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type for ids, as Megatron chooses it."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def write_index(path: Path, lengths: Iterable[np.ndarray], dtype: np.dtype) -> None:
    """PREFIX.idx from the lengths of all documents, byte for byte as Megatron's IndexedDatasetBuilder writes it."""
    blocks = list(lengths)
    count = sum(map(len, blocks))
    with path.open("wb") as file:
        file.write(MAGIC)
        file.write(struct.pack("<QBQQ", 1, CODES[dtype], count, count + 1))
        for block in blocks:
            file.write(block.astype(np.int32).tobytes())
        begin = 0
        for block in blocks:
            sizes = block.astype(np.int64) * dtype.itemsize
            ends = begin + np.cumsum(sizes)
            file.write((ends - sizes).tobytes())
            begin = int(ends[-1]) if len(ends) else begin
        for start in range(0, count + 1, 1 << 20):
            file.write(np.arange(start, min(start + (1 << 20), count + 1), dtype=np.int64).tobytes())
        file.flush()
        os.fsync(file.fileno())


def append_file(source: Path, target: Any) -> None:
    """Copy a file to the end of an open one inside the kernel."""
    with source.open("rb") as file:
        rest = os.fstat(file.fileno()).st_size
        while rest:
            moved = os.sendfile(target.fileno(), file.fileno(), None, min(rest, 1 << 30))
            if not moved:
                raise OSError(f"{source} ended early")
            rest -= moved


class Indexed:
    """A finished .bin/.idx pair, mapped and not read."""

    def __init__(self, prefix: str | Path):
        self.prefix = Path(prefix)
        for suffix in (".bin", ".idx"):
            if not Path(f"{prefix}{suffix}").is_file():
                raise ConfigError(f"{prefix}{suffix}: no such file; `card data build --output {prefix}` writes it")
        with Path(f"{prefix}.idx").open("rb") as file:
            header = file.read(len(MAGIC) + 25)
        if not header.startswith(MAGIC) or len(header) < len(MAGIC) + 25:
            raise ConfigError(f"{prefix}.idx is no index of Megatron's; build it again")
        _, code, self.sequences, documents = struct.unpack("<QBQQ", header[len(MAGIC) :])
        kinds = {number: dtype for dtype, number in CODES.items()}
        if code not in kinds:
            raise ConfigError(f"{prefix}.idx has token type {code}; only uint16 (8) and int32 (4) are read")
        self.dtype = kinds[code]
        raw = np.memmap(f"{prefix}.idx", mode="r", dtype=np.uint8)
        offset, expected = len(header), len(header) + self.sequences * 12 + documents * 8
        if len(raw) != expected:
            raise ConfigError(f"{prefix}.idx has {len(raw):,} bytes and should have {expected:,}: it is truncated")
        self.lengths = raw[offset : offset + 4 * self.sequences].view(np.int32)
        self.pointers = raw[offset + 4 * self.sequences : offset + 12 * self.sequences].view(np.int64)
        self.boundaries = raw[offset + 12 * self.sequences :].view(np.int64)
        size = Path(f"{prefix}.bin").stat().st_size
        if size != self.tokens * self.dtype.itemsize:
            raise ConfigError(f"{prefix}.bin has {size:,} bytes; its index wants {self.tokens * self.dtype.itemsize:,}")
        self.ids = np.memmap(f"{prefix}.bin", mode="r", dtype=self.dtype) if size else np.empty(0, self.dtype)

    @property
    def tokens(self) -> int:
        return int(np.sum(self.lengths, dtype=np.int64))

    def __len__(self) -> int:
        """Documents."""
        return len(self.boundaries) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        first, last = self.boundaries[number], self.boundaries[number + 1]
        if first == last:
            return np.empty(0, self.dtype)
        start = int(self.pointers[first]) // self.dtype.itemsize
        return self.ids[start : start + int(np.sum(self.lengths[first:last], dtype=np.int64))]

    def manifest(self) -> dict[str, Any] | None:
        """Where the data came from, if we made it."""
        return read_manifest(self.prefix)


def read_manifest(prefix: str | Path) -> dict[str, Any] | None:
    path = Path(f"{prefix}.json")
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is no manifest ({error}); remove it, or build the data again") from error
    if manifest.get("format") != MANIFEST_FORMAT:
        raise ConfigError(f"{path} has format {manifest.get('format')}; this version reads {MANIFEST_FORMAT}")
    return manifest


def publish(prefix: Path, unfinished: Path, manifest: dict[str, Any]) -> None:
    """Give a complete pair its name: the manifest first, the index, which readers look for, last."""
    path = Path(f"{unfinished}.json")
    path.write_text(json.dumps({"format": MANIFEST_FORMAT, **manifest}, indent=1) + "\n")
    Path(f"{prefix}.idx").unlink(missing_ok=True)  # an old index must not meet new ids
    for suffix in (".json", ".bin", ".idx"):
        Path(f"{unfinished}{suffix}").replace(f"{prefix}{suffix}")


def blocks_of(lengths: np.ndarray, size: int = 1 << 22) -> Iterator[np.ndarray]:
    """An array in blocks that fit into memory."""
    for start in range(0, len(lengths), size):
        yield lengths[start : start + size]
