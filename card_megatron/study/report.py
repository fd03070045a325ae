"""The report of a study as a page of Markdown: its tables, and its pictures by their names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from card_megatron.evaluation.compare import arrow
from card_megatron.evaluation.report import NOTHING, markdown_table, shown
from card_megatron.study.definition import shown_option
from card_megatron.study.findings import (
    STRATEGY,
    Findings,
    cell_names,
    crossing_points,
    curve_name,
    differences,
    is_perplexity,
    mean_curve,
)
from card_megatron.study.intervals import Interval, interval

ABOUT = """Means over seeds with 95% intervals (Student's t over seeds; the same held-out texts for all). Perplexities
are averaged and compared as their logarithms, nats per token: a mean is geometric, with its interval in brackets, and
a difference is a ratio beside its nats. {differences}
It counts where its interval leaves 0 out; else it reads *no difference seen*. Where a run has
but a bound (≤), so has its difference: it may be smaller, or none."""
PAIRED = "A difference is paired by seed."
POOLED = """A difference is paired by seed. All differences of a column share one spread, that of its runs
around run + seed, since they are variants of one another."""
SPEED = "tok/s"


def report(findings: Findings, pictures: Mapping[str, str]) -> str:
    """The whole page; `pictures` are names of curves -> their files, beside it."""
    study = findings.study
    about = ABOUT.format(differences=POOLED if study.pooled else PAIRED)
    parts = [f"## {study.title}", about, means_table(findings)]
    parts += [differences_table(findings)] if len(study.runs) > 1 else []
    parts += [part for part in (strategies_table(findings), crossings_text(findings)) if part]
    parts += [f"![{name}]({path})" for name, path in pictures.items()]
    parts += [origins(findings)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


# ---------------------------------------------------------------- tables


def means_table(findings: Findings) -> str:
    columns = findings.columns()
    header = [
        "run",
        "changed",
        "seeds",
        "tokens",
        *(f"{name} {arrow(metric)}".strip() for name, metric in columns.items()),
    ]
    rows = []
    for name, given in findings.study.runs.items():
        records = findings.records.get(name, {})
        tokens = {record["tokens"] for record in records.values()}
        rows.append(
            [
                name,
                ", ".join(f"{key.rpartition('.')[2]}={shown_option(value)}" for key, value in visible(given)),
                ", ".join(map(str, sorted(records))) or "not run yet",
                " / ".join(f"{count / 1e6:.1f}M" for count in sorted(tokens)) or NOTHING,
                *(mean_cell(findings, name, metric) for metric in columns.values()),
            ]
        )
    return markdown_table(header, rows, left=2)


def visible(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What tells runs apart; how they are validated does not."""
    yield from ((key, value) for key, value in given.items() if not key.startswith(("eval.", "logging.")))


def mean_cell(findings: Findings, run: str, metric: str) -> str:
    values = findings.values(run, metric)
    if not values:
        return "not finite" if findings.not_finite(run, metric) else NOTHING
    bound = findings.bound(run, metric)
    if is_perplexity(metric):
        known = interval([math.log(value) for value in values.values()])
        text = shown(math.exp(known.mean))
        if known.half is not None:
            text += f" [{shown(math.exp(known.mean - known.half))}, {shown(math.exp(known.mean + known.half))}]"
    else:
        known = interval([*values.values()])
        text = shown(known.mean, known.half)
    lost = findings.not_finite(run, metric)
    if lost:
        text += f"; of seed {', '.join(map(str, lost))} not finite"
    return f"{'≤ ' if bound and arrow(metric) == '↓' else ''}{text}{f' ({bound})' if bound else ''}"


def differences_table(findings: Findings) -> str:
    """Every run against the baseline, metric by metric."""
    columns, baseline = findings.columns(), findings.study.compared_with
    others = [name for name in findings.study.runs if name != baseline and findings.records.get(name)]
    if not others or baseline not in findings.records:
        return f"No difference can be told yet: {baseline} and another run must be finished."
    found = {metric: differences(findings, metric) for metric in columns.values()}
    rows = [
        [
            name,
            *(
                verdict(found[metric][name], is_perplexity(metric), relation(findings, name, metric))
                if name in found[metric]
                else NOTHING
                for metric in columns.values()
            ),
        ]
        for name in others
    ]
    return f"Difference from `{baseline}`:\n\n" + markdown_table(["run", *columns], rows)


def relation(findings: Findings, run: str, metric: str) -> str:
    """What bounds make of a difference from the baseline: at most this, at least this, or neither can be said."""
    if arrow(metric) != "↓":
        return ""
    ours, theirs = (bool(findings.bound(name, metric)) for name in (run, findings.study.compared_with))
    return {(True, False): "≤ ", (False, True): "≥ ", (True, True): "of bounds: "}.get((ours, theirs), "")


def verdict(difference: Interval, ratio: bool = False, relation: str = "") -> str:
    text = f"{'+' if difference.mean > 0 else ''}{shown(difference.mean, difference.half)}"
    if ratio:
        text = f"x {math.exp(difference.mean):.3f} ({text} nats)"
    text = relation + text
    if difference.apart_from_zero is None:
        return f"{text}, one seed"
    return text if difference.apart_from_zero else f"no difference seen: {text}"


def strategies_table(findings: Findings) -> str:
    """Of generated text: a row a run and decoding strategy, speeds relative to the first strategy of its seed."""
    rows, names = [], {}
    for run, records in findings.records.items():
        cells = [name.partition(STRATEGY) for record in records.values() for name in record["cells"]]
        names[run] = {strategy: None for _, mark, strategy in cells if mark}
    metrics = list(dict.fromkeys(n.partition(STRATEGY)[0] for n in cell_names(findings) if STRATEGY in n))
    if not metrics:
        return ""
    for run, strategies in names.items():
        for strategy in strategies:
            speeds = findings.values(run, f"{SPEED}{STRATEGY}{strategy}")
            first = findings.values(run, f"{SPEED}{STRATEGY}{next(iter(strategies))}")
            ratios = [speeds[seed] / first[seed] for seed in speeds if first.get(seed)]
            relative = interval(ratios) if ratios else None
            rows.append(
                [
                    *(run, strategy, NOTHING if relative is None else f"{shown(relative.mean, relative.half)} x"),
                    *(
                        mean_cell(findings, run, f"{metric}{STRATEGY}{strategy}")
                        for metric in metrics
                        if metric != SPEED
                    ),
                ]
            )
    header = ["run", "strategy", "speed", *(f"{name} {arrow(name)}".strip() for name in metrics if name != SPEED)]
    return markdown_table(header, rows, left=2)


def origins(findings: Findings) -> str:
    """Where every number comes from."""
    rows = [
        [
            *(f"{name}-s{seed}", record["config_hash"], record["commit"] or NOTHING, record["machine"] or NOTHING),
            *(f"{record['tokens']:,}", f"{record['hours']:.2f}"),
        ]
        for name, runs in findings.records.items()
        for seed, record in sorted(runs.items())
    ]
    header = ["record", "config hash", "commit", "machine", "tokens", "hours of training"]
    return "Every cell comes from these records:\n\n" + markdown_table(header, rows, left=4)


def crossings_text(findings: Findings) -> str:
    """Of a study by epochs: the best point of each run, and where it passes the baseline."""
    if not findings.study.epochs:
        return ""
    rows = []
    for name, metrics in findings.study.curves.items():
        crossed: dict[str, list[float]] = {}
        for run, place, _ in crossing_points(findings, metrics):
            crossed.setdefault(run, []).append(place)
        for run in findings.records:
            curve = mean_curve(findings, run, metrics)
            if curve:
                epoch, value = min(curve, key=lambda point: point[1])
                passes = ", ".join(f"{place:.1f}" for place in crossed.get(run, [])) or NOTHING
                rows.append(
                    [
                        name,
                        curve_name(findings, run, metrics),
                        shown(value),
                        f"{epoch:.1f}",
                        shown(curve[-1][1]),
                        f"{curve[-1][0]:.1f}",
                        passes,
                    ]
                )
    header = ["curve", "run", "best", "at epoch", "last", "at epoch", f"falls below {findings.study.compared_with} at"]
    return markdown_table(header, rows, left=2)
