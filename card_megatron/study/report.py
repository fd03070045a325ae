"""The report of a study, from the records of its runs alone: tables in Markdown, curves as pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.evaluation.compare import arrow
from card_megatron.evaluation.curves import scale
from card_megatron.evaluation.report import NOTHING, markdown_table, picture, shown
from card_megatron.study.definition import Study, shown_option
from card_megatron.study.intervals import Interval, crossings, interval, paired, pooled
from card_megatron.study.record import read_record

ABOUT = """Means over seeds with 95% intervals (Student's t over seeds; the same held-out texts for all). Perplexities
are averaged and compared as their logarithms, nats per token: a mean is geometric, with its interval in brackets, and
a difference is a ratio beside its nats. {differences}
It counts where its interval leaves 0 out; else it reads *no difference seen*."""
PAIRED = "A difference is paired by seed."
POOLED = """A difference is paired by seed. All differences of a column share one spread, that of its runs
around run + seed, since they are variants of one another."""
STRATEGY = " · "
"""Between a metric of generated text and the strategy that wrote it."""
SPEED = "tok/s"


@dataclass(frozen=True)
class Findings:
    """The records of a study's runs, by name and seed."""

    study: Study
    records: Mapping[str, Mapping[int, dict[str, Any]]]

    def values(self, run: str, metric: str) -> dict[int, float]:
        cells = {seed: record["cells"].get(metric) for seed, record in self.records.get(run, {}).items()}
        return {seed: cell["value"] for seed, cell in cells.items() if cell and cell["value"] is not None}

    def bound(self, run: str, metric: str) -> str:
        cells = [record["cells"].get(metric, {}) for record in self.records.get(run, {}).values()]
        return next((cell["bound"] for cell in cells if cell.get("bound")), "")

    def columns(self) -> dict[str, str]:
        if self.study.columns:
            return self.study.columns
        return {name: name for name in dict.fromkeys(_cell_names(self)) if STRATEGY not in name}


def read_findings(study: Study) -> Findings:
    """Whatever is finished of a study; a record of another configuration is refused by `card study run`."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for run in study.grid():
        path = study.result_path(run)
        if path.is_file():
            found.setdefault(run.name, {})[run.seed] = read_record(path)
    if not found:
        raise ConfigError(f"{study.path.parent / study.results} has no record of {study.path}; run the study first")
    return Findings(study, found)


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


def is_perplexity(metric: str) -> bool:
    return metric.endswith((" ppl", " perplexity"))


def mean_cell(findings: Findings, run: str, metric: str) -> str:
    values = findings.values(run, metric)
    if not values:
        return NOTHING
    bound = findings.bound(run, metric)
    if is_perplexity(metric):
        known = interval([math.log(value) for value in values.values()])
        text = shown(math.exp(known.mean))
        if known.half is not None:
            text += f" [{shown(math.exp(known.mean - known.half))}, {shown(math.exp(known.mean + known.half))}]"
    else:
        known = interval([*values.values()])
        text = shown(known.mean, known.half)
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
                verdict(found[metric][name], ratio=is_perplexity(metric)) if name in found[metric] else NOTHING
                for metric in columns.values()
            ),
        ]
        for name in others
    ]
    return f"Difference from `{baseline}`:\n\n" + markdown_table(["run", *columns], rows)


def differences(findings: Findings, metric: str) -> dict[str, Interval]:
    """Of every run that can be compared; of perplexities in nats."""
    values = {run: findings.values(run, metric) for run in findings.study.runs}
    if is_perplexity(metric):
        values = {run: {seed: math.log(value) for seed, value in part.items()} for run, part in values.items()}
    baseline = findings.study.compared_with
    if findings.study.pooled:
        return pooled(values, baseline)
    found = {run: paired(part, values[baseline]) for run, part in values.items() if run != baseline}
    return {run: difference for run, difference in found.items() if difference is not None}


def verdict(difference: Interval, *, ratio: bool = False) -> str:
    text = f"{'+' if difference.mean > 0 else ''}{shown(difference.mean, difference.half)}"
    if ratio:
        text = f"x {math.exp(difference.mean):.3f} ({text} nats)"
    if difference.apart_from_zero is None:
        return f"{text}, one seed"
    return text if difference.apart_from_zero else f"no difference seen: {text}"


def strategies_table(findings: Findings) -> str:
    """Of generated text: a row a run and decoding strategy, speeds relative to the first strategy of its seed."""
    rows, names = [], {}
    for run, records in findings.records.items():
        cells = [name.partition(STRATEGY) for record in records.values() for name in record["cells"]]
        names[run] = {strategy: None for _, mark, strategy in cells if mark}
    metrics = list(dict.fromkeys(n.partition(STRATEGY)[0] for n in _cell_names(findings) if STRATEGY in n))
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


def _cell_names(findings: Findings) -> list[str]:
    return [name for runs in findings.records.values() for record in runs.values() for name in record["cells"]]


def origins(findings: Findings) -> str:
    """Where every number comes from."""
    rows = [
        [
            *(f"{name}-s{seed}", record["config_hash"], record["commit"] or NOTHING, record["machine"]),
            *(f"{record['tokens']:,}", f"{record['hours']:.2f}"),
        ]
        for name, runs in findings.records.items()
        for seed, record in sorted(runs.items())
    ]
    header = ["record", "config hash", "commit", "machine", "tokens", "hours of training"]
    return "Every cell comes from these records:\n\n" + markdown_table(header, rows, left=4)


# ---------------------------------------------------------------- curves


def curve_of(record: Mapping[str, Any], metrics: list[str], epochs: bool) -> list[tuple[float, float]]:
    """(tokens or epochs, value) of the first metric that the record has."""
    for metric in metrics:
        found = record["curves"].get(metric)
        if found and (not epochs or found["epochs"]):
            return [*zip(found["epochs" if epochs else "tokens"], found["values"], strict=True)]
    return []


def mean_curve(findings: Findings, run: str, metrics: list[str]) -> list[tuple[float, float]]:
    """Over the seeds, at the places that all of them have."""
    curves = [dict(curve_of(record, metrics, findings.study.epochs)) for record in findings.records[run].values()]
    shared = [place for place in curves[0] if all(place in curve for curve in curves)]
    return [(place, sum(curve[place] for curve in curves) / len(curves)) for place in sorted(shared)]


def draw(findings: Findings, folder: Path) -> dict[str, str]:
    """A picture for each of the study's curves: the mean over seeds, and each seed thin behind it."""
    drawn = {}
    for name, metrics in findings.study.curves.items():
        known = {run: curve for run in findings.records if (curve := mean_curve(findings, run, metrics))}
        if not known:
            continue
        path = folder / f"{findings.study.name}_{name.replace(' ', '_')}.png"
        across = "epochs" if findings.study.epochs else "tokens"
        with picture(path, f"{findings.study.title}: {name}", across, name) as axes:
            scale(axes, metrics[0])
            for run, curve in known.items():
                drawn_metric = next(metric for metric in metrics if metric in first_record(findings, run)["curves"])
                bound = " (bound)" if "bound" in drawn_metric else ""
                (line,) = axes.plot(*zip(*curve, strict=True), ".-", label=f"{run}{bound}")
                if len(findings.records[run]) > 1:
                    for record in findings.records[run].values():
                        points = curve_of(record, metrics, findings.study.epochs)
                        axes.plot(*zip(*points, strict=True), "-", alpha=0.3, linewidth=0.8, color=line.get_color())
                if findings.study.epochs:
                    best = min(curve, key=lambda point: point[1])
                    axes.plot(*best, "*", markersize=12, color=line.get_color())
            for _, place, value in crossing_points(findings, metrics):
                axes.plot(place, value, "x", markersize=10, color="black")
        drawn[name] = path.name
    return drawn


def first_record(findings: Findings, run: str) -> dict[str, Any]:
    return next(iter(findings.records[run].values()))


def crossing_points(findings: Findings, metrics: list[str]) -> Iterator[tuple[str, float, float]]:
    """(run, epoch, value) where a run's mean curve falls below the baseline's."""
    baseline = findings.study.compared_with
    if not findings.study.epochs or baseline not in findings.records:
        return
    theirs = mean_curve(findings, baseline, metrics)
    for run in findings.records:
        ours = mean_curve(findings, run, metrics)
        for place in crossings(ours, theirs):
            if run != baseline:
                yield run, place, _between(ours, place)


def _between(curve: list[tuple[float, float]], place: float) -> float:
    for (left, before), (right, after) in pairwise(curve):
        if left <= place <= right:
            return before + (after - before) * (place - left) / (right - left)
    return curve[-1][1]


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
                    [name, run, shown(value), f"{epoch:.1f}", shown(curve[-1][1]), f"{curve[-1][0]:.1f}", passes]
                )
    header = ["curve", "run", "best", "at epoch", "last", "at epoch", f"falls below {findings.study.compared_with} at"]
    return markdown_table(header, rows, left=2)
