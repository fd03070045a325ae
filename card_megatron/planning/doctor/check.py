"""A finding, and what many ranks' findings come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

VERDICTS = ("ok", "warn", "fail")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    subject: str
    """What it belongs to: software, limits, hardware, storage, network."""
    name: str
    value: str
    """What was found."""
    expected: str = ""
    verdict: str = "ok"
    remedy: str = ""
    """What to do about a warning or a failure."""
    alike: bool = False
    """True for what must be the same on all ranks, such as versions."""
    where: str = ""
    """The rank and host that it is about, among several."""


@dataclass(frozen=True)
class Findings:
    """All that one rank found."""

    rank: int
    host: str
    checks: tuple[Check, ...]


def worst(checks: Sequence[Check]) -> str:
    """The gravest verdict."""
    return max((check.verdict for check in checks), key=VERDICTS.index, default="ok")


def judged(
    subject: str, name: str, number: float, unit: str, *, floor: float, fail: float = 0.0, remedy: str = ""
) -> Check:
    """A speed or a size that should not be below `floor`, and must not be below `fail`."""
    verdict = "fail" if number < fail else "warn" if number < floor else "ok"
    expected = f"at least {shown(floor)} {unit}"
    return Check(subject, name, f"{shown(number)} {unit}", expected, verdict, remedy if verdict != "ok" else "")


def shown(number: float) -> str:
    """Three digits, or all of a whole number."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def merge(findings: Sequence[Findings]) -> list[Check]:
    """One line a thing: its worst case over all ranks, with the rank and host where that is."""
    by_name: dict[tuple[str, str], list[tuple[Findings, Check]]] = {}
    for rank in findings:
        for check in rank.checks:
            by_name.setdefault((check.subject, check.name), []).append((rank, check))
    return [line for group in by_name.values() for line in _merge_one(group, len(findings))]


def _merge_one(group: list[tuple[Findings, Check]], ranks: int) -> list[Check]:
    gravest = max(group, key=lambda pair: VERDICTS.index(pair[1].verdict))  # the first of the worst
    rank, check = gravest
    alike = [pair for pair in group if pair[1].verdict == check.verdict]
    if check.verdict != "ok" and ranks > 1 and not check.where:
        hosts = dict.fromkeys(found.host for found, _ in alike)
        more = f" and {len(alike) - 1} more ranks on {len(hosts)} hosts" if len(alike) > 1 else ""
        check = replace(check, where=f"rank {rank.rank} on {rank.host}{more}")
    lines = [check]
    values = {found.value for _, found in group}
    if check.alike and len(values) > 1:
        lines.append(_differing(group))
    return lines


def _differing(group: list[tuple[Findings, Check]]) -> Check:
    """Something that must be the same everywhere and is not: the rarest, then the worst value is named, and where."""
    holders: dict[str, list[Findings]] = {}
    verdicts: dict[str, int] = {}
    for rank, check in group:
        holders.setdefault(check.value, []).append(rank)
        verdicts[check.value] = VERDICTS.index(check.verdict)
    value, found = min(holders.items(), key=lambda item: (len(item[1]), -verdicts[item[0]]))
    others = ", ".join(sorted(set(holders) - {value}))
    first = group[0][1]
    return Check(
        first.subject,
        f"{first.name} on all ranks",
        value,
        others,
        "fail",
        "install the same environment on every host (one container image, or one shared virtual environment)",
        where=f"rank {found[0].rank} on {found[0].host}",
    )
