"""The loop: steps, records, validations, saves, and the ways in which a run ends."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from card_megatron.checkpoint import contents as checkpoint_contents
from card_megatron.checkpoint import folder
from card_megatron.checkpoint.agree import on_first_rank
from card_megatron.checkpoint.contents import Contents
from card_megatron.checkpoint.resume import (
    changes,
    newest_whole,
    refuse_damaged,
    refuse_misfit,
    refuse_other_model,
    same_layout,
)
from card_megatron.checkpoint.saver import Saver, describe_run
from card_megatron.checkpoint.source import open_source
from card_megatron.config.derived import parameter_count, total_steps
from card_megatron.config.errors import CheckpointError, RunStopped
from card_megatron.data.tokenizers import refuse_other_ids
from card_megatron.training.control import Control, Verdict
from card_megatron.training.evaluate import evaluate
from card_megatron.training.guard import Guard
from card_megatron.training.instruments import Instruments
from card_megatron.training.records import Recorder
from card_megatron.training.state import TrainState
from card_megatron.training.step import StepResult, train_step
from card_megatron.training.tasks import ScoreTasks, Tasks
from card_megatron.training.watchdog import Watchdog
from card_megatron.training.window import Window, make_record

STOPPED = "stopped.json"
"""In the run directory: why and where a run was asked to end. A resumed run removes it."""


class Loop:
    """A run in progress: everything beside the state that a step works on."""

    def __init__(
        self, state: TrainState, events: Callable[..., None], watchdog: Watchdog, score: ScoreTasks | None = None
    ):
        self.state, self.config, self.events, self.watchdog = state, state.config, events, watchdog
        self.tasks = Tasks(self.config, score, watchdog)
        self.run_dir = Path(self.config.run_dir)
        self.steps = total_steps(self.config)
        self.saver = Saver(self.run_dir, self.config.checkpoint, state.optimizer, events)
        self.control = Control(self.run_dir, self.config.checkpoint)
        self.guard = Guard(self.config.guard)
        self.instruments = Instruments(self.config, state.sections, events)
        self.window = Window(state.consumed_samples)
        self.validations: dict[str, Any] = {"before": None, "after": None}
        self.record: dict[str, Any] = {}
        self.seconds_before = 0.0
        self.started = time.perf_counter()

    # ------------------------------------------------------------ where it starts

    def resume(self, say: Callable[[str], None]) -> int | None:
        """Go on from the newest whole checkpoint; returns its step, or None for a new run."""
        found = newest_whole(self.run_dir, checksums=self.config.checkpoint.verify, say=say)
        if found is None:
            if self.config.checkpoint.init_from is not None:
                self.start_from(self.config.checkpoint.init_from, say)
            return None
        checkpoint, manifest = found
        config = dataclasses.asdict(self.config)
        refuse_misfit(config, manifest, checkpoint)
        alike = same_layout(manifest, self.manifest())
        progress = checkpoint_contents.load(
            self.contents(), checkpoint, same_layout=alike, has_ema=manifest.ema and self.state.ema is not None
        )
        self.take(progress)
        self.saver.last_saved = self.state.step
        changed = changes(config, manifest)
        self.events("resumed", step=self.state.step, checkpoint=str(checkpoint), same_layout=alike, changed=changed)
        for change in changed:
            say(f"changed since the checkpoint: {change}")
        if not alike and (self.config.model.hidden_dropout or self.config.model.attention_dropout):
            say("another layout than the checkpoint's: dropout is drawn anew from the seed")
        if self.state.ema is not None and not manifest.ema:
            say("the checkpoint has no averaged weights: the average starts from its weights")
            self.state.ema.restart()
        return self.state.step

    def start_from(self, path: str, say: Callable[[str], None]) -> None:
        """Take another checkpoint's weights, and nothing else of it: this is a new run."""
        source = open_source(path, self.config.model.vocab_size)
        refuse_other_model(dataclasses.asdict(self.config), dataclasses.asdict(source.config), source.path)
        if source.tokenizer is not None and self.state.tokenizer is not None:
            refuse_other_ids(self.state.tokenizer, source.tokenizer, f"data.tokenizer={self.config.data.tokenizer}")
        refuse_damaged(source, checksums=self.config.checkpoint.verify)
        checkpoint_contents.load_weights(self.state.model, source.path)
        self.state.optimizer.reload_model_params()
        if self.state.ema is not None:
            self.state.ema.restart()
        self.events("initialised", checkpoint=str(source.path))
        say(f"weights of {source.path}")

    def take(self, progress: dict[str, Any]) -> None:
        """Go back to where a checkpoint was saved."""
        state = self.state
        state.step, state.consumed_samples = progress["step"], progress["consumed_samples"]
        state.skipped_steps = progress["skipped_steps"]
        state.data = []  # made again from the first sample that is not consumed
        self.guard.load(progress["guard"])
        self.window = Window(**progress["window"])
        self.validations, self.record = progress["validations"], progress["record"]
        self.seconds_before = progress["seconds"]

    # ------------------------------------------------------------ steps

    def run(self, recorder: Recorder, *, resumed: bool) -> dict[str, Any]:
        """Run to the end, or until a signal; returns the summary."""
        state = self.state
        if not resumed and self.config.eval.at_start:
            self.validations["before"] = self.validate(recorder)
        if resumed:
            self.tasks.catch_up(state.step, recorder)
        while state.consumed_samples < state.total_samples:
            self.watchdog.beat(state.step, "training")
            self.instruments.before_step(state.step + 1)
            started, first_sample = time.perf_counter(), state.consumed_samples
            result = train_step(state)
            self.watchdog.beat(state.step, "asking all ranks")
            with state.sections("agree"):
                verdict = self.control.ask(result.report, self.config.objective.normalize)
            self.instruments.after_step(state.step)
            self.judge(result, verdict, first_sample)
            self.window.add(verdict.report, result, time.perf_counter() - started)
            last = state.consumed_samples >= state.total_samples
            self.write_record(recorder, result, last)
            interval = self.config.eval.interval
            if last or (interval and state.step % interval == 0):
                self.validations["after"] = self.validate(recorder)
            self.save_if_due(recorder, verdict, last)
            if verdict.signal is None:  # a run that is asked to end has no time
                self.tasks.evaluate_if_due(state.step, recorder)
            self.saver.poll()
            if verdict.signal is not None and not last:
                return self.stop(recorder, signal.Signals(verdict.signal).name)
        return self.finish(recorder)

    def judge(self, result: StepResult, verdict: Verdict, first_sample: int) -> None:
        """Log a skipped step or a spike with its samples; raise where the run must end."""
        step, last_sample = self.state.step, self.state.consumed_samples - 1
        if result.skipped:
            facts = dict(loss=str(verdict.loss), grad_norm=str(result.grad_norm))
            worst = result.samples.worst()
            self.events("bad_step", step=step, first=first_sample, last=last_sample, worst=worst, **facts)
        if self.guard.too_many_bad(result.skipped):
            raise RunStopped(
                f"{self.guard.bad_in_a_row} steps in a row had a non-finite loss or gradient, the last of them step "
                f"{step} with samples {first_sample}..{last_sample} (worst: {worst}); {self.newest()}. "
                "guard.max_bad_steps sets how many are too many"
            )
        mean = self.guard.mean
        if not result.skipped and self.guard.is_spike(verdict.loss):
            worst = result.samples.worst()
            self.events(
                "spike", step=step, loss=verdict.loss, mean=mean, first=first_sample, last=last_sample, worst=worst
            )
            if self.config.guard.on_spike == "stop":
                raise RunStopped(
                    f"the loss jumped to {verdict.loss:.4f} at step {step} from a mean of {mean:.4f}, with samples "
                    f"{first_sample}..{last_sample} (worst: {worst}); {self.newest()}. "
                    "guard.on_spike=log would go on"
                )

    def newest(self) -> str:
        """The last good checkpoint, in words; saves that have begun are finished first."""
        self.saver.finish_all()
        found = folder.visible(self.run_dir)
        return f"the last good checkpoint is {found[0]}" if found else "there is no checkpoint"

    def write_record(self, recorder: Recorder, result: StepResult, last: bool) -> None:
        state = self.state
        if state.step % self.config.logging.interval == 0 or last:
            self.record = make_record(state, self.window, result.learning_rate, self.steps)
            self.record |= self.instruments.of_window(state.step)
            recorder.training(self.record)
            self.window = Window(state.consumed_samples)
        else:
            recorder.tick(state.step, self.steps)

    def validate(self, recorder: Recorder) -> dict[str, Any] | None:
        """Metrics of every validation set, recorded; None where there is no set."""
        datasets = self.state.datasets.validation
        if not datasets:
            return None
        recorder.activity("validating")
        with self.instruments.outside("validate"):
            results = self.evaluate(datasets, "validation")
        recorder.validation({"step": self.state.step, "validation": results})
        return results

    def evaluate(self, datasets: dict[str, Any], split: str) -> dict[str, Any]:
        """With the averaged weights where the configuration asks for them."""

        def beat() -> None:
            self.watchdog.beat(self.state.step, "validating")

        if self.state.ema is not None and self.config.ema.validate:
            with self.state.ema.in_model():
                return evaluate(self.state, datasets, split, beat)
        return evaluate(self.state, datasets, split, beat)

    # ------------------------------------------------------------ saves

    def save_if_due(self, recorder: Recorder, verdict: Verdict, last: bool) -> None:
        interval = self.config.checkpoint.interval
        due = interval is not None and self.state.step % interval == 0
        wait = last or verdict.signal is not None or self.tasks.due(self.state.step)
        if due or wait or verdict.save:
            self.save(recorder, wait=wait)

    def save(self, recorder: Recorder, *, wait: bool) -> None:
        """Save this step, once; with `wait` the disk has it, and all earlier saves, before this returns."""
        self.watchdog.beat(self.state.step, "saving")
        if self.saver.last_saved != self.state.step:
            recorder.sync()  # the records up to here outlive a crash of the machine, as the checkpoint does
            with self.instruments.outside("save"):
                self.saver.save(self.contents(), self.manifest(), wait=wait)
        elif wait:
            self.saver.finish_all()
        self.control.saved()

    def contents(self) -> Contents:
        state = self.state
        progress = {
            "step": state.step,
            "consumed_samples": state.consumed_samples,
            "skipped_steps": state.skipped_steps,
            "guard": self.guard.state(),
            "window": dataclasses.asdict(self.window),
            "validations": dict(self.validations),
            "record": self.record,
            "seconds": self.seconds(),
        }
        agreed, _ = on_first_rank(lambda: progress)  # all ranks' clocks differ; rank 0's count
        return Contents(state.model, state.optimizer, state.scheduler, state.ema, agreed)

    def manifest(self):
        return describe_run(
            self.config,
            step=self.state.step,
            consumed_samples=self.state.consumed_samples,
            parameters=parameter_count(self.config.model),
            ema=self.state.ema is not None,
            tokenizer=self.state.tokenizer,
        )

    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.started

    # ------------------------------------------------------------ ways to end

    def stop(self, recorder: Recorder, reason: str) -> dict[str, Any]:
        """Asked to end: the save is done; leave a marker that says why."""
        marker = {
            "reason": reason,
            "step": self.state.step,
            "checkpoint": self.newest_path(),
            "time": time.time(),
        }
        self.events("stopped", **marker)
        recorder.write_file(STOPPED, marker)
        self.refuse_unsaved()
        return {"stopped": reason, "steps": self.state.step, "checkpoint": marker["checkpoint"]}

    def finish(self, recorder: Recorder) -> dict[str, Any]:
        """The end of the run: test sets, summary."""
        state, config = self.state, self.config
        known = self.run_dir / "summary.json"
        if known.is_file() and json.loads(known.read_text())["steps"] == state.step:
            self.events("finished", step=state.step)  # this start ends, too: its last word must not be that it began
            recorder.say(f"{self.run_dir} is complete at step {state.step}; raise train.train_iters to go on")
            return json.loads(known.read_text())
        summary = {
            "steps": state.step,
            "consumed_samples": state.consumed_samples,
            "consumed_tokens": state.consumed_samples * config.data.sequence_length,
            "skipped_steps": state.skipped_steps,
            "seconds": self.seconds(),
            "last_record": self.record,
            "validation_before": self.validations["before"],
            "validation_after": self.validations["after"],
            "test": self.evaluate(state.datasets.test, "test") if state.datasets.test else None,
            "checkpoint": self.newest_path(),
        }
        self.events("finished", step=state.step)
        recorder.say(f"finished at step {state.step:,}: {summary['checkpoint']}")
        recorder.finish(summary)
        self.refuse_unsaved()
        return summary

    def newest_path(self) -> str | None:
        found = folder.visible(self.run_dir)
        return str(found[0]) if found else None

    def refuse_unsaved(self) -> None:
        """A run that ends without its last step on disk did not end well, whatever the reason."""
        if not folder.final_path(self.run_dir, self.state.step).exists():
            raise CheckpointError(
                f"step {self.state.step}, the last one, could not be saved (RUN_DIR/events.jsonl says why); the newest "
                f"checkpoint is {self.newest_path()}. Make room, then start the same command again"
            )
