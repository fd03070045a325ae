"""The cells of a report as a file that programs can read: each with its seeds, configurations, tokens and interval."""

from __future__ import annotations

import math
from typing import Any

from card_megatron.study.findings import Findings, differences, is_perplexity
from card_megatron.study.intervals import Interval, interval

KIND = "study_report"


def summary(findings: Findings) -> dict[str, Any]:
    """Perplexities as in the page: means are geometric, differences in nats."""
    study, cells = findings.study, []
    for heading, metric in findings.columns().items():
        apart = differences(findings, metric)
        for run, records in findings.records.items():
            values = findings.values(run, metric)
            if values:
                cells.append(
                    {
                        **{"run": run, "column": heading, "metric": metric, "likelihood": findings.bound(run, metric)},
                        **mean_of(metric, [*values.values()]),
                        "seeds": [*values],
                        "config_hashes": [records[seed]["config_hash"] for seed in values],
                        "tokens": [records[seed]["tokens"] for seed in values],
                        "difference": difference_of(metric, apart.get(run)),
                    }
                )
    return {"kind": KIND, "study": study.name, "baseline": study.compared_with, "pooled": study.pooled, "cells": cells}


def mean_of(metric: str, values: list[float]) -> dict[str, Any]:
    logs = is_perplexity(metric)
    known = interval([math.log(value) for value in values] if logs else values)
    ends = (None, None) if known.half is None else (known.mean - known.half, known.mean + known.half)
    back = math.exp if logs else float
    return {"mean": back(known.mean), "interval_95": [None if end is None else back(end) for end in ends]}


def difference_of(metric: str, known: Interval | None) -> dict[str, Any] | None:
    if known is None:
        return None
    return {
        "mean": known.mean,
        "half_width_95": known.half,
        "unit": "nats" if is_perplexity(metric) else "of the metric",
        "seen": known.apart_from_zero,
    }
