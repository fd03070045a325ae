"""Validation: the same samples with the same noise every time, over every token of a set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from card_megatron.config.schema import ObjectiveConfig
from card_megatron.data.datasets import ObjectiveDataset
from card_megatron.data.loader import MicroBatchSampler, micro_batches, reads_data
from card_megatron.objectives import Arm, Objective
from card_megatron.training.drafts import draft_metrics
from card_megatron.training.metrics import perplexity, read_report, reduce_report, sum_reports
from card_megatron.training.state import TrainState
from card_megatron.training.step import run_schedule

MICROBATCHES_A_PASS = 64


def evaluate(
    state: TrainState, datasets: dict[str, Any], split: str, beat: Callable[[], None] = lambda: None
) -> dict[str, dict[str, Any]]:
    """Metrics of each named set: under the objective's own noise and, with eval.clean, on clean prefixes.

    For a causal objective `clean_nll` is the exact autoregressive likelihood per token; `nll` is under noise. For a
    diffusion objective `bound_nll` is an upper bound of it, estimated with the one noise of the set.
    `beat` is called between passes, as a sign of life.
    """
    results = {}
    for name, dataset in datasets.items():
        label = f"{split}/{name}"
        metrics = _score(state, dataset, state.objective.for_validation(), label, beat)
        if state.objective.likelihood == "bound" and metrics["loss"] is not None:
            metrics |= {"bound_nll": metrics["loss"], "bound_perplexity": perplexity(metrics["loss"])}
        if state.config.eval.clean and state.objective.likelihood == "exact":
            clean = Arm(ObjectiveConfig(), mask_id=state.objective.mask_id, eod_id=state.objective.eod_id)
            exact = metrics if isinstance(state.objective, Arm) else _score(state, dataset, clean, label, beat)
            metrics |= {"clean_nll": exact["nll"], "clean_perplexity": exact["perplexity"]}
        if state.config.eval.drafts:

            def passes(tail: Objective, step: Callable, dataset: Any = dataset, label: str = label) -> list[Any]:
                return _passes(state, dataset, tail, label, state.config.eval.draft_samples, beat, step)

            metrics |= draft_metrics(state, passes)
        results[name] = metrics
    return results


def _score(
    state: TrainState, dataset: Any, objective: Objective, label: str, beat: Callable[[], None]
) -> dict[str, Any]:
    """Forward passes over a whole set."""
    weight_sum, state.weight_sum = state.weight_sum, None
    reports = _passes(state, dataset, objective, label, state.config.eval.samples, beat)
    state.weight_sum = weight_sum
    return read_report(reduce_report(sum_reports(reports)).tolist(), state.config.objective.normalize)


def _passes(
    state: TrainState,
    dataset: Any,
    objective: Objective,
    label: str,
    most: int | None,
    beat: Callable[[], None],
    forward_step: Callable | None = None,
) -> list[Any]:
    """The model over the first samples of a set, as an objective makes them; what the forward steps reported here."""
    config = state.config
    replicas = parallel_state.get_data_parallel_world_size()
    samples = _same_on_all_ranks(0 if dataset is None else len(dataset))
    samples = samples if most is None else min(samples, most)
    # whole rounds of the pipeline, as its interleaved schedule needs; rows that fill one up count for nothing
    stages = config.parallel.pipeline_model_parallel_size
    batches = -(-samples // (config.train.micro_batch_size * replicas * stages)) * stages
    batches_a_pass = max(MICROBATCHES_A_PASS // stages, 1) * stages
    data: list[Any] = [None] * len(state.model)
    if reads_data():
        noised = ObjectiveDataset(dataset, objective, config.seed, label)
        rank, rows = parallel_state.get_data_parallel_rank(), config.train.micro_batch_size
        data = [
            micro_batches(
                noised, MicroBatchSampler(0, samples, rows, rank, replicas, fill_to=batches), config.data.num_workers
            )
            for _ in state.model
        ]
    for chunk in state.model:
        chunk.eval()
    reports = []
    with torch.no_grad():
        for start in range(0, batches, batches_a_pass):
            reports += run_schedule(
                state,
                data,
                forward_only=True,
                forward_step=forward_step,
                num_microbatches=min(batches_a_pass, batches - start),
                seq_length=state.input_length,
                micro_batch_size=config.train.micro_batch_size,
            )
            beat()
    for chunk in state.model:
        chunk.train()
    return reports


def _same_on_all_ranks(value: int) -> int:
    """Only ranks that read data know the length of a set; the largest answer is theirs."""
    known = torch.tensor(value, device=torch.cuda.current_device())
    torch.distributed.all_reduce(known, op=torch.distributed.ReduceOp.MAX)
    return int(known)
