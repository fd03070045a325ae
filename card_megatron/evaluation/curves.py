"""Pictures of runs: any metric against tokens, and against epochs with the best point of each run marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.evaluation.compare import better
from card_megatron.evaluation.report import picture, shown
from card_megatron.evaluation.runs import Run


def default_metrics(runs: Sequence[Run]) -> list[str]:
    """The training loss, and what was measured on data that is not trained on: exact or a bound where there is one."""
    names = list(dict.fromkeys(name for run in runs for name in run.series))
    held_out = [name for name in names if name.startswith(("tasks/", "perplexity/")) and better(name)]
    for name in names:
        kind, _, rest = name.partition("/")
        of, _, metric = rest.rpartition("/")
        better_known = any(f"validation/{of}/{how}perplexity" in names for how in ("clean_", "bound_"))
        wanted = ("clean_perplexity", "bound_perplexity") if better_known else ("perplexity",)
        if kind == "validation" and metric in wanted:
            held_out.append(name)
    return [*(["loss"] if "loss" in names else []), *held_out]


def refuse_unknown(runs: Sequence[Run], metrics: Sequence[str]) -> None:
    known = sorted({name for run in runs for name in run.series})
    for metric in metrics:
        if metric not in known:
            raise ConfigError(f"--metrics {metric} is in no metrics.jsonl; there are {', '.join(known)}")


def file_name(kind: str, metric: str) -> str:
    return f"{kind}_{''.join(letter if letter.isalnum() else '_' for letter in metric)}.png"


def scale(axes: Any, metric: str) -> None:
    """Perplexities fall by factors: on an even scale the first one would hide all differences."""
    if "perplexity" in metric:
        axes.set_yscale("log")


def draw_by_tokens(path: Path, runs: dict[str, Run], metric: str) -> None:
    with picture(path, metric, "tokens", metric) as axes:
        scale(axes, metric)
        for label, run in runs.items():
            if metric in run.series:
                steps = sorted(run.series[metric])
                axes.plot(run.tokens_at(steps), [run.series[metric][step] for step in steps], ".-", label=label)


def draw_by_epochs(path: Path, runs: dict[str, Run], metric: str) -> dict[str, tuple[float, float]]:
    """The epoch-scaling figure; returns each run's best (epoch, value): where its data is used up."""
    found: dict[str, tuple[float, float]] = {}
    direction = better(metric) or -1
    with picture(path, f"{metric} under repeated data", "epochs", metric) as axes:
        scale(axes, metric)
        for label, run in runs.items():
            if metric not in run.series:
                continue
            steps, size = sorted(run.series[metric]), run.epoch_tokens()
            epochs = [tokens / size for tokens in run.tokens_at(steps)]
            values = [run.series[metric][step] for step in steps]
            (line,) = axes.plot(epochs, values, ".-", label=label)
            place = max(range(len(values)), key=lambda index: direction * values[index])
            found[label] = (epochs[place], values[place])
            axes.plot(*found[label], "*", markersize=14, color=line.get_color())
            axes.annotate(
                f"{shown(values[place])} at {epochs[place]:.2f}",
                found[label],
                fontsize="x-small",
                xytext=(6, 6),
                textcoords="offset points",
            )
    return found
