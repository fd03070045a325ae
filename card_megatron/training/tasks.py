"""Tasks that a run evaluates on its own ranks: when, and of what. How is given from outside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from card_megatron.checkpoint import folder
from card_megatron.checkpoint.agree import on_first_rank, problems_on_all_ranks
from card_megatron.config.errors import CardError
from card_megatron.config.schema import RunConfig
from card_megatron.training.records import Recorder
from card_megatron.training.watchdog import Watchdog

ScoreTasks = Callable[[Path, Callable[[], None]], dict[str, Any] | None]
"""Given a checkpoint of this run and a sign of life to give, what is to be recorded, on rank 0: "tasks", which is
{task: {metric: {"value", "stderr"}}}, and, where these come from bounds, "task_bounds": their samples and error. All
ranks call it, inside the run's groups; it leaves random states and the model of the run as they were."""


class Tasks:
    """Evaluates eval.tasks of checkpoints that were just saved."""

    def __init__(self, config: RunConfig, score: ScoreTasks | None, watchdog: Watchdog):
        self.config, self.score, self.watchdog = config, score, watchdog
        self.run_dir = Path(config.run_dir)

    def due(self, step: int) -> bool:
        interval = self.config.eval.tasks_interval
        return self.score is not None and interval > 0 and step > 0 and step % interval == 0

    def catch_up(self, step: int, recorder: Recorder) -> None:
        """A run that ended between a save and its evaluation has it still before it."""
        if self.due(step):
            known, _ = on_first_rank(lambda: has_record(self.run_dir / "metrics.jsonl", step))
            if not known:
                self.evaluate_if_due(step, recorder)

    def evaluate_if_due(self, step: int, recorder: Recorder) -> None:
        """Score the checkpoint of this step, and record it; the save must be finished."""
        if self.score is None or not self.due(step):
            return
        checkpoint = folder.final_path(self.run_dir, step)
        there, _ = on_first_rank(checkpoint.exists)
        if not there:
            recorder.say(f"step {step} was not saved: its tasks are not evaluated")
            return
        recorder.activity("evaluating tasks")

        def beat() -> None:
            self.watchdog.beat(step, "evaluating tasks")

        results, problem = None, None
        beat()
        try:
            results = self.score(checkpoint, beat)
        except CardError as error:
            problem = str(error)
        problems = problems_on_all_ranks(problem)
        if problems:
            recorder.say(f"tasks could not be evaluated after step {step}: {problems[0]}; going on")
        elif results is not None:
            recorder.tasks({"step": step, **results})


def has_record(metrics: Path, step: int) -> bool:
    """True where the tasks of a step are in metrics.jsonl already."""
    if not metrics.is_file():
        return False
    for line in metrics.read_text("utf-8").split("\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["step"] == step and "tasks" in record:
            return True
    return False
