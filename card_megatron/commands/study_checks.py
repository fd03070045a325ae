"""What `card study run` refuses before the first run takes an hour: what could not be trained, or not evaluated."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from card_megatron.commands import eval_denoising, eval_generation, eval_perplexity, eval_tasks
from card_megatron.commands.eval_options import named_paths
from card_megatron.config.errors import ConfigError
from card_megatron.objectives import OBJECTIVES
from card_megatron.study.definition import Study, StudyRun

PARSERS = {
    "perplexity": eval_perplexity.parser,
    "denoising": eval_denoising.parser,
    "generation": eval_generation.parser,
}
MODEL = "the run"
"""Stands for the model, which a study names itself, where words are only parsed."""


def check_runs(runs: Sequence[StudyRun]) -> None:
    """As `card train` would check them."""
    from card_megatron.platform import Ranks, install
    from card_megatron.training.preflight import preflight

    install()
    for run in runs:
        config = run.load()
        try:
            preflight(config, Ranks())
        except ConfigError as error:
            raise ConfigError(f"run {run.name}: {error}") from error


def check_evaluations(study: Study, runs: Sequence[StudyRun]) -> None:
    """As `card eval` would: unknown options, files that are not there, and what an objective cannot be asked."""
    objectives = {run.load().objective.name: run.name for run in runs}
    for name, words in study.evaluations().items():
        try:
            options = parsed(words)
            for path in needed_files(words[0], options):
                if not path.exists():
                    raise ConfigError(f"{path} is not there")
            for objective, run in objectives.items():
                refuse_unfit(words[0], options, objective, run)
        except ConfigError as error:
            raise ConfigError(f"evaluate: {name}: {error}") from error


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The words of an evaluation as its command reads them."""
    kind, rest = (words[0], words[1:]) if words[0] in PARSERS else ("", words)
    parser = PARSERS.get(kind, eval_tasks.parser)()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `card eval {kind}{' ' if kind else ''}--help`")

    parser.error = refuse  # type: ignore[method-assign]
    options = parser.parse_args([MODEL, *rest])
    models = [str(model) for model in getattr(options, "models", [getattr(options, "model", MODEL)])]
    if models != [MODEL] or options.output is not None:
        raise ConfigError("a study gives the model and --output; leave them out")
    return options


def needed_files(kind: str, options: argparse.Namespace) -> Iterator[Path]:
    if kind == "generation":
        yield options.prompts
        yield from (folder / "config.json" for folder in options.scorer)
    elif kind == "perplexity":
        yield from eval_perplexity.set_paths(options)[0].values()
    elif kind == "denoising":
        yield from named_paths(options.data).values()
    elif options.data is not None:
        yield options.data


def refuse_unfit(kind: str, options: argparse.Namespace, objective: str, run: str) -> None:
    if kind == "denoising" and OBJECTIVES[objective].attention != "causal":
        raise ConfigError(
            f"run {run} is of {objective}, and what stands behind masks is asked of causal models alone (card, arm); "
            "give the others a study of their own"
        )
    if kind == "generation" and options.strategies:
        for name, strategy in eval_generation.strategies_of(options, options.strategies).items():
            try:
                strategy.fitting(objective)
            except ConfigError as error:
                raise ConfigError(f"{name}, run {run}: {error}") from error
