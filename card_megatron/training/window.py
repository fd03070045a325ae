"""The steps between two records, and the record that is made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from card_megatron.config.derived import flops_per_token
from card_megatron.platform import capabilities
from card_megatron.training.metrics import EMPTY_REPORT, read_report
from card_megatron.training.state import TrainState
from card_megatron.training.step import StepResult


@dataclass
class Window:
    """The steps since the last record, in sums over all ranks: a save keeps it, so that no step's record is lost."""

    first_sample: int
    report: list[float] = field(default_factory=lambda: list(EMPTY_REPORT))
    steps: int = 0
    skipped: int = 0
    grad_norms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, report: list[float], result: StepResult, seconds: float) -> None:
        self.steps += 1
        self.seconds += seconds
        self.skipped += result.skipped
        if not result.skipped:  # what was not learned from is not averaged either
            self.grad_norms.append(result.grad_norm)
            self.report = [total + value for total, value in zip(self.report, report, strict=True)]


def make_record(state: TrainState, window: Window, learning_rate: float, steps: int) -> dict[str, Any]:
    """What is logged of the steps since the last record."""
    config, machine = state.config, capabilities()
    metrics = read_report(window.report, config.objective.normalize)
    # speed counts every position that was computed, supervised or not
    window_samples = state.consumed_samples - window.first_sample
    tokens_per_second = window_samples * config.data.sequence_length / window.seconds
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
        "step_seconds": window.seconds / window.steps,
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_per_rank": tokens_per_second / ranks,
        "mfu": _mfu(config, machine, tokens_per_second / ranks),
        "eta_seconds": (state.total_samples - state.consumed_samples) * window.seconds / window_samples,
    }


def _mfu(config, machine, tokens_per_second_per_rank: float) -> float | None:
    if machine.peak_flops is None or config.model.num_moe_experts:
        return None
    flops = flops_per_token(config.model, config.data.sequence_length, config.objective)
    return tokens_per_second_per_rank * flops / machine.peak_flops
