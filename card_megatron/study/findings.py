"""What is known of a study, from the records of its runs alone: values, differences, curves and where they cross."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.study.definition import Study
from card_megatron.study.intervals import Interval, crossings, paired, pooled
from card_megatron.study.record import record_of

STRATEGY = " · "
"""Between a metric of generated text and the strategy that wrote it."""


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
        return {name: name for name in dict.fromkeys(cell_names(self)) if STRATEGY not in name}


def read_findings(study: Study) -> Findings:
    """Whatever is finished of a study."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for run in study.grid():
        if study.result_path(run).is_file():
            found.setdefault(run.name, {})[run.seed] = record_of(study, run, run.load())
    if not found:
        raise ConfigError(f"{study.path.parent / study.results} has no record of {study.path}; run the study first")
    return Findings(study, found)


def is_perplexity(metric: str) -> bool:
    return metric.endswith((" ppl", " perplexity"))


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


def cell_names(findings: Findings) -> list[str]:
    return [name for runs in findings.records.values() for record in runs.values() for name in record["cells"]]


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
