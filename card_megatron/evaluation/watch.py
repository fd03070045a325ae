"""Evaluates a run's checkpoints as they appear, each once; a job of its own, beside the one that trains.

A checkpoint is held by hard links while it is read: retention may delete it at any moment, on no rank's account.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from card_megatron.checkpoint import folder
from card_megatron.checkpoint.agree import on_first_rank
from card_megatron.checkpoint.manifest import MANIFEST
from card_megatron.config.errors import CheckpointError, ConfigError
from card_megatron.evaluation.report import write_json
from card_megatron.evaluation.runs import EVALUATIONS

HELD, UNFINISHED, LOCK = "held", "unfinished", "lock"
"""Below RUN_DIR/evaluations: the checkpoint that is being read, what is known of it so far, who watches."""

Evaluate = Callable[[Path, Path, Path], dict[str, Any] | None]
"""Given (the checkpoint, its name in the run, a folder for what a killed evaluation leaves): its results on the rank
that speaks, None on the others. Every rank calls it."""


class Watcher:
    """Every rank has one and calls the same; rank 0 looks at the run and tells the others."""

    def __init__(self, run_dir: Path, evaluate: Evaluate, say: Callable[[str], None] = print):
        self.run_dir, self.evaluate, self.say = run_dir, evaluate, say
        self.place = run_dir / EVALUATIONS
        self.given_up: set[int] = set()
        """Steps that were gone, or damaged, when it was their turn."""
        self.lock: IO[str] | None = None

    def watch(
        self,
        *,
        interval: float = 60.0,
        once: bool = False,
        until_finished: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> int:
        """Evaluate all that is there and, unless `once`, what comes; returns how many were evaluated."""
        if agreed(self.take_lock) is False:
            raise ConfigError(
                f"{self.run_dir} is watched already ({self.place / LOCK} is held); end that watcher first"
            )
        done = 0
        while True:
            step, finished = agreed(lambda: (self.next_step(), self.finished()))
            if step is not None:
                done += self.evaluate_step(step)
            elif once or (until_finished and finished):
                return done
            else:
                sleep(interval)

    def close(self) -> None:
        """Let another watcher in."""
        if self.lock is not None:
            self.lock.close()

    def take_lock(self) -> bool:
        """One watcher a run, as long as this process lives: two would take each other's checkpoints away."""
        self.place.mkdir(exist_ok=True)
        self.lock = (self.place / LOCK).open("a")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a file system without locks
        return True

    def next_step(self) -> int | None:
        """The oldest checkpoint that has no results: retention takes it first."""
        steps = [folder.step_of(path) for path in folder.visible(self.run_dir)]
        waiting = [step for step in steps if step is not None and not self.result(step).exists()]
        return min((step for step in waiting if step not in self.given_up), default=None)

    def finished(self) -> bool:
        """The run has ended: its summary is there, and is not that of a shorter run which this one extends."""
        try:
            steps = json.loads((self.run_dir / "summary.json").read_text())["steps"]
        except (OSError, ValueError, KeyError):
            return False
        return all((folder.step_of(path) or 0) <= steps for path in folder.visible(self.run_dir))

    def result(self, step: int) -> Path:
        return self.place / f"step_{step:06d}.json"

    def evaluate_step(self, step: int) -> bool:
        """Evaluate one checkpoint and write its results; False where that was not to be."""
        name = folder.final_path(self.run_dir, step)
        held = agreed(lambda: self.hold(name))
        if held is None:
            return self.give_up(step, "was deleted before it could be read")
        began = time.perf_counter()
        try:
            results = self.evaluate(held, name, self.place / UNFINISHED / name.name)
        except (CheckpointError, FileNotFoundError) as error:
            if held != name:  # then all ranks saw the same files, and the same fault
                return self.give_up(step, f"cannot be evaluated: {error}")
            if name.exists():
                raise
            return self.give_up(step, "was deleted while it was read")
        finally:
            agreed(self.release)
        if results is not None:
            facts = {
                "kind": "checkpoint",
                "step": step,
                "checkpoint": str(name),
                "seconds": time.perf_counter() - began,
            }
            write_json(self.result(step), facts | results)
            shutil.rmtree(self.place / UNFINISHED, ignore_errors=True)
            self.say(f"step {step} evaluated in {facts['seconds']:.1f} s: {self.result(step)}")
        agreed(lambda: None)  # the file is there before any rank looks again
        return True

    def give_up(self, step: int, why: str) -> bool:
        self.given_up.add(step)
        self.say(f"step {step} {why}; going on")
        return False

    def hold(self, checkpoint: Path) -> Path | None:
        """The checkpoint under a name of our own; itself where the file system has no links; None where it is gone."""
        held = self.place / HELD / checkpoint.name
        shutil.rmtree(held.parent, ignore_errors=True)
        held.mkdir(parents=True)
        try:
            files = [path for path in checkpoint.rglob("*") if path.is_file()]
            for path in files:
                target = held / path.relative_to(checkpoint)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, target)
        except FileNotFoundError:
            return None
        except OSError:
            return checkpoint if checkpoint.exists() else None
        return held if (held / MANIFEST).is_file() else None

    def release(self) -> None:
        shutil.rmtree(self.place / HELD, ignore_errors=True)


def agreed(work: Callable[[], Any]) -> Any:
    """What rank 0 finds, on every rank."""
    if not dist.is_initialized():
        return work()
    result, problems = on_first_rank(work)
    if problems:
        raise ConfigError(f"the run directory cannot be used: {problems[0]}")
    return result
