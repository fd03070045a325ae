"""The pictures of a study: curves of its runs, and its runs as points between two metrics."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

from card_megatron.evaluation.compare import arrow
from card_megatron.evaluation.curves import scale
from card_megatron.evaluation.report import picture
from card_megatron.study.definition import STRATEGY
from card_megatron.study.findings import Findings, crossing_points, curve_name, curve_of, mean_curve

LINES, MARKS, COLOURS = (".-", "+--", "x:"), "os^", 10
"""Matplotlib's colours begin again after ten curves."""


def draw(findings: Findings, folder: Path) -> dict[str, str]:
    """Every picture that the study declares and that something is known for: its name -> its file in the folder."""
    study = findings.study
    drawn = {}
    for declared, drawer in ((study.curves, draw_curves), (study.points, draw_points)):
        for name, metrics in declared.items():
            path = folder / study.picture_file(name)
            if drawer(findings, name, metrics, path):
                drawn[name] = path.name
    return drawn


def draw_curves(findings: Findings, name: str, metrics: list[str], path: Path) -> bool:
    """The mean over seeds, and each seed thin behind it; by epochs the best point, and where curves cross.

    Without the untrained model, which lies so far above that the curves would look like one.
    """
    known = {run: trained for run in findings.records if (trained := learned(mean_curve(findings, run, metrics)))}
    if not known:
        return False
    epochs = findings.study.epochs
    with picture(path, f"{findings.study.title}: {name}", "epochs" if epochs else "tokens", name) as axes:
        scale(axes, metrics[0])
        for number, (run, curve) in enumerate(known.items()):
            style = LINES[number // COLOURS % len(LINES)]
            (line,) = axes.plot(*zip(*curve, strict=True), style, label=curve_name(findings, run, metrics))
            if len(findings.records[run]) > 1:
                for seed in findings.records[run]:
                    points = learned(curve_of(findings, run, seed, metrics).values())
                    axes.plot(*zip(*points, strict=True), "-", alpha=0.3, linewidth=0.8, color=line.get_color())
            if epochs:
                best = min(curve, key=lambda point: point[1])
                axes.plot(*best, "*", markersize=12, color=line.get_color())
        for baseline in findings.study.baselines:
            for _, place, value in crossing_points(findings, metrics, baseline):
                axes.plot(place, value, "x", markersize=10, color="black")
    return True


def learned(curve: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [point for point in curve if point[0] > 0]


def draw_points(findings: Findings, name: str, metrics: list[str], path: Path) -> bool:
    """A point a run, or a strategy of its generated text, with its seeds small around it."""
    across, up = metrics
    known = points(findings, across, up)
    if not known:
        return False
    with picture(path, f"{findings.study.title}: {name}", *(f"{one} {arrow(one)}".strip() for one in metrics)) as axes:
        for number, (label, seeds) in enumerate(known.items()):
            xs, ys = zip(*seeds, strict=True)
            shape = MARKS[number // COLOURS % len(MARKS)]
            (mark,) = axes.plot(statistics.fmean(xs), statistics.fmean(ys), shape, markersize=8, alpha=0.8, label=label)
            if len(seeds) > 1:
                axes.plot(xs, ys, shape, markersize=3, alpha=0.5, color=mark.get_color())
        axes.margins(0.15)
    return True


def points(findings: Findings, across: str, up: str) -> dict[str, list[tuple[float, float]]]:
    """Label -> (x, y) of every seed that has both; without the run's name where there is one run."""
    found: dict[str, list[tuple[float, float]]] = {}
    for run, records in findings.records.items():
        strategies = {
            name.removeprefix(across)
            for record in records.values()
            for name in record["cells"]
            if name == across or name.startswith(across + STRATEGY)
        }
        for strategy in sorted(strategies):
            xs, ys = findings.values(run, across + strategy), findings.values(run, up + strategy)
            alone = strategy.removeprefix(STRATEGY)
            label = alone if alone and len(findings.records) == 1 else f"{run} {alone}".strip()
            seeds = [(xs[seed], ys[seed]) for seed in xs if seed in ys]
            if seeds:
                found[label] = seeds
    return found
