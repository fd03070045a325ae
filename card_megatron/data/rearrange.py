"""Finished .bin/.idx pairs merged, split and shuffled: documents move as arrays, in bounded memory.

What is random is keyed by (seed, block of documents), so a seed means the same documents on every machine. A result
gets its name when it is complete; its manifest keeps the tokenizer and says how it was made.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from card_megatron.config.errors import ConfigError
from card_megatron.data.indexed import Indexed, append_file, blocks_of, publish, write_index
from card_megatron.objectives.keys import SampleKey

SPLITS = ("train", "valid", "test")
BLOCK_DOCUMENTS = 1 << 20
"""Documents whose fate is drawn together: a part of what a seed means, so it stays as it is."""
BLOCK_TOKENS = 1 << 20
"""Tokens that are gathered at once."""
BUCKET_BYTES = 256 << 20
MOST_BUCKETS = 256
"""Files that a shuffle has open at once; above 64 GB the buckets grow instead, which are mapped and not read."""
CHECKSUM_BYTES = 64 << 20

Progress = Callable[[int], object]
"""Told how many tokens were moved."""


def nothing(count: int) -> None:
    """Progress that nobody sees."""


def merge(prefixes: Sequence[Path], output: Path, progress: Progress = nothing) -> dict[str, Any]:
    """Join pairs made with one tokenizer, in the order given; returns the manifest."""
    parts = [opened(prefix) for prefix in prefixes]
    refuse_overwriting([output], parts)
    manifests = [manifest_of(part) for part in parts]
    for part, manifest in zip(parts, manifests, strict=True):
        ours, first = manifest["tokenizer"], manifests[0]["tokenizer"]
        if ours["sha256"] != first["sha256"] or part.dtype != parts[0].dtype:
            raise ConfigError(
                f"{part.prefix} was made with tokenizer {ours['name']} (sha256 {ours['sha256'][:12]}…), "
                f"{parts[0].prefix} with {first['name']} ({first['sha256'][:12]}…): their ids mean different text; "
                "build one of them again"
            )
    with unfinished(output) as name:
        with Path(f"{name}.bin").open("wb") as file:
            for part in parts:
                append_file(Path(f"{part.prefix}.bin"), file)
                progress(part.tokens)
            os.fsync(file.fileno())
        lengths = [block for part in parts for block in blocks_of(part.lengths)]
        write_index(Path(f"{name}.idx"), lengths, parts[0].dtype)
        checksums = [entry for manifest in manifests for entry in manifest["checksums"]]
        counts = {"documents": sum(map(len, parts)), "tokens": sum(part.tokens for part in parts)}
        return release(output, name, counts | inherited(parts, "merge") | {"checksums": checksums})


def split(
    prefix: Path, shares: Sequence[float], output: Path, seed: int, progress: Progress = nothing
) -> dict[str, dict[str, Any]]:
    """Share documents out to OUTPUT_train, _valid and _test, in their order; a share of 0 is not written."""
    data = opened(prefix)
    names = {name: Path(f"{output}_{name}") for name, share in zip(SPLITS, shares, strict=True) if share}
    refuse_overwriting(names.values(), [data])
    places = [list(names).index(name) if name in names else -1 for name in SPLITS]
    facts = inherited([data], "split", shares=list(shares), seed=seed)
    labels = (np.array(places)[block] for block in drawn_shares(len(data), shares, seed))
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(writing(path, data.dtype)) for path in names.values()]
        scatter(data, labels, writers, progress)
        empty = [name for name, writer in zip(names, writers, strict=True) if not writer.documents]
        if empty:
            raise ConfigError(
                f"--shares {','.join(f'{share:g}' for share in shares)} of the {len(data):,} documents of {prefix} "
                f"leaves none to {' and '.join(empty)}; give it a larger share, or 0"
            )
        return {
            name: writer.publish(facts | {"made": {**facts["made"], "part": name}})
            for name, writer in zip(names, writers, strict=True)
        }


def shuffle(prefix: Path, output: Path, seed: int, progress: Progress = nothing) -> dict[str, Any]:
    """Write the documents in a random order; moves every token twice where they do not fit into one bucket.

    Every document goes to a random bucket, every bucket is put into a random order, and the buckets are joined: all
    orders are equally likely, and the disk is read and written from one end to the other.
    """
    data = opened(prefix)
    refuse_overwriting([output], [data])
    with writing(output, data.dtype) as writer, buckets_of(data, output, seed, progress) as buckets:
        for number, (ids, lengths) in enumerate(buckets):
            order = SampleKey(seed, "shuffle", number).rng().permutation(len(lengths))
            starts = np.cumsum(lengths, dtype=np.int64) - lengths
            writer.copy(ids, starts[order], lengths[order], progress)
        return writer.publish(inherited([data], "shuffle", seed=seed))


def moved_by_shuffle(data: Indexed) -> int:
    """Tokens that a shuffle tells its progress of."""
    return data.tokens * (1 if bucket_count(data) == 1 else 2)


# ---------------------------------------------------------------- what is drawn


def drawn_shares(count: int, shares: Sequence[float], seed: int) -> Iterator[np.ndarray]:
    """Which share each document belongs to, in blocks, each of which is divided as exactly as it can be."""
    ends = np.cumsum(shares) / np.sum(shares)
    for number, start in enumerate(range(0, count, BLOCK_DOCUMENTS)):
        size = min(BLOCK_DOCUMENTS, count - start)
        labels = np.searchsorted(np.round(ends[:-1] * size), np.arange(size), side="right")
        yield SampleKey(seed, "split", number).rng().permutation(labels)


def bucket_count(data: Indexed) -> int:
    size = data.tokens * data.dtype.itemsize
    return max(1, min(-(-size // BUCKET_BYTES), MOST_BUCKETS))


@contextlib.contextmanager
def buckets_of(
    data: Indexed, output: Path, seed: int, progress: Progress
) -> Iterator[Iterator[tuple[np.ndarray, np.ndarray]]]:
    """(ids, lengths) of every bucket of a shuffle; the files that hold them are gone afterwards."""
    count = bucket_count(data)
    if count == 1:
        yield iter([(data.ids, np.asarray(data.lengths))])
        return
    folder = output.with_name(output.name + ".unfinished.buckets")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    starts = range(0, len(data), BLOCK_DOCUMENTS)
    labels = (
        SampleKey(seed, "shuffle/buckets", number).rng().integers(count, size=min(BLOCK_DOCUMENTS, len(data) - start))
        for number, start in enumerate(starts)
    )
    try:
        with contextlib.ExitStack() as stack:
            writers = [stack.enter_context(writing(folder / f"{number:03d}", data.dtype)) for number in range(count)]
            scatter(data, labels, writers, progress)
            for writer in writers:
                writer.close()
            yield (writer.mapped() for writer in writers)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def scatter(data: Indexed, labels: Iterator[np.ndarray], writers: Sequence[Writer], progress: Progress) -> None:
    """Append every document to the writer that its label names."""
    first, begin = 0, 0
    for block in labels:
        lengths = np.asarray(data.lengths[first : first + len(block)])
        for start, stop in token_runs(lengths):
            sizes, here = lengths[start:stop], block[start:stop]
            starts = np.cumsum(sizes, dtype=np.int64) - sizes
            total = int(starts[-1]) + int(sizes[-1])
            ids = mapped(Path(f"{data.prefix}.bin"), data.dtype, begin, total)
            for label in np.unique(here):
                chosen = here == label
                writers[label].copy(ids, starts[chosen], sizes[chosen])
            begin += total
            progress(total)
        first += len(block)


def token_runs(lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """(start, stop) of documents that together hold at most BLOCK_TOKENS, or of one that is longer."""
    ends = np.cumsum(lengths, dtype=np.int64)
    start, base = 0, 0
    while start < len(ends):
        stop = max(start + 1, int(np.searchsorted(ends, base + BLOCK_TOKENS, side="right")))
        yield start, stop
        start, base = stop, int(ends[stop - 1])


def mapped(path: Path, dtype: np.dtype, start: int, count: int) -> np.ndarray:
    """A stretch of a file of ids: pages of the file, which are given back when the array is dropped."""
    if not count:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r", offset=start * dtype.itemsize, shape=(count,))


# ---------------------------------------------------------------- writing


class Writer:
    """A pair in the making: ids and lengths go to files under an unfinished name as they come."""

    def __init__(self, prefix: Path, name: Path, dtype: np.dtype):
        self.prefix, self.name, self.dtype = prefix, name, dtype
        self.ids = Path(f"{name}.bin").open("wb", buffering=1 << 16)  # noqa: SIM115 closed by close()
        self.lengths = Path(f"{name}.lengths").open("wb", buffering=1 << 16)  # noqa: SIM115
        self.documents = self.tokens = 0
        self.checksums: list[list[Any]] = []
        self._bytes = self._checksum = 0

    def copy(self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, progress: Progress = nothing) -> None:
        """Append the documents that begin at `starts` of `ids`."""
        for start, stop in token_runs(lengths):
            sizes = lengths[start:stop].astype(np.int64)
            if len(sizes) == 1:  # a document of any length, through a window
                begin, end = int(starts[start]), int(starts[start] + sizes[0])
                for low in range(begin, end, BLOCK_TOKENS):
                    self._write(ids[low : min(low + BLOCK_TOKENS, end)])
            else:
                shifts = starts[start:stop] - (np.cumsum(sizes) - sizes)
                self._write(ids[np.repeat(shifts, sizes) + np.arange(int(sizes.sum()))])
            self.lengths.write(lengths[start:stop].astype(np.int32).tobytes())
            self.documents += len(sizes)
            self.tokens += int(sizes.sum())
            progress(int(sizes.sum()))

    def _write(self, ids: np.ndarray) -> None:
        data = ids.tobytes()
        self.ids.write(data)
        self._checksum, self._bytes = zlib.crc32(data, self._checksum), self._bytes + len(data)
        if self._bytes >= CHECKSUM_BYTES:
            self._end_range()

    def _end_range(self) -> None:
        if self._bytes:
            self.checksums.append([self._bytes, f"{self._checksum:08x}"])
        self._bytes = self._checksum = 0

    def close(self) -> None:
        self.ids.close()
        self.lengths.close()

    def mapped(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids, lengths) that were written, after close()."""
        return (
            mapped(Path(f"{self.name}.bin"), self.dtype, 0, self.tokens),
            mapped(Path(f"{self.name}.lengths"), np.dtype(np.int32), 0, self.documents),
        )

    def publish(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Give the pair its name; returns the manifest."""
        self._end_range()
        for file in (self.ids, self.lengths):
            file.flush()
            os.fsync(file.fileno())
        self.close()
        write_index(Path(f"{self.name}.idx"), blocks_of(self.mapped()[1]), self.dtype)
        Path(f"{self.name}.lengths").unlink()
        counts = {"documents": self.documents, "tokens": self.tokens}
        return release(self.prefix, self.name, counts | facts | {"checksums": self.checksums})


@contextlib.contextmanager
def writing(prefix: Path, dtype: np.dtype) -> Iterator[Writer]:
    with unfinished(prefix) as name:
        writer = Writer(prefix, name, dtype)
        try:
            yield writer
        finally:
            writer.close()


@contextlib.contextmanager
def unfinished(prefix: Path) -> Iterator[Path]:
    """The name of a pair in the making; whatever still has it afterwards was not published, and goes."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    name = prefix.with_name(prefix.name + ".unfinished")
    try:
        yield name
    finally:
        for suffix in (".bin", ".idx", ".json", ".lengths"):
            Path(f"{name}{suffix}").unlink(missing_ok=True)


def release(prefix: Path, name: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """publish(), where an older pair of that name may be."""
    # an old index with new ids of the same size would be believed, should the machine stop in between
    Path(f"{prefix}.idx").unlink(missing_ok=True)
    publish(prefix, name, manifest)
    return manifest


# ---------------------------------------------------------------- what is read


def opened(prefix: Path) -> Indexed:
    """A pair whose documents may be moved."""
    data = Indexed(prefix)
    if data.sequences != len(data):
        raise ConfigError(
            f"{prefix} has {data.sequences:,} sequences in {len(data):,} documents; only pairs with one sequence a "
            "document, as `card data build` writes them, can be rearranged"
        )
    return data


def manifest_of(data: Indexed) -> dict[str, Any]:
    """The manifest, which must be there."""
    manifest = data.manifest()
    if manifest is None:
        raise ConfigError(
            f"{data.prefix}.json: no such file, so the tokenizer of {data.prefix} is not known; "
            "`card data build` writes it beside the data"
        )
    return manifest


def refuse_overwriting(outputs: Any, inputs: Sequence[Indexed]) -> None:
    taken = {Path(f"{data.prefix}.bin").resolve(): data.prefix for data in inputs}
    for output in outputs:
        path = Path(f"{output}.bin").resolve()
        if path in taken:
            raise ConfigError(f"--output {output} is the input {taken[path]}; choose another name")


def inherited(parts: Sequence[Indexed], command: str, **details: Any) -> dict[str, Any]:
    """What a manifest takes over from the manifests of its sources, and how it was made from them."""
    manifests = [manifest_of(part) for part in parts]
    problems: Counter[str] = Counter()
    for manifest in manifests:
        problems.update(manifest.get("problems", {}))
    options = [manifest.get("options") for manifest in manifests]
    sources = [
        {"prefix": str(part.prefix), "documents": len(part), "tokens": part.tokens}
        | ({"made": manifest["made"]} if "made" in manifest else {})
        for part, manifest in zip(parts, manifests, strict=True)
    ]
    return {
        "dtype": parts[0].dtype.name,
        "tokenizer": manifests[0]["tokenizer"],
        "options": options[0] if all(entry == options[0] for entry in options) else None,
        "inputs": [entry for manifest in manifests for entry in manifest.get("inputs", [])],
        "problems": dict(problems.most_common()),
        "made": {"command": command, **details, "from": sources},
    }
