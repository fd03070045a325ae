"""What a .bin/.idx pair holds, counted in blocks; whether it is damaged; ids as text; and the epochs of a blend."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from card_megatron.config.derived import total_samples
from card_megatron.config.errors import ConfigError
from card_megatron.config.schema import RunConfig
from card_megatron.data.indexed import Indexed
from card_megatron.data.tokenizers import MASK_PIECE, Tokenizer

BLOCK = 1 << 20
UNKNOWN_VOCABULARY = 1 << 24
"""Ids that are counted where nobody says how many there are."""
EXACT_SAMPLES = 1 << 24
"""Samples whose sources are counted one by one; more would take memory, and one of them is nothing to so many."""
END_SHOWN, UNREADABLE = "<EOD>", "\ufffd"

Progress = Callable[[int], object]


# ---------------------------------------------------------------- lengths


@dataclass
class Lengths:
    """How long the documents are."""

    mean: float
    median: float
    shortest: int
    longest: int
    histogram: list[tuple[int, int, int]]
    """(shortest, longest, documents) of each bin; bins double."""


def document_lengths(data: Indexed) -> Iterator[np.ndarray]:
    """Tokens of each document, in blocks."""
    size = data.tokens * data.dtype.itemsize
    for start in range(0, len(data), BLOCK):
        bounds = np.asarray(data.boundaries[start : start + BLOCK + 1])
        begins = np.where(bounds < data.sequences, data.pointers[np.minimum(bounds, data.sequences - 1)], size)
        yield np.diff(begins) // data.dtype.itemsize


def length_statistics(data: Indexed) -> Lengths:
    """Statistics of all documents; the median is exact."""
    bins, shortest, longest = np.zeros(64, np.int64), np.iinfo(np.int64).max, 0
    for block in document_lengths(data):
        bins += np.bincount(np.frexp(block)[1], minlength=64)  # the exponent is the number of bits
        shortest, longest = min(shortest, int(block.min())), max(longest, int(block.max()))
    if not len(data):
        raise ConfigError(f"{data.prefix} holds no documents; build it again")
    found = np.flatnonzero(bins)
    histogram = [
        ((1 << bits) >> 1, max((1 << bits) - 1, 0), int(bins[bits])) for bits in range(found[0], found[-1] + 1)
    ]
    middle = [_smallest(data, rank) for rank in ((len(data) - 1) // 2, len(data) // 2)]
    return Lengths(data.tokens / len(data), sum(middle) / 2, shortest, longest, histogram)


def _smallest(data: Indexed, rank: int) -> int:
    """The length that stands at `rank` of all, sorted: its upper half is counted first, then its lower half."""
    uppers = _counts(block >> 16 for block in document_lengths(data))
    upper = int(np.searchsorted(np.cumsum(uppers), rank, side="right"))
    lowers = _counts(block[block >> 16 == upper] & 0xFFFF for block in document_lengths(data))
    below = int(np.sum(uppers[:upper]))
    return (upper << 16) + int(np.searchsorted(np.cumsum(lowers), rank - below, side="right"))


def _counts(blocks: Iterator[np.ndarray]) -> np.ndarray:
    """How often each value below 2**16 occurs."""
    counts = np.zeros(1 << 16, np.int64)
    for block in blocks:
        counts += np.bincount(block, minlength=1 << 16)
    return counts


# ---------------------------------------------------------------- vocabulary


@dataclass
class Vocabulary:
    """How often each id occurs."""

    counts: np.ndarray
    """int64[vocabulary]"""
    outside: int
    """Ids that no vocabulary of this size has."""

    def most_frequent(self, count: int) -> list[int]:
        order = np.argsort(-self.counts, kind="stable")[:count]
        return [int(number) for number in order if self.counts[number]]


def count_ids(data: Indexed, vocab_size: int | None, progress: Progress = lambda count: None) -> Vocabulary:
    """Count the ids of a whole file, a block at a time."""
    size = vocab_size or (1 << 16 if data.dtype.itemsize == 2 else UNKNOWN_VOCABULARY)
    counts, outside = np.zeros(size, np.int64), 0
    with Path(f"{data.prefix}.bin").open("rb") as file:
        while len(block := np.fromfile(file, data.dtype, BLOCK)):
            if int(block.min()) < 0 or int(block.max()) >= size:
                good = block[(block >= 0) & (block < size)]
                outside += len(block) - len(good)
            else:
                good = block
            counts += np.bincount(good, minlength=size)
            progress(len(block))
    return Vocabulary(counts, outside)


# ---------------------------------------------------------------- damage


def damage(data: Indexed, manifest: dict[str, Any], progress: Progress = lambda count: None) -> Iterator[str]:
    """What differs from the manifest, and what contradicts itself in the index; `progress` counts bytes."""
    held = {"documents": len(data), "tokens": data.tokens, "dtype": data.dtype.name}
    for name, value in held.items():
        if manifest[name] != value:
            yield f"{data.prefix}.idx has {name} {value}, the manifest says {manifest[name]}"
    yield from _index_damage(data)
    begin, size = 0, data.tokens * data.dtype.itemsize
    with Path(f"{data.prefix}.bin").open("rb") as file:
        for length, expected in manifest["checksums"]:
            end = begin + length
            found, rest = 0, length
            while rest and (block := file.read(min(rest, 1 << 20))):
                found, rest = zlib.crc32(block, found), rest - len(block)
                progress(len(block))
            if f"{found:08x}" != expected:
                yield (
                    f"{data.prefix}.bin: bytes {begin:,} to {end - 1:,} (documents {_document_at(data, begin):,} to "
                    f"{_document_at(data, end - 1):,}) have CRC-32 {found:08x}, the manifest says {expected}"
                )
            begin = end
    if begin != size:
        yield f"{data.prefix}.bin has {size:,} bytes; the manifest has checksums of {begin:,}"


def _index_damage(data: Indexed) -> Iterator[str]:
    """The first document that does not begin where the one before it ends."""
    begin = 0
    for start in range(0, data.sequences, BLOCK):
        sizes = data.lengths[start : start + BLOCK].astype(np.int64) * data.dtype.itemsize
        expected = begin + np.cumsum(sizes) - sizes
        wrong = np.flatnonzero(data.pointers[start : start + BLOCK] != expected)
        if len(wrong) or np.any(sizes < 0):
            first = start + int(wrong[0] if len(wrong) else np.argmin(sizes))
            yield (
                f"{data.prefix}.idx: sequence {first:,} of {data.lengths[first]:,} tokens begins at byte "
                f"{data.pointers[first]:,}, which is not where the one before it ends"
            )
            return
        begin += int(sizes.sum())
    bounds = data.boundaries
    if (
        bounds[0] != 0
        or bounds[-1] != data.sequences
        or any(np.any(np.diff(part) < 0) for part in _overlapping(bounds))
    ):
        yield f"{data.prefix}.idx: its documents do not begin one after the other"


def _overlapping(values: np.ndarray) -> Iterator[np.ndarray]:
    return (values[start : start + BLOCK + 1] for start in range(0, len(values), BLOCK))


def _document_at(data: Indexed, byte: int) -> int:
    """The document that holds a byte of the .bin; the index is only looked at, not read."""
    sequence = int(np.searchsorted(data.pointers, byte, side="right")) - 1
    return max(int(np.searchsorted(data.boundaries, sequence, side="right")) - 1, 0)


# ---------------------------------------------------------------- ids as text


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each id in its sequence, its leading space included.

    A character whose bytes are shared among ids stands at the last of them; the others are empty.
    """
    texts: list[str] = []
    held: list[int] = []
    for number in map(int, ids):
        if number in (tokenizer.eod, tokenizer.mask):
            texts.append(END_SHOWN if number == tokenizer.eod else MASK_PIECE)
            held = []
            continue
        held.append(number)
        # said twice: what stands first loses its space
        text = tokenizer.decode(held * 2)[len(tokenizer.decode(held)) :]
        if UNREADABLE in text and len(held) < 4:  # a character has at most four bytes
            texts.append("")
        else:
            texts.append(text or f"<{number}>")
            held = []
    if held:
        texts[-1] = UNREADABLE
    return texts


def visible(text: str) -> str:
    """Text for one line of a terminal or of XML: what would move a cursor is spelled out."""
    signs = {"\n": "↵", "\t": "⇥"}
    return "".join(sign if sign.isprintable() else signs.get(sign, f"\\x{ord(sign):02x}") for sign in text)


# ---------------------------------------------------------------- epochs


@dataclass
class Source:
    """What a run draws from one entry of data.train."""

    prefix: str
    tokens: int
    """Tokens of its training share."""
    weight: float
    """Its share of the blend."""
    samples: int
    """Samples that the run draws from it."""
    samples_per_epoch: int

    @property
    def epochs(self) -> float:
        return self.samples / self.samples_per_epoch


def blend_sources(config: RunConfig) -> list[Source]:
    """How often a run reads each of its sources: what EpochChain and Megatron's blend do, without building them."""
    from card_megatron.data.datasets import blend_of

    prefixes, weights = blend_of(config.data.train, weighted=True)
    shares = np.array(weights or [1.0]) / np.sum(weights or [1.0])
    samples = drawn_samples(shares, total_samples(config))
    sources = []
    for prefix, share, drawn in zip(prefixes, shares, samples, strict=True):
        tokens = _training_tokens(prefix, config.data.split)
        an_epoch = (tokens - 1) // config.data.sequence_length
        if an_epoch < 1:
            raise ConfigError(
                f"{prefix}: its training share of {tokens:,} tokens is shorter than one sample of "
                f"data.sequence_length={config.data.sequence_length} + 1 tokens; give more text or a larger share"
            )
        sources.append(Source(prefix, tokens, float(share), int(drawn), an_epoch))
    return sources


def drawn_samples(shares: np.ndarray, total: int) -> np.ndarray:
    """How many of `total` samples Megatron's blend takes from each source."""
    if total > EXACT_SAMPLES:  # the blend keeps every source within some samples of its share
        samples = np.floor(shares * total).astype(np.int64)
        samples[np.argsort(samples - shares * total, kind="stable")[: total - int(samples.sum())]] += 1
        return samples
    from megatron.core.datasets import helpers

    order, places = np.zeros(total, np.int16), np.zeros(total, np.int64)
    # divided by their sum once more, as the blend does: a tie is decided by the last bit
    helpers.build_blending_indices(order, places, shares / shares.sum(), len(shares), total, False)
    return np.bincount(order, minlength=len(shares))


def _training_tokens(prefix: str, split: str | None) -> int:
    """Tokens of the documents that data.split trains on."""
    shares = [float(share) for share in (split or "1,0,0").split(",")]
    data = Indexed(prefix)
    return int(np.sum(data.lengths[: round(shares[0] / sum(shares) * data.sequences)], dtype=np.int64))
