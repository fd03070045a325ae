"""The report of a study as a page of Markdown: its tables, and its pictures by their names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from card_megatron.evaluation.compare import arrow
from card_megatron.evaluation.report import NOTHING, markdown_table, shown
from card_megatron.study.definition import STRATEGY, is_perplexity, perplexity, shown_option
from card_megatron.study.findings import (
    SPEED,
    Findings,
    below_best,
    crossing_points,
    curve_name,
    differences,
    mean_curve,
    relation,
    strategies,
    strategy_difference,
    strategy_metrics,
)
from card_megatron.study.intervals import Interval, interval

ABOUT = """Means over seeds with 95% intervals (Student's t over seeds; two that happen to agree have a narrow one). All
runs of a seed see the same held-out texts. Perplexities are averaged and compared as their logarithms, nats per token:
a mean is geometric, with its interval in brackets, and a difference is a ratio beside its nats. {differences}
It counts where its interval leaves 0 out; else it reads *no difference seen*. Where a run has
but a bound (≤), so has its difference: it may be smaller, or none."""
PAIRED = "A difference is paired by seed."
POOLED = """A difference is paired by seed. All differences of a column share one spread, that of its runs
around run + seed: as variants of one another they are taken to vary alike, which two seeds cannot check. The
intervals of a column hold together (Bonferroni over its runs)."""


def report(findings: Findings, pictures: Mapping[str, str]) -> str:
    """The whole page; `pictures` are names of curves -> their files, beside it."""
    study = findings.study
    about = ABOUT.format(differences=POOLED if study.pooled else PAIRED)
    parts = [f"## {study.title}", about, means_table(findings)]
    if len(study.runs) > 1:
        parts += [differences_table(findings, baseline) for baseline in study.baselines]
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
    if not values and findings.not_measured(run, metric):
        return "not measured yet"
    if not values:
        return "not finite" if findings.not_finite(run, metric) else NOTHING
    bound = findings.bound(run, metric)
    if is_perplexity(metric):
        known = interval([math.log(value) for value in values.values()])
        text = shown(perplexity(known.mean))
        if known.half is not None:
            text += f" [{shown(perplexity(known.mean - known.half))}, {shown(perplexity(known.mean + known.half))}]"
    else:
        known = interval([*values.values()])
        text = shown(known.mean, known.half)
    lost = findings.not_finite(run, metric)
    if lost:
        text += f"; of seed {', '.join(map(str, lost))} not finite"
    return f"{'≤ ' if bound and arrow(metric) == '↓' else ''}{text}{f' ({bound})' if bound else ''}"


def differences_table(findings: Findings, baseline: str) -> str:
    """Every run against the baseline, metric by metric."""
    columns = findings.columns()
    others = [name for name in findings.study.runs if name != baseline and findings.records.get(name)]
    if not others or baseline not in findings.records:
        return f"No difference from `{baseline}` can be told yet: it and another run must be finished."
    found = {metric: differences(findings, metric, baseline) for metric in columns.values()}
    rows = [
        [
            name,
            *(
                verdict(found[metric][name], is_perplexity(metric), relation(findings, name, baseline, metric))
                if name in found[metric]
                else NOTHING
                for metric in columns.values()
            ),
        ]
        for name in others
    ]
    return f"Difference from `{baseline}`:\n\n" + markdown_table(["run", *columns], rows)


def verdict(difference: Interval, ratio: bool = False, relation: str = "") -> str:
    text = f"{'+' if difference.mean > 0 else ''}{shown(difference.mean, difference.half)}"
    if ratio:
        text = f"x {perplexity(difference.mean):.3f} ({text} nats)"
    text = relation + text + (", one seed" if difference.count < 2 else "")
    return f"no difference seen: {text}" if difference.apart_from_zero is False else text


def strategies_table(findings: Findings) -> str:
    """Of generated text: a row a run and decoding strategy, and how each differs from the run's first."""
    metrics = [metric for metric in strategy_metrics(findings) if metric != SPEED]
    pairs = [(run, strategy) for run in findings.records for strategy in strategies(findings, run)]
    if not pairs:
        return ""
    values = [
        [run, strategy, *(mean_cell(findings, run, f"{metric}{STRATEGY}{strategy}") for metric in metrics)]
        for run, strategy in pairs
    ]
    apart = [
        [run, strategy, *(strategy_verdict(findings, run, metric, strategy) for metric in (SPEED, *metrics))]
        for run, strategy in pairs
        if strategy != strategies(findings, run)[0]
    ]
    header = ["run", "strategy", *(f"{name} {arrow(name)}".strip() for name in metrics)]
    text = markdown_table(header, values, left=2)
    if apart:
        text += "\nDifference from the first strategy of the run, paired by seed:\n\n"
        text += markdown_table(["run", "strategy", "speed", *metrics], apart, left=2)
    return text


def strategy_verdict(findings: Findings, run: str, metric: str, strategy: str) -> str:
    difference = strategy_difference(findings, run, metric, strategy)
    if difference is None:
        return NOTHING
    if metric != SPEED:
        return verdict(difference, is_perplexity(metric))
    text = f"x {shown(difference.mean + 1, difference.half)}" + (", one seed" if difference.count < 2 else "")
    return f"no difference seen: {text}" if difference.apart_from_zero is False else text


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
    table = "Every cell comes from these records:\n\n" + markdown_table(header, rows, left=4)
    hours = sum(record["hours"] for runs in findings.records.values() for record in runs.values())
    said = f"\n{hours:.1f} hours of training in all."
    if any((row[2] or "").endswith("+") for row in rows):
        said += " `+`: with changes of the package that were not committed."
    return table + said + "\n"


def crossings_text(findings: Findings) -> str:
    """Of a study by epochs: the best point of each run, and where it passes the baselines."""
    study = findings.study
    if not study.epochs:
        return ""
    rows = []
    for name, metrics in study.curves.items():
        crossed = {baseline: [*crossing_points(findings, metrics, baseline)] for baseline in study.baselines}
        for run in findings.records:
            curve = mean_curve(findings, run, metrics)
            if curve:
                epoch, value = min(curve, key=lambda point: point[1])
                passes = [[place for one, place, _ in points if one == run] for points in crossed.values()]
                below = below_best(findings, run, metrics)
                rows.append(
                    [
                        *(name, curve_name(findings, run, metrics), shown(value), f"{epoch:.1f}"),
                        *(shown(curve[-1][1]), f"{curve[-1][0]:.1f}"),
                        NOTHING if below is None else f"{below:.1f}",
                        *(", ".join(f"{place:.1f}" for place in places) or NOTHING for places in passes),
                    ]
                )
    falls = [f"falls below the best of {study.compared_with} at"]
    falls += [f"falls below {baseline} at" for baseline in study.baselines]
    return markdown_table(["curve", "run", "best", "at epoch", "last", "at epoch", *falls], rows, left=2)
