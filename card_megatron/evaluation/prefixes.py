"""Which tokens must be forwarded once, and which again: a tree of the prefixes that sequences share.

The endings of a question share its context, the questions of a few-shot task its examples. Sorted, sequences that
share a prefix stand side by side; the tree says which prefix is fed once, and whose keys and values are then copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

MIN_SHARED = 16
"""A shorter common stretch is fed again: a copy and a further pass cost more."""


@dataclass
class Node:
    """Tokens start .. stop - 1 of the sequences first .. last - 1 (in sorted order), which all of them share."""

    start: int
    stop: int
    first: int
    last: int
    children: list[Node] = field(default_factory=list)

    @property
    def width(self) -> int:
        return self.stop - self.start

    @property
    def depth(self) -> int:
        """Levels of the tree from here down."""
        return 1 + max((child.depth for child in self.children), default=0)

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass
class Sorted:
    """Sequences that must be fed, none of them a prefix of another, and who reads the outputs of which."""

    sequences: list[np.ndarray]
    common: np.ndarray
    """Tokens that a sequence shares with the one before it; 0 for the first."""
    readers: list[list[int]]
    """The given sequences that are this one or a prefix of it: one pass answers them all."""


def sort_sequences(given: Sequence[Sequence[int]]) -> Sorted:
    order = sorted(range(len(given)), key=lambda index: tuple(given[index]))
    hosts: list[int] = []
    readers: list[list[int]] = []
    common: list[int] = []
    # from the back: what starts with a sequence stands right behind it
    arrays = {index: np.asarray(given[index], dtype=np.int64) for index in order}
    for index in reversed(order):
        mine = arrays[index]
        shared = _common(mine, arrays[hosts[-1]]) if hosts else 0
        if hosts and shared == len(mine):
            readers[-1].append(index)
            continue
        common.append(shared)  # between this one and the host behind it
        hosts.append(index)
        readers.append([index])
    hosts.reverse()
    readers.reverse()
    # common[i] stands beside the sequence before; what the first one appended belongs to nothing
    return Sorted([arrays[index] for index in hosts], np.array([0, *common[:0:-1]], dtype=np.int64), readers)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def shares(known: Sorted, parts: int) -> list[range]:
    """Cut the sorted sequences into stretches of the same number of new tokens: prefixes are shared inside them."""
    lengths = np.array([len(sequence) for sequence in known.sequences], dtype=np.int64)
    spent = np.cumsum(lengths - known.common)
    total = int(spent[-1]) if len(spent) else 0
    cuts = [int(np.searchsorted(spent, total * part / parts, side="left")) for part in range(1, parts)]
    # a cut falls behind the sequence that reaches its share
    edges = [0, *(min(cut + 1, len(lengths)) for cut in cuts), len(lengths)]
    return [range(first, max(first, last)) for first, last in pairwise(edges)]


def prefix_forest(known: Sorted, part: range) -> list[Node]:
    """The trees of one share; a node's tokens are fed once for all sequences below it."""
    lengths = [len(sequence) for sequence in known.sequences]

    def split(first: int, last: int, depth: int) -> list[Node]:
        nodes, begin = [], first
        for index in range(first + 1, last + 1):
            if index < last and known.common[index] >= depth + MIN_SHARED:
                continue
            if index - begin == 1:
                nodes.append(Node(depth, lengths[begin], begin, index))
            else:
                stop = int(known.common[begin + 1 : index].min())
                nodes.append(Node(depth, stop, begin, index, split(begin, index, stop)))
            begin = index
        return nodes

    return split(part.start, part.stop, 0)
