"""Ranks that hold up the others, named with their hosts.

In a synchronous step all ranks take equally long: the slow one works, the others wait for it. So step times say
nothing; what is compared is each rank's own work: its forward and backward passes, the wait for its data included,
without pipeline transfers and gradient reductions, in which a rank waits for others (training/sections.py). Stages of a
pipeline have different work, so a rank is compared with the ranks of its own stage in the other replicas.

Ranks of one tensor- or context-parallel group wait for each other inside every layer: a slow one slows down all of them
alike, and they are named together. `card doctor --distributed` on their host then tells them apart. Where there is one
replica only, nothing can be compared, and nobody is named.

It costs one gather of a few numbers a record (logging.interval). The median over the steps of a record forgives a
single hiccup, and a rank is named when it was slow in two records running.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """A rank: where it runs, and what its work is."""

    rank: int
    host: str
    stage: int
    replica: int


@dataclass(frozen=True)
class Slow:
    """Ranks that move in step, one of which is slow."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    seconds: float
    """Own work of a step."""
    ratio: float
    """How many times the median of its peers that is."""
    reads: bool
    """True where most of what is too much is spent waiting for data."""

    def __str__(self) -> str:
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))} on {', '.join(self.hosts)}"
        why = ", most of the difference waiting for data" if self.reads else ""
        return f"{ranks}: {self.seconds:.3f} s of own work a step, {self.ratio:.2f} times the median of its peers{why}"


def slow_ranks(places: Sequence[Place], own: Sequence[float], data: Sequence[float], factor: float) -> list[Slow]:
    """Those whose own work takes more than `factor` times the median of their stage, the slowest first."""
    found = [group for group in compare(places, own, data) if group.ratio > factor]
    return sorted(found, key=lambda group: -group.ratio)


def compare(places: Sequence[Place], own: Sequence[float], data: Sequence[float]) -> list[Slow]:
    """Every group of ranks that move in step, against the groups of the same stage; none where there is but one."""
    groups: dict[tuple[int, int], list[int]] = {}
    for number, place in enumerate(places):
        groups.setdefault((place.stage, place.replica), []).append(number)
    # the slowest of a group sets its pace; in step, all of them show it
    pace = {key: max(own[number] for number in members) for key, members in groups.items()}
    waits = {key: max(data[number] for number in members) for key, members in groups.items()}
    compared = []
    for (stage, replica), members in groups.items():
        peers = [key for key in groups if key[0] == stage]
        if len(peers) < 2:
            continue
        # the lower of two middles: of two replicas, the faster one is the measure
        median, median_wait = (statistics.median_low(table[key] for key in peers) for table in (pace, waits))
        seconds, wait = pace[stage, replica], waits[stage, replica]
        compared.append(
            Slow(
                ranks=tuple(places[number].rank for number in members),
                hosts=tuple(dict.fromkeys(places[number].host for number in members)),
                seconds=seconds,
                ratio=seconds / median if median > 0 else 1.0,
                reads=seconds > median and wait - median_wait > 0.5 * (seconds - median),
            )
        )
    return compared


class Stragglers:
    """Remembers who was slow, and says so when it has become certain, and again when it is over."""

    def __init__(self, places: Sequence[Place], factor: float, events: Callable[..., None]):
        self.places, self.factor, self.events = places, factor, events
        self.slow_before: set[tuple[int, ...]] = set()
        self.named: set[tuple[int, ...]] = set()

    def look(self, step: int, own: Sequence[float], data: Sequence[float]) -> dict[str, Any] | None:
        """The slowest group, for the record; events for those that are slow twice running."""
        groups = compare(self.places, own, data)
        if not groups:
            return None
        slow = {group.ranks: group for group in slow_ranks(self.places, own, data, self.factor)}
        certain = {ranks for ranks in slow if ranks in self.slow_before}
        for ranks in sorted(certain - self.named):
            group = slow[ranks]
            facts = dict(ranks=list(ranks), hosts=list(group.hosts), seconds=group.seconds, ratio=group.ratio)
            self.events("straggler", step=step, text=str(group), reads=group.reads, **facts)
        for ranks in sorted(self.named - set(slow)):
            self.events("straggler_over", step=step, ranks=list(ranks))
        self.named = (self.named | certain) & set(slow)
        self.slow_before = set(slow)
        worst = max(groups, key=lambda group: group.ratio)
        return {"rank": worst.ranks[0], "host": worst.hosts[0], "ratio": worst.ratio, "named": len(self.named)}
