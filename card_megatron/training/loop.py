"""The loop: steps, records, validations, and the weights at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from card_megatron.checkpoint.weights import save_weights
from card_megatron.config.derived import flops_per_token, total_steps
from card_megatron.config.load import dump_yaml
from card_megatron.platform import capabilities
from card_megatron.training.evaluate import evaluate
from card_megatron.training.metrics import read_report, reduce_report, sum_reports
from card_megatron.training.records import Recorder
from card_megatron.training.state import TrainState
from card_megatron.training.step import StepResult, train_step


@dataclass
class Window:
    """The steps since the last record."""

    first_sample: int
    reports: list[torch.Tensor] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0
    started: float = field(default_factory=time.perf_counter)

    def add(self, result: StepResult) -> None:
        self.reports.append(sum_reports(result.reports))
        self.skipped += result.skipped
        if not result.skipped:
            self.grad_norms.append(result.grad_norm)


def train(state: TrainState, recorder: Recorder) -> dict[str, Any]:
    """Run to the end; returns the summary that is also written to RUN_DIR/summary.json."""
    config = state.config
    run_dir = Path(config.run_dir)
    if torch.distributed.get_rank() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(dump_yaml(config))
    steps = total_steps(config)
    validations: list[dict[str, Any]] = []

    def validate() -> None:
        if state.datasets.validation:
            recorder.activity("validating")
            record = {"step": state.step, "validation": evaluate(state, state.datasets.validation, "validation")}
            validations.append(record)
            recorder.validation(record)

    started = time.perf_counter()
    if config.eval.at_start:
        validate()
    window = Window(state.consumed_samples)
    record: dict[str, Any] = {}
    while state.consumed_samples < state.total_samples:
        result = train_step(state)
        window.add(result)
        last = state.consumed_samples >= state.total_samples
        if state.step % config.logging.interval == 0 or last:
            record = make_record(state, window, result.learning_rate, steps)
            recorder.training(record)
            window = Window(state.consumed_samples)
        else:
            recorder.tick(state.step, steps)
        if last or (config.eval.interval and state.step % config.eval.interval == 0):
            validate()
            window.started = time.perf_counter()  # validation is not training time
    summary = {
        "steps": state.step,
        "consumed_samples": state.consumed_samples,
        "consumed_tokens": state.consumed_samples * config.data.sequence_length,
        "skipped_steps": state.skipped_steps,
        "seconds": time.perf_counter() - started,
        "last_record": record,
        "validation_before": validations[0]["validation"] if validations and config.eval.at_start else None,
        "validation_after": validations[-1]["validation"] if validations else None,
        "test": evaluate(state, state.datasets.test, "test") if state.datasets.test else None,
        "checkpoint": str(save_weights(state.model, run_dir, state.step)),
    }
    recorder.finish(summary)
    return summary


def make_record(state: TrainState, window: Window, learning_rate: float, steps: int) -> dict[str, Any]:
    """What is logged of the steps since the last record; every rank takes part."""
    config, machine = state.config, capabilities()
    metrics = read_report(reduce_report(torch.stack(window.reports).sum(0)), config.objective.normalize)
    seconds = time.perf_counter() - window.started
    # speed counts every position that was computed, supervised or not
    window_samples = state.consumed_samples - window.first_sample
    tokens_per_second = window_samples * config.data.sequence_length / seconds
    ranks = torch.distributed.get_world_size()
    metrics.pop("tokens")
    return {
        "step": state.step,
        "steps": steps,
        "consumed_samples": state.consumed_samples,
        "consumed_tokens": state.consumed_samples * config.data.sequence_length,
        **metrics,
        "grad_norm": sum(window.grad_norms) / len(window.grad_norms) if window.grad_norms else None,
        "lr": learning_rate,
        "skipped_steps": window.skipped,
        "step_seconds": seconds / len(window.reports),
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_per_rank": tokens_per_second / ranks,
        "mfu": _mfu(config, machine, tokens_per_second / ranks),
        "eta_seconds": (state.total_samples - state.consumed_samples) * seconds / window_samples,
    }


def _mfu(config, machine, tokens_per_second_per_rank: float) -> float | None:
    if machine.peak_flops is None or config.model.num_moe_experts:
        return None
    return tokens_per_second_per_rank * flops_per_token(config.model, config.data.sequence_length) / machine.peak_flops
