"""The cells of a report as a file that programs can read: each with its seeds, configurations, tokens and interval."""

from __future__ import annotations

import math
from typing import Any

from card_megatron.study.definition import STRATEGY, is_perplexity, perplexity
from card_megatron.study.findings import (
    SPEED,
    Findings,
    below_best,
    compared_values,
    crossing_points,
    differences,
    relation,
    strategies,
    strategy_difference,
    strategy_metrics,
)
from card_megatron.study.intervals import Interval, interval

KIND = "study_report"


def summary(findings: Findings) -> dict[str, Any]:
    """Perplexities as in the page: means are geometric, differences in nats."""
    study = findings.study
    return {
        **{"kind": KIND, "study": study.name, "baselines": study.baselines, "pooled": study.pooled},
        "cells": [
            {
                **cell(findings, run, metric, heading),
                "differences": {
                    baseline: difference_of(metric, apart[run], relation(findings, run, baseline, metric))
                    for baseline in study.baselines
                    if run in (apart := differences(findings, metric, baseline))
                },
            }
            for heading, metric in findings.columns().items()
            for run in findings.records
            if findings.values(run, metric)
        ],
        "strategies": [
            {
                "strategy": strategy,
                **cell(findings, run, f"{metric}{STRATEGY}{strategy}", metric),
                "difference": difference_of(metric, strategy_difference(findings, run, metric, strategy)),
            }
            for run in findings.records
            for strategy in strategies(findings, run)
            for metric in strategy_metrics(findings)
            if findings.values(run, f"{metric}{STRATEGY}{strategy}")
        ],
        "crossings": [
            {
                **{"curve": name, "run": run, "below_best": below_best(findings, run, metrics)},
                "below": {
                    baseline: [place for one, place, _ in crossing_points(findings, metrics, baseline) if one == run]
                    for baseline in study.baselines
                    if baseline != run
                },
            }
            for name, metrics in (study.curves.items() if study.epochs else ())
            for run in findings.records
            if [run] != study.baselines
        ],
    }


def cell(findings: Findings, run: str, metric: str, heading: str) -> dict[str, Any]:
    values, records = compared_values(findings, run, metric), findings.records[run]
    known, back = interval([*values.values()]), perplexity if is_perplexity(metric) else float
    ends = (None, None) if known.half is None else (known.mean - known.half, known.mean + known.half)
    return {
        **{"run": run, "column": heading, "metric": metric, "likelihood": findings.bound(run, metric)},
        **{"mean": back(known.mean), "interval_95": [None if end is None else finite(back(end)) for end in ends]},
        "seeds": [*values],
        "config_hashes": [records[seed]["config_hash"] for seed in values],
        "tokens": [records[seed]["tokens"] for seed in values],
    }


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def difference_of(metric: str, known: Interval | None, relation: str = "") -> dict[str, Any] | None:
    """`seen` is null where one seed, or a bound, leaves it open."""
    if known is None:
        return None
    unit = "nats" if is_perplexity(metric) else "ratio - 1" if metric == SPEED else "of the metric"
    seen = None if relation else known.apart_from_zero
    return {
        **{"mean": known.mean, "half_width_95": known.half, "unit": unit, "seen": seen},
        **({"relation": relation.strip(" :")} if relation else {}),
    }
