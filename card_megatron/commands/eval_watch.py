"""`card eval watch`: a job beside the one that trains, which evaluates its checkpoints as they appear."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from card_megatron.commands.eval_options import (
    add_model_options,
    add_nproc,
    at_least,
    become_ranks,
    model_options,
    named_paths,
)
from card_megatron.config.errors import ConfigError

DESCRIPTION = """Evaluate new checkpoints of a run as they appear, each once, on tasks or texts or both. Results are
RUN_DIR/evaluations/step_NNNNNN.json; `card eval compare RUN_DIR` shows them. A checkpoint that the run deletes
meanwhile is held until it has been read; one that is gone already is named. A killed watcher goes on where it was."""


def run(arguments: Sequence[str]) -> None:
    options = parser().parse_args(list(arguments))
    if not options.tasks and not options.perplexity:
        raise ConfigError("nothing to evaluate: give --tasks TASK,... or --perplexity NAME=PATH")
    if not options.run_dir.is_dir():
        raise ConfigError(f"{options.run_dir} is not there; give the run_dir of a run that has been started")
    become_ranks(options, "watch", arguments)
    from card_megatron.evaluation.watch import Watcher
    from card_megatron.platform import install, ranks_from_environment

    install()
    ranks = ranks_from_environment()
    evaluate = Evaluation(options)

    def say(text: str) -> None:
        if ranks.rank == 0:
            print(text, flush=True)

    with joined(), contextlib.closing(Watcher(options.run_dir, evaluate, say)) as watcher:
        count = watcher.watch(interval=options.interval, once=options.once, until_finished=options.until_finished)
    say(f"{count} checkpoint{'s' * (count != 1)} evaluated")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="card eval watch", description=DESCRIPTION)
    made.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="of a run in progress, or one that has ended")
    made.add_argument("--interval", type=seconds, default=60.0, help="seconds between looks (default: 60)")
    made.add_argument("--once", action="store_true", help="evaluate what is there, then end")
    made.add_argument("--until-finished", action="store_true", help="end when the run has, and all is evaluated")
    made.add_argument("--tasks", metavar="TASK,...", help="as `card eval --tasks`")
    made.add_argument("--data", type=Path, metavar="DIR", help="local files of the tasks, as `card eval --data`")
    made.add_argument("--num-fewshot", type=at_least(0), help="examples of every task (default: each task's own)")
    made.add_argument("--limit", type=at_least(1), help="documents of each task and set (default: all)")
    made.add_argument(
        "--perplexity",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=PATH",
        help="as `card eval perplexity --data`",
    )
    made.add_argument("--window", type=at_least(1), help="as `card eval perplexity --window`")
    made.add_argument("--stride", type=at_least(1), help="as `card eval perplexity --stride`")
    add_nproc(made)
    add_model_options(made)
    return made


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


class Evaluation:
    """What is asked of every checkpoint; unknown tasks and unreadable texts are refused before the first."""

    def __init__(self, options: argparse.Namespace):
        from card_megatron.evaluation.texts import read_set

        self.options = options
        paths = named_paths(options.perplexity, "--perplexity")
        self.sets = [read_set(name, path, options.limit) for name, path in paths.items()]
        self.tasks = [name for name in (options.tasks or "").split(",") if name]
        if self.tasks:
            from card_megatron.evaluation.lm_eval_main import import_harness

            import_harness()
            from card_megatron.evaluation.tasks import load_tasks

            load_tasks(self.tasks, options.data)

    def __call__(self, held: Path, name: Path, unfinished: Path) -> dict[str, Any] | None:
        """Results that name the checkpoint as the run does; on the rank that speaks."""
        from card_megatron.decoding.model import open_model

        with open_model(held, **model_options(self.options)) as model:
            tasks = self.on_tasks(model, unfinished) if self.tasks else None
            perplexities = [self.on_texts(model, texts) for texts in self.sets]
            if not model.speaks:
                return None
        for result in [*perplexities, *([tasks] if tasks else [])]:
            result["checkpoint" if result is tasks else "model_path"] = str(name)
        return {
            "tasks": tasks,
            "perplexity": {"kind": "perplexity", "results": perplexities} if perplexities else None,
        }

    def on_tasks(self, model: Any, unfinished: Path) -> dict[str, Any] | None:
        from card_megatron.evaluation.runner import evaluate_tasks

        return evaluate_tasks(
            model,
            self.tasks,
            data=self.options.data,
            num_fewshot=self.options.num_fewshot,
            limit=self.options.limit,
            output=unfinished / "tasks.json",
            opened={name: value for name, value in model_options(self.options).items() if name in ("ema", "dtype")},
        )

    def on_texts(self, model: Any, texts: Any) -> dict[str, Any]:
        from card_megatron.evaluation.perplexity import measure

        measured = measure(model, texts, window=self.options.window, stride=self.options.stride)
        return {"model": str(self.options.run_dir), "objective": model.objective, **measured.record()}


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """The ranks stay together between checkpoints: they must agree on the next one."""
    import torch.distributed as dist

    from card_megatron.platform import init_process_group, ranks_from_environment

    there_before = dist.is_initialized()
    init_process_group(ranks_from_environment())
    try:
        yield
    finally:
        if not there_before:
            dist.destroy_process_group()
