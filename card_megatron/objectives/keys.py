"""Randomness keyed by what a sample is, never by who reads it or when."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np

GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: multiples of it fill [0, 2**64) most evenly


@functools.lru_cache(maxsize=256)
def stream_key(seed: int, split: str) -> tuple[int, int]:
    """128 bits that name the stream of (seed, split)."""
    digest = hashlib.blake2b(f"{seed}/{split}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


@dataclass(frozen=True)
class SampleKey:
    """(seed, split name, index in the split's order): all that a sample's noise may depend on."""

    seed: int
    split: str
    index: int

    def rng(self) -> np.random.Generator:
        """A generator of this sample's own: Philox counts from a place that no other index reaches."""
        # The 256-bit counter is incremented in its first word; the index sits in the last.
        key = np.array(stream_key(self.seed, self.split), dtype=np.uint64)
        counter = np.array([0, 0, 0, self.index], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))

    def stratified(self) -> float:
        """A number in [0, 1) such that any run of consecutive indices covers [0, 1) evenly."""
        offset = stream_key(self.seed, self.split)[0]
        return ((offset + self.index * GOLDEN_RATIO_64) % 2**64) / 2**64
