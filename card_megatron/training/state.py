"""Everything that a training step works on, built in the order that Megatron needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from card_megatron.config.derived import batch_size_at, total_samples
from card_megatron.config.precision import resolve_precision
from card_megatron.config.schema import RunConfig
from card_megatron.data.datasets import CleanDatasets, ObjectiveDataset, build_clean_datasets
from card_megatron.data.loader import MicroBatchSampler, micro_batches, reads_data
from card_megatron.data.tokenizers import facts_of
from card_megatron.model import build_model
from card_megatron.model.transformer_config import DTYPES
from card_megatron.model.userbuffers import join_userbuffers
from card_megatron.objectives import Objective, build_objective
from card_megatron.platform import join_model_parallel
from card_megatron.training.ema import Ema
from card_megatron.training.guard import Samples
from card_megatron.training.preflight import Plan
from card_megatron.training.sections import Sections


@dataclass
class TrainState:
    """A run in progress."""

    config: RunConfig
    transformer_config: Any
    objective: Objective
    datasets: CleanDatasets
    model: list[Any]
    optimizer: Any
    scheduler: Any
    forward_backward: Callable
    total_samples: int
    data: list[Any] = field(default_factory=list)
    """One iterator of micro-batches for each model chunk; empty until the first step, which makes them."""
    step: int = 0
    consumed_samples: int = 0
    skipped_steps: int = 0
    ema: Ema | None = None
    tokenizer: dict[str, Any] | None = None
    """Facts of the data's tokenizer, for checkpoints."""
    samples: Samples = field(default_factory=lambda: Samples([], []))
    """What the current step has scored so far."""
    weight_sum: torch.Tensor | None = None
    """Sum of this step's weights, with objective.normalize=weights: what the gradients are divided by."""
    sections: Sections = field(default_factory=Sections)
    """Where the time of the current step goes."""

    @property
    def global_batch_size(self) -> int:
        return batch_size_at(self.config.train, self.consumed_samples)

    @property
    def num_microbatches(self) -> int:
        rows = self.config.train.micro_batch_size * parallel_state.get_data_parallel_world_size()
        return self.global_batch_size // rows

    @property
    def input_length(self) -> int:
        """Positions that the model computes for a sample."""
        return self.objective.copies * self.config.data.sequence_length

    @property
    def shape(self) -> dict[str, Any]:
        """What Megatron's schedules ask about the micro-batches."""
        return dict(
            num_microbatches=self.num_microbatches,
            seq_length=self.input_length,
            micro_batch_size=self.config.train.micro_batch_size,
        )


def build_state(plan: Plan) -> TrainState:
    """Join the ranks and build data, model and optimizer."""
    config = plan.config
    graphs = config.model.transformer.get("cuda_graph_impl", "none") != "none"
    join_model_parallel(plan.ranks, config.parallel, config.seed, cuda_graphs=graphs)
    if config.parallel.tp_comm_overlap:
        join_userbuffers(config)
    return assemble_state(plan)


def assemble_state(plan: Plan) -> TrainState:
    """Data, model and optimizer, on ranks that have joined."""
    config, transformer_config = plan.config, plan.transformer_config
    datasets = build_clean_datasets(config, plan.tokenizer, reads_data)
    chunks = build_model(config, transformer_config, mask_id=plan.tokenizer.mask)
    model = wrap_data_parallel(config, transformer_config, chunks)
    optimizer, scheduler = build_optimizer(config, model)
    state = TrainState(
        config=config,
        transformer_config=transformer_config,
        objective=build_objective(config.objective, mask_id=plan.tokenizer.mask, eod_id=plan.tokenizer.eod),
        datasets=datasets,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        forward_backward=get_forward_backward_func(),
        total_samples=total_samples(config),
        ema=None if config.ema.decay is None else Ema(optimizer, model, config.ema.decay),
        tokenizer=facts_of(plan.tokenizer),
    )
    connect(state)
    return state


def wrap_data_parallel(config: RunConfig, transformer_config: Any, chunks: list[Any]) -> list[Any]:
    """Megatron's DDP around each chunk: gradient buffers that the distributed optimizer shards."""
    parallel, precision = config.parallel, resolve_precision(config.precision)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=precision.grad_reduce_in_fp32,
        fp8_param_gather=precision.fp8_param_gather,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
    )
    wrapped = [
        # later chunks finish their backward pass first: only the first one gains from buckets
        DistributedDataParallel(transformer_config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped


def build_optimizer(config: RunConfig, model: list[Any]) -> tuple[Any, OptimizerParamScheduler]:
    """AdamW in Megatron's distributed optimizer, and the schedule, which counts in samples."""
    ours, batch = config.optimizer, config.train.global_batch_size
    precision = resolve_precision(config.precision)
    dtype = DTYPES[precision.params_dtype]
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=ours.lr,
        min_lr=ours.min_lr,
        weight_decay=ours.weight_decay,
        adam_beta1=ours.adam_beta1,
        adam_beta2=ours.adam_beta2,
        adam_eps=ours.adam_eps,
        clip_grad=ours.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        fp8_recipe=precision.fp8_recipe if precision.hardware_fp8 else None,
        use_distributed_optimizer=True,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )
    # without these overrides 0.16.1 decays norms and biases too
    optimizer = get_megatron_optimizer(
        optimizer_config, model, config_overrides=get_standard_config_overrides(optimizer_config)
    )
    decay_samples = ours.lr_decay_iters * batch if ours.lr_decay_iters else total_samples(config)
    wsd_samples = ours.lr_wsd_decay_iters * batch if ours.lr_wsd_decay_iters else decay_samples // 10
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=ours.lr,
        min_lr=ours.min_lr,
        lr_warmup_steps=ours.lr_warmup_iters * batch,
        lr_decay_steps=decay_samples,
        lr_decay_style=ours.lr_decay_style,
        wsd_decay_steps=wsd_samples,
        lr_wsd_decay_style=ours.lr_wsd_decay_style,
        start_wd=ours.weight_decay,
        end_wd=ours.weight_decay,
        wd_incr_steps=decay_samples,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def release(state: TrainState) -> None:
    """Lets go of the model, so that it can be collected with its groups: a state that was released does not train.

    Megatron hooks every chunk into autograd and keeps no handle. The hooks hold the chunk, and the optimizer holds
    their nodes, through C++, where Python's collector does not look: a process that trains several times would keep
    every model, and the threads of all its process groups, awake a hundred times a second.
    """
    for chunk in state.model:
        for node in chunk.grad_accs:
            node.register_hook(lambda *gradients: None).hooks_dict_ref().clear()


def connect(state: TrainState) -> None:
    """Tell Megatron's schedules about the optimizer and the wrappers, through the fields that it has for that."""
    transformer_config, model, parallel = state.transformer_config, state.model, state.config.parallel
    transformer_config.grad_scale_func = state.optimizer.scale_loss
    transformer_config.timers = state.sections
    transformer_config.finalize_model_grads_func = lambda *args, **kwargs: _finalize(state, *args, **kwargs)

    def per_chunk(functions: list[Callable]) -> Any:
        return functions[0] if len(functions) == 1 else functions

    if parallel.overlap_grad_reduce:
        transformer_config.no_sync_func = per_chunk([chunk.no_sync for chunk in model])
        if len(model) > 1:
            transformer_config.grad_sync_func = [chunk.start_grad_sync for chunk in model]
    if parallel.overlap_param_gather:
        transformer_config.param_sync_func = per_chunk([chunk.start_param_sync for chunk in model])


def _finalize(state: TrainState, model, num_tokens=None, **kwargs) -> None:
    """Megatron's finalize_model_grads, which divides by a count that its schedules keep as an integer.

    A sum of weights is no integer and would be truncated there, so it takes the count's place here.
    """
    finalize_model_grads(model, num_tokens if state.weight_sum is None else state.weight_sum, **kwargs)


def training_data(state: TrainState) -> list[Any]:
    """Iterators from the first sample not yet consumed, one for each model chunk; None on ranks that read nothing."""
    if not reads_data():
        return [None] * len(state.model)
    config = state.config
    dataset = ObjectiveDataset(state.datasets.train, state.objective, config.seed, "train")
    batches = [
        micro_batches(
            dataset,
            MicroBatchSampler(
                state.consumed_samples,
                state.total_samples,
                config.train.micro_batch_size,
                parallel_state.get_data_parallel_rank(),
                parallel_state.get_data_parallel_world_size(),
            ),
            config.data.num_workers,
        )
        for _ in state.model
    ]
    return [state.sections.reading(chunk) for chunk in batches]
