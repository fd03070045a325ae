"""A whole run: check, build, resume, train, leave."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import socket
from pathlib import Path
from typing import IO, Any

import torch

from card_megatron.config.derived import parameter_count, total_steps
from card_megatron.config.errors import ConfigError, TemporaryRefusal
from card_megatron.config.load import dump_yaml
from card_megatron.config.schema import RunConfig
from card_megatron.launchers import job_facts, summarise
from card_megatron.platform import Ranks, capabilities
from card_megatron.platform.kernels import kernels_line, resolve_kernels
from card_megatron.training.preflight import Plan, preflight
from card_megatron.training.process import process_settings
from card_megatron.training.tasks import ScoreTasks
from card_megatron.training.watchdog import Watchdog


def train_run(
    config: RunConfig, ranks: Ranks, console: bool = True, score_tasks: ScoreTasks | None = None
) -> dict[str, Any]:
    """Train as one of `ranks`; returns the summary. The process group is left again, whatever happens.

    `score_tasks` evaluates eval.tasks (evaluation.during has one): training itself knows nothing of tasks.
    """
    if config.eval.tasks and score_tasks is None:
        raise ConfigError(f"eval.tasks={config.eval.tasks} needs score_tasks, as `card train` gives it; or drop them")
    plan = preflight(config, ranks)
    from megatron.core import parallel_state

    lock = hold(config.run_dir) if ranks.rank == 0 else None
    watchdog = Watchdog(config.run_dir, ranks.rank, ranks.world_size, config.guard.hang_minutes)
    try:
        return train_in_group(plan, watchdog, console, score_tasks)
    finally:
        watchdog.close()
        if lock is not None:
            lock.close()
        parallel_state.destroy_model_parallel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        del plan  # whose transformer configuration has functions of the state
        gc.collect()  # model, optimizer and groups refer to each other: now, not when another run has no room


def opening_line(plan: Plan) -> str:
    """What is about to run, and where."""
    config, ranks = plan.config, plan.ranks.world_size
    parameters, steps = parameter_count(config.model), total_steps(config)
    tokens = config.train.global_batch_size * config.data.sequence_length
    return (
        f"{config.run_dir}: {config.objective.name}, {parameters:,} parameters, {steps:,} steps of {tokens:,} tokens, "
        f"on {ranks} rank{'s' * (ranks > 1)} ({capabilities().device})"
    )


def hold(run_dir: str) -> IO[str]:
    """Keep the run directory for this run as long as the file stays open: two runs in one would mix.

    A launcher that was killed alone can leave its ranks behind, training and saving.
    """
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    file = (Path(run_dir) / "lock").open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise TemporaryRefusal(
            f"run_dir={run_dir} is in use by {holder}; end that run (its ranks may have outlived their launcher), "
            "or choose another run_dir"
        ) from None
    except OSError:
        return file  # a file system without locks
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def train_in_group(
    plan: Plan, watchdog: Watchdog, console: bool = True, score_tasks: ScoreTasks | None = None
) -> dict[str, Any]:
    """The same in a process group that is there already, or is made here, and stays."""
    with process_settings(plan.config):
        return build_and_train(plan, watchdog, console, score_tasks)


def build_and_train(plan: Plan, watchdog: Watchdog, console: bool, score_tasks: ScoreTasks | None) -> dict[str, Any]:
    """Everything that a step needs, then the loop."""
    from card_megatron.checkpoint.folder import checkpoints_of, remove_leftovers
    from card_megatron.training.events import Events
    from card_megatron.training.loop import STOPPED, Loop
    from card_megatron.training.records import Recorder
    from card_megatron.training.state import build_state, release

    state = build_state(plan)
    run_dir, first = Path(plan.config.run_dir), plan.ranks.rank == 0
    if first:
        (run_dir / STOPPED).unlink(missing_ok=True)
        remove_leftovers(checkpoints_of(run_dir))
    torch.distributed.barrier()

    def say(text: str) -> None:
        if first and console:
            recorder.say(text) if recorder is not None else print(text, flush=True)
        if first:
            summarise(text)  # in a job also to its summary

    recorder: Recorder | None = None
    events = Events(run_dir, first, say)
    loop = Loop(state, events, watchdog, score_tasks)
    say(opening_line(plan))
    kernels = resolve_kernels(plan.config, capabilities())
    say(kernels_line(kernels))
    for note in plan.notes:
        say(note)
    events("started", ranks=plan.ranks.world_size, **job_facts())
    resumed_at = loop.resume(say)
    if first:
        (run_dir / "config.yaml").write_text(dump_yaml(plan.config))
        (run_dir / "kernels.json").write_text(json.dumps(kernels, indent=1) + "\n")
    recorder = Recorder(plan.config, console=console, resumed_at=resumed_at)
    try:
        return loop.run(recorder, resumed=resumed_at is not None)
    finally:
        loop.instruments.close(state.step)
        recorder.close()
        state.data = []  # ends the data workers
        release(state)
        gc.unfreeze()  # what Saver froze for the time of the run
