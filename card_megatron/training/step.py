"""One training step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.utils import get_attr_wrapped_model

from card_megatron.data.loader import Batch, next_batch
from card_megatron.training.guard import Samples
from card_megatron.training.metrics import counted_once, make_report, sum_reports
from card_megatron.training.state import TrainState, training_data


@dataclass
class StepResult:
    """What a step leaves for the log. Scores are those of this rank: empty but in the last pipeline stage."""

    report: torch.Tensor
    """The sums of its micro-batches, to be summed over all ranks."""
    samples: Samples
    grad_norm: float
    learning_rate: float
    skipped: bool


def train_step(state: TrainState) -> StepResult:
    """Forward, backward, update; a non-finite gradient skips the update on every rank alike."""
    state.sections.reset()
    for chunk in state.model:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    if state.config.objective.normalize == "weights":
        state.weight_sum = torch.zeros([], device=torch.cuda.current_device())
    if not state.data:
        state.data = training_data(state)
    state.samples = Samples([], [])
    batch_size = state.global_batch_size
    reports = run_schedule(state, state.data, forward_only=False, **state.shape)
    learning_rate = current_learning_rate(state.optimizer)
    with state.sections("optimizer"):
        updated, grad_norm = guarded_update(state.optimizer)
        if updated:
            state.scheduler.step(increment=batch_size)
            if state.ema is not None:
                state.ema.update()
    state.step += 1
    state.consumed_samples += batch_size
    state.skipped_steps += not updated
    report = counted_once(sum_reports(reports))
    return StepResult(report, state.samples, grad_norm, learning_rate, skipped=not updated)


def run_schedule(
    state: TrainState, data: list[Any], *, forward_only: bool, forward_step: Callable | None = None, **shape: Any
) -> list[Any]:
    """Megatron's schedule for this layout over the micro-batches of one step."""
    return state.forward_backward(
        forward_step_func=forward_step or make_forward_step(state),
        data_iterator=data,
        model=state.model,
        forward_only=forward_only,
        **shape,
    )


def make_forward_step(state: TrainState) -> Callable:
    """Megatron's forward_step_func: one micro-batch through one model chunk, and the loss for the last of them."""

    def forward_step(iterator, chunk):
        batch = None
        if get_attr_wrapped_model(chunk, "pre_process") or get_attr_wrapped_model(chunk, "post_process"):
            batch = next_batch(iterator)
        if batch is None:  # a stage in the middle of the pipeline
            return chunk(None, None, None), None
        nll = chunk(batch.tokens, None, None, labels=batch.labels, loss_mask=batch.weights)
        return nll, partial(loss_function, state, batch)

    return forward_step


def loss_function(state: TrainState, batch: Batch, nll_BS: torch.Tensor):
    """(weighted sum, integer count, report): Megatron divides the summed gradients by the summed counts."""
    nll_BS = nll_BS.float()
    weighted = (nll_BS * batch.weights).sum()
    # 1 for a finite loss, NaN for any other: an infinite loss can have finite gradients, and must not be learned from
    weighted = weighted * (1.0 + 0.0 * weighted.detach())
    if state.weight_sum is not None:
        state.weight_sum += batch.weights.sum()
    report = make_report(batch, nll_BS.detach(), state.objective.mask_id)
    state.samples.add(batch, nll_BS.detach())
    return weighted, batch.supervised.sum().to(torch.int), report


@torch.no_grad()
def guarded_update(optimizer: Any) -> tuple[bool, float]:
    """(updated, gradient norm). Without a loss scaler Megatron would apply NaN gradients and call it a success."""
    found_inf = optimizer.prepare_grads()
    grad_norm = optimizer.get_grad_norm()  # the same on every rank
    if found_inf or not math.isfinite(grad_norm):
        return False, float(grad_norm)
    for part in optimizer.chained_optimizers:
        parameters = part.get_parameters()
        if part.config.clip_grad > 0.0 and parameters:
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, grad_norm)
    return bool(optimizer.step_with_ready_grads()), float(grad_norm)


def current_learning_rate(optimizer: Any) -> float:
    """The rate that this step's update uses."""
    return optimizer.param_groups[0]["lr"]
