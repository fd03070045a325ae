"""What is known of a study, from the records of its runs alone: values, differences, curves and where they cross."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.config.keys import suggestion
from card_megatron.evaluation.compare import arrow
from card_megatron.study.definition import STRATEGY, Study, StudyRun, is_perplexity
from card_megatron.study.intervals import Interval, crossings, interval, paired, pooled
from card_megatron.study.stored import record_of

SPEED = "tok/s"
"""Of generated text: it says something beside another of the same machine alone."""


@dataclass(frozen=True)
class Findings:
    """The records of a study's runs, by name and seed."""

    study: Study
    records: Mapping[str, Mapping[int, dict[str, Any]]]

    def values(self, run: str, metric: str) -> dict[int, float]:
        cells = {seed: record["cells"].get(metric) for seed, record in self.records.get(run, {}).items()}
        return {seed: cell["value"] for seed, cell in cells.items() if cell and cell["value"] is not None}

    def not_finite(self, run: str, metric: str) -> list[int]:
        """Seeds of which it was measured and is no number: they diverged."""
        records = self.records.get(run, {})
        return [seed for seed in records if records[seed]["cells"].get(metric, {"value": 0})["value"] is None]

    def not_measured(self, run: str, metric: str) -> bool:
        """Finished, but its records lack an evaluation that gave this metric elsewhere: it may still come."""
        evaluations = [record["evaluations"] for records in self.records.values() for record in records.values()]
        givers = {name for known in evaluations for name, evaluation in known.items() if metric in evaluation["cells"]}
        return any(givers - set(record["evaluations"]) for record in self.records.get(run, {}).values())

    def bound(self, run: str, metric: str) -> str:
        cells = [record["cells"].get(metric, {}) for record in self.records.get(run, {}).values()]
        return ", ".join(dict.fromkeys(cell["bound"] for cell in cells if cell.get("bound")))

    def columns(self) -> dict[str, str]:
        if self.study.columns:
            return self.study.columns
        return {name: name for name in dict.fromkeys(cell_names(self)) if STRATEGY not in name}


def read_findings(study: Study) -> Findings:
    """Whatever is finished of a study, refused where parts of it cannot stand side by side."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    known: dict[str, tuple[Any, str]] = {}
    for run in study.grid():
        if study.result_path(run).is_file():
            record = record_of(study, run, run.load())
            refuse_other_words(study, run, record)
            for prefix, identity in (record.get("data") or {}).items():
                first, label = known.setdefault(prefix, (identity, run.label))
                if first != identity:
                    raise ConfigError(
                        f"{prefix} was {first} when {label} was trained, and {identity} for {run.label}: runs on other "
                        "data are not compared; train them on the same"
                    )
            found.setdefault(run.name, {})[run.seed] = record
    if not found:
        raise ConfigError(f"{study.path.parent / study.results} has no record of {study.path}; run the study first")
    return Findings(study, found)


def refuse_other_words(study: Study, run: StudyRun, record: Mapping[str, Any]) -> None:
    for name, words in study.evaluations().items():
        known = record["evaluations"].get(name, {}).get("arguments", words)
        if known != words:
            raise ConfigError(
                f"{study.result_path(run)}: {name} was measured by other words ({' '.join(known)}) than {study.path} "
                "declares; `card study run` measures it again"
            )


def compared_values(findings: Findings, run: str, metric: str) -> dict[int, float]:
    """By seed; of perplexities in nats."""
    values = findings.values(run, metric)
    return {seed: math.log(value) for seed, value in values.items()} if is_perplexity(metric) else values


def differences(findings: Findings, metric: str, baseline: str) -> dict[str, Interval]:
    """Of every run that can be compared with the baseline; of perplexities in nats."""
    values = {run: compared_values(findings, run, metric) for run in findings.study.runs}
    if findings.study.pooled:
        return pooled(values, baseline)
    found = {run: paired(part, values[baseline]) for run, part in values.items() if run != baseline}
    return {run: difference for run, difference in found.items() if difference is not None}


def strategies(findings: Findings, run: str) -> list[str]:
    """How it was decoded, in the order in which it was asked for; where this study asks at all, as others may have."""
    if all(words[0] != "generation" for words in findings.study.evaluations().values()):
        return []
    names = [name.partition(STRATEGY) for record in findings.records[run].values() for name in record["cells"]]
    return [*dict.fromkeys(strategy for _, mark, strategy in names if mark)]


def strategy_metrics(findings: Findings) -> list[str]:
    return [*dict.fromkeys(name.partition(STRATEGY)[0] for name in cell_names(findings) if STRATEGY in name)]


def strategy_difference(findings: Findings, run: str, metric: str, strategy: str) -> Interval | None:
    """From the run's first strategy, paired by seed; of a speed the ratio, less 1."""
    ours, first = (
        compared_values(findings, run, f"{metric}{STRATEGY}{one}") for one in (strategy, strategies(findings, run)[0])
    )
    if metric == SPEED:
        ratios = [ours[seed] / first[seed] - 1 for seed in ours if first.get(seed)]
        return interval(ratios) if ratios else None
    return paired(ours, first)


def cell_names(findings: Findings) -> list[str]:
    return [name for runs in findings.records.values() for record in runs.values() for name in record["cells"]]


def unknown_metrics(findings: Findings) -> dict[str, str]:
    """What the study shows and no record has: name -> what may be meant, or that runs are still to come."""
    study = findings.study
    cells = {name.partition(STRATEGY)[0] for name in cell_names(findings)} | {*cell_names(findings)}
    curves = {name for runs in findings.records.values() for record in runs.values() for name in record["curves"]}
    shown = [*((name, cells) for name in study.columns.values())]
    shown += [(name, cells) for metrics in study.points.values() for name in metrics]
    found = {name: suggestion(name, known) for name, known in shown if name not in known}
    for metrics in study.curves.values():
        if not curves & {*metrics}:
            found[" or ".join(metrics)] = suggestion(metrics[0], curves)
    if all(len(findings.records.get(run, {})) == len(study.seeds) for run in study.runs):
        return found
    return dict.fromkeys(found, "; runs that are not finished may bring it")


def curve_of(findings: Findings, run: str, seed: int, metrics: list[str]) -> dict[int, tuple[float, float]]:
    """Tokens -> (tokens or epochs, value) of the first metric that the record has, without what is no number."""
    for metric in metrics:
        found = findings.records[run][seed]["curves"].get(metric)
        if found:
            across = found["epochs" if findings.study.epochs else "tokens"]
            if across is None:
                raise ConfigError(
                    f"{run}-s{seed} has no epochs: it was recorded where its data was not. Run the study where it is"
                )
            points = zip(found["tokens"], across, found["values"], strict=True)
            return {tokens: (place, value) for tokens, place, value in points if value is not None}
    return {}


def mean_curve(
    findings: Findings, run: str, metrics: list[str], seeds: Iterable[int] | None = None
) -> list[tuple[float, float]]:
    """Over the seeds (all that the run has), at the places that all of them have."""
    chosen = findings.records[run] if seeds is None else seeds
    curves = [curve_of(findings, run, seed, metrics) for seed in chosen]
    shared = sorted(tokens for tokens in curves[0] if all(tokens in curve for curve in curves)) if curves else []
    return [(curves[0][tokens][0], sum(curve[tokens][1] for curve in curves) / len(curves)) for tokens in shared]


def drawn_metric(findings: Findings, run: str, metrics: list[str]) -> str:
    """The first of them that the run has."""
    known = next(iter(findings.records[run].values()))["curves"]
    return next((metric for metric in metrics if metric in known), "")


def curve_name(findings: Findings, run: str, metrics: list[str]) -> str:
    """With what tells it from the others: that it is a bound, or of fewer seeds."""
    seeds = {name: sorted(records) for name, records in findings.records.items()}
    few = "" if all(one == seeds[run] for one in seeds.values()) else f" (seed {', '.join(map(str, seeds[run]))})"
    return run + (" (bound)" if "bound" in drawn_metric(findings, run, metrics) else "") + few


def relation(findings: Findings, run: str, baseline: str, metric: str) -> str:
    """What bounds make of a difference from the baseline: at most this, at least this, or neither can be said."""
    if arrow(metric) != "↓":
        return ""
    ours, theirs = (bool(findings.bound(name, metric)) for name in (run, baseline))
    return {(True, False): "≤ ", (False, True): "≥ ", (True, True): "of bounds: "}.get((ours, theirs), "")


def crossing_points(findings: Findings, metrics: list[str], baseline: str) -> Iterator[tuple[str, float, float]]:
    """(run, epoch, value) where a run's mean curve falls below the baseline's, over the seeds that both have."""
    if not findings.study.epochs or baseline not in findings.records:
        return
    for run, records in findings.records.items():
        shared = [seed for seed in records if seed in findings.records[baseline]]
        if run != baseline and shared:
            ours, theirs = (mean_curve(findings, name, metrics, shared) for name in (run, baseline))
            for place in crossings(ours, theirs):
                yield run, place, between(ours, place)


def below_best(findings: Findings, run: str, metrics: list[str]) -> float | None:
    """Where a run's mean curve first falls below the best point of the baseline's."""
    baseline = findings.study.compared_with
    shared = [seed for seed in findings.records[run] if seed in findings.records.get(baseline, {})]
    if run == baseline or not shared:
        return None
    ours, theirs = (mean_curve(findings, name, metrics, shared) for name in (run, baseline))
    best = min((value for _, value in theirs), default=-math.inf)
    return next(iter(crossings(ours, [(place, best) for place, _ in ours])), None)


def between(curve: list[tuple[float, float]], place: float) -> float:
    for (left, before), (right, after) in pairwise(curve):
        if left <= place <= right:
            return before + (after - before) * (place - left) / (right - left)
    return curve[-1][1]
