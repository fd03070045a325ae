"""What this many ranks of this machine cannot run: layouts, batches, libraries that are not here.

A part of check() in checks.py: sizes have been found to make sense before anything here divides by them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Iterator
from typing import Any

from card_megatron.config.derived import (
    data_parallel_size,
    model_parallel_size,
    padded_vocab_size,
    pipeline_chunks,
    pipeline_layout,
    total_samples,
    unrolled_layout,
)
from card_megatron.config.precision import resolve_precision
from card_megatron.config.remedies import INSTALL_ENGINE
from card_megatron.config.schema import RunConfig

OWNED_BY = {
    "num_layers": "model.num_layers",
    "hidden_size": "model.hidden_size",
    "ffn_hidden_size": "model.ffn_hidden_size",
    "num_attention_heads": "model.num_attention_heads",
    "num_query_groups": "model.num_query_groups",
    "kv_channels": "model.kv_channels",
    "normalization": "model.normalization",
    "layernorm_epsilon": "model.layernorm_epsilon",
    "gated_linear_unit": "model.activation",
    "activation_func": "model.activation",
    "qk_layernorm": "model.qk_layernorm",
    "add_bias_linear": "model.add_bias_linear",
    "add_qkv_bias": "model.add_qkv_bias",
    "hidden_dropout": "model.hidden_dropout",
    "attention_dropout": "model.attention_dropout",
    "init_method_std": "model.init_method_std",
    "perform_initialization": "model.init",
    "num_moe_experts": "model.num_moe_experts",
    "recompute_granularity": "model.recompute_granularity",
    "recompute_method": "model.recompute_method",
    "recompute_num_layers": "model.recompute_num_layers",
    "tensor_model_parallel_size": "parallel.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "parallel.pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout": "parallel.pipeline_model_parallel_layout",
    "context_parallel_size": "parallel.context_parallel_size",
    "expert_model_parallel_size": "parallel.expert_model_parallel_size",
    "sequence_parallel": "parallel.sequence_parallel",
    "microbatch_group_size_per_vp_stage": "parallel.pipeline_model_parallel_size",
    "bf16": "precision.preset",
    "fp16": "precision.preset",
    "params_dtype": "precision.preset",
    "pipeline_dtype": "precision.preset",
    "fp8": "precision.fp8_format",
    "fp8_recipe": "precision.fp8_recipe",
    "fp8_param": "precision.fp8_param_gather",
    "fp8_amax_history_len": "precision.fp8_amax_history_len",
    "fp8_amax_compute_algo": "precision.fp8_amax_compute_algo",
    "first_last_layers_bf16": "precision.first_last_layers_bf16",
    "num_layers_at_start_in_bf16": "precision.num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16": "precision.num_layers_at_end_in_bf16",
    "tp_comm_overlap": "parallel.tp_comm_overlap",
    "calculate_per_token_loss": "objective.normalize",
}
"""Fields of Megatron's TransformerConfig that have a place of their own: giving them twice would hide one."""


def nearest_multiples(value: int, of: int) -> str:
    """'96 or 144': the multiples of `of` on both sides of a value."""
    below, above = value // of * of, -(-value // of) * of
    return f"{below} or {above}" if below else f"{above}"


def layout_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Rules of tensor, pipeline, context and expert parallelism that the run breaks on this many ranks."""
    model, parallel = config.model, config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    needed = model_parallel_size(parallel)
    if world_size % needed:
        yield (
            f"{world_size} ranks cannot hold replicas of tensor {tp} x pipeline {pp} x context {cp} = {needed} ranks; "
            f"start {nearest_multiples(world_size, needed)} ranks (--nproc, or torchrun) or make the layout smaller"
        )
    for name in ("num_attention_heads", "ffn_hidden_size"):
        value = getattr(model, name)
        if value % tp:
            yield (
                f"model.{name}={value} is not a multiple of parallel.tensor_model_parallel_size={tp}; "
                f"try {nearest_multiples(value, tp)}, or another tensor-parallel size"
            )
    if model.vocab_size is not None and padded_vocab_size(model) % tp:
        yield (
            f"the padded vocabulary of {padded_vocab_size(model)} is not a multiple of "
            f"parallel.tensor_model_parallel_size={tp}; set model.make_vocab_size_divisible_by to a multiple of {tp}, "
            f"e.g. {math.lcm(model.make_vocab_size_divisible_by, tp)}"
        )
    groups = model.num_query_groups or model.num_attention_heads
    if groups % tp and tp % groups:
        yield (
            f"model.num_query_groups={groups} and parallel.tensor_model_parallel_size={tp}: "
            "one must be a multiple of the other; change either"
        )
    if parallel.sequence_parallel and tp == 1:
        yield (
            "parallel.sequence_parallel=true needs tensor parallelism; "
            "set parallel.tensor_model_parallel_size to 2 or more, or turn it off"
        )
    context_pieces, tensor_pieces = 2 * cp if cp > 1 else 1, tp if parallel.sequence_parallel else 1
    pieces = context_pieces * tensor_pieces
    if config.data.sequence_length % pieces:
        yield (
            f"data.sequence_length={config.data.sequence_length} is not a multiple of {context_pieces} (context "
            f"parallelism: two pieces a rank) x {tensor_pieces} (sequence parallelism); "
            f"try {nearest_multiples(config.data.sequence_length, pieces)}"
        )
    if vpp == 1:
        yield "parallel.virtual_pipeline_model_parallel_size=1 interleaves nothing; give 2 or more, or leave it out"
    elif vpp is not None and pp == 1:
        yield (
            f"parallel.virtual_pipeline_model_parallel_size={vpp} needs a pipeline; "
            "set parallel.pipeline_model_parallel_size to 2 or more, or leave it out"
        )
    if model.num_layers < pipeline_chunks(parallel):
        yield (
            f"model.num_layers={model.num_layers} cannot fill {pipeline_chunks(parallel)} pipeline chunks "
            f"({pp} ranks x {vpp or 1} virtual); make the pipeline shorter"
        )
    else:
        yield from _pipeline_layout(config)
    if parallel.tp_comm_overlap and not parallel.sequence_parallel:
        yield "parallel.tp_comm_overlap=true needs parallel.sequence_parallel=true; set both or neither"
    if parallel.overlap_param_gather and not parallel.overlap_grad_reduce:
        yield "parallel.overlap_param_gather=true needs parallel.overlap_grad_reduce=true; set both or neither"
    yield from _experts(config, world_size)
    yield from _transformer_fields(model.transformer, interleaved=vpp is not None)


def _pipeline_layout(config: RunConfig) -> Iterator[str]:
    layout = config.parallel.pipeline_model_parallel_layout
    if layout is None:
        return
    chunks = pipeline_chunks(config.parallel)
    unrolled = unrolled_layout(layout)
    automatic = dataclasses.replace(config.parallel, pipeline_model_parallel_layout=None)
    balanced = pipeline_layout(config.model, automatic)
    remedy = f"e.g. {balanced}" if balanced else "leave it out, and they are balanced"
    if unrolled.count("t") != config.model.num_layers or unrolled.count("|") + 1 != chunks:
        yield (
            f"parallel.pipeline_model_parallel_layout={layout!r} has {unrolled.count('t')} layers in "
            f"{unrolled.count('|') + 1} stages; it needs model.num_layers={config.model.num_layers} in {chunks}: "
            f"{remedy}"
        )
    elif not (unrolled.startswith("E") and unrolled.endswith("L")):
        yield f"parallel.pipeline_model_parallel_layout={layout!r} must begin with E (embedding) and end with L (loss)"


def _experts(config: RunConfig, world_size: int) -> Iterator[str]:
    experts, ep = config.model.num_moe_experts, config.parallel.expert_model_parallel_size
    if experts is None:
        if ep > 1:
            yield f"parallel.expert_model_parallel_size={ep} needs experts; set model.num_moe_experts"
        return
    if experts % ep:
        yield (
            f"model.num_moe_experts={experts} is not a multiple of parallel.expert_model_parallel_size={ep}; "
            f"try {nearest_multiples(experts, ep)} experts"
        )
    shared_by = data_parallel_size(config.parallel, world_size) * config.parallel.context_parallel_size
    if shared_by % ep:
        yield (
            f"parallel.expert_model_parallel_size={ep} does not divide the data x context = {shared_by} ranks that "
            "share experts; start more ranks, or share them among fewer"
        )
    if config.parallel.tensor_model_parallel_size > 1 and not config.parallel.sequence_parallel:
        yield "experts with tensor parallelism need parallel.sequence_parallel=true"


def _transformer_fields(fields: dict[str, Any], *, interleaved: bool) -> Iterator[str]:
    for name in fields:
        if name in OWNED_BY:
            yield f"model.transformer.{name} is set by {OWNED_BY[name]}; set it there"
    if interleaved and (fields.get("batch_p2p_comm") or fields.get("overlap_p2p_comm") is False):
        yield (
            "model.transformer.batch_p2p_comm with a virtual pipeline is silently wrong in megatron-core 0.16.1 "
            "(losses off by 3e-2 with more micro-batches than pipeline ranks); leave batch_p2p_comm and "
            "overlap_p2p_comm to the defaults"
        )


def batch_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Rules of batch sizes, and of a schedule that counts in batches."""
    train, parallel = config.train, config.parallel
    replicas = data_parallel_size(parallel, world_size)
    if replicas == 0:
        return  # layout_problems has said that there are too few ranks
    rows = train.micro_batch_size * replicas
    if train.global_batch_size % rows:
        yield (
            f"train.global_batch_size={train.global_batch_size} is not a multiple of micro_batch_size*dp={rows}; "
            f"try {nearest_multiples(train.global_batch_size, rows)}"
        )
        return
    sizes = {train.global_batch_size}
    if train.rampup_batch_size is not None:
        ramp = train.rampup_batch_size
        if len(ramp) != 3 or min(ramp) < 1:
            yield f"train.rampup_batch_size={ramp} must be [start, increment, samples], all positive"
            return
        start, increment, _ = ramp
        if start > train.global_batch_size or (train.global_batch_size - start) % increment:
            yield (
                f"train.rampup_batch_size={ramp} does not reach train.global_batch_size={train.global_batch_size} "
                f"from {start} in steps of {increment}"
            )
            return
        sizes |= set(range(start, train.global_batch_size, increment))
        wrong = sorted(size for size in sizes if size % rows)
        if wrong:
            yield (
                f"train.rampup_batch_size={ramp} passes through {wrong[0]}, not a multiple of "
                f"micro_batch_size*dp={rows}; start at and step by multiples of {rows}"
            )
            return
    if parallel.virtual_pipeline_model_parallel_size is not None:
        pp = parallel.pipeline_model_parallel_size
        wrong = sorted(size for size in sizes if (size // rows) % pp)
        if wrong:
            yield (
                f"a batch of {wrong[0]} makes {wrong[0] // rows} micro-batches; the interleaved pipeline needs a "
                f"multiple of pipeline_model_parallel_size={pp}: "
                f"try a batch of {nearest_multiples(wrong[0], rows * pp)}"
            )
    yield from _schedule(config)


def _schedule(config: RunConfig) -> Iterator[str]:
    """The schedule counts in samples, as a ramped batch size makes steps of different sizes."""
    optimizer, batch, samples = config.optimizer, config.train.global_batch_size, total_samples(config)
    warmup = optimizer.lr_warmup_iters * batch
    if warmup >= samples:
        yield (
            f"optimizer.lr_warmup_iters={optimizer.lr_warmup_iters} is {warmup} samples, but the run "
            f"has only {samples}; warm up for fewer steps"
        )
    decay_end = optimizer.lr_decay_iters * batch if optimizer.lr_decay_iters else samples
    wsd = (optimizer.lr_wsd_decay_iters or 0) * batch
    if optimizer.lr_decay_style == "WSD" and warmup + wsd > decay_end:
        yield (
            f"optimizer.lr_wsd_decay_iters={optimizer.lr_wsd_decay_iters} is {wsd} samples, but only "
            f"{decay_end - warmup} lie between the warm-up and the end of the decay; decay for fewer steps"
        )


def machine_problems(config: RunConfig, *, cuda: bool, transformer_engine: bool) -> Iterator[str]:
    """What the run asks for that this machine does not have."""
    fields, precision = config.model.transformer, resolve_precision(config.precision)
    engine = cuda and transformer_engine and config.model.spec != "local" and not precision.emulate
    if config.model.spec == "te" and not (cuda and transformer_engine):
        lacking = "CUDA" if not cuda else f"Transformer Engine ({INSTALL_ENGINE})"
        yield f"model.spec=te needs {lacking}, which is not here; use model.spec=local or auto"
    if precision.hardware_fp8 and not (cuda and transformer_engine):
        yield (
            f"precision.preset={config.precision.preset} needs CUDA and Transformer Engine, which are not both here: "
            "without them megatron-core trains silently in higher precision; use bf16 or fp32, or study FP8 with "
            "precision.emulate=true"
        )
    if fields.get("fp4"):
        yield "model.transformer.fp4 is not supported: nothing here keeps its settings in agreement; remove it"
    if config.parallel.tp_comm_overlap and not engine:
        yield (
            "parallel.tp_comm_overlap=true needs CUDA and Transformer Engine's layers, and is ignored without them; "
            "turn it off"
        )
    graphs = fields.get("cuda_graph_impl", "none")
    if graphs != "none" and not cuda:
        yield f"model.transformer.cuda_graph_impl={graphs} needs CUDA; leave it out"
    if graphs == "transformer_engine" or "full_iteration" in str(fields.get("cuda_graph_scope", "")):
        yield (
            "model.transformer.cuda_graph_impl=transformer_engine and cuda_graph_scope=full_iteration need "
            "Megatron-LM's own training loop; use cuda_graph_impl=local with the scopes of a layer"
        )
    if config.logging.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        yield f"logging.wandb_project={config.logging.wandb_project} needs wandb: pip install wandb, or leave it out"
    if config.profile.tool == "nsys" and not cuda:
        yield "profile.tool=nsys marks steps for NVIDIA's profiler and needs CUDA; use profile.tool=torch here"
    if not cuda:
        if fields.get("deallocate_pipeline_outputs") and config.parallel.pipeline_model_parallel_size > 1:
            yield (
                "model.transformer.deallocate_pipeline_outputs=true is silently wrong on gloo "
                "(losses off by 0.27); leave it out on a CPU"
            )
        if config.model.num_moe_experts and fields.get("moe_grouped_gemm"):
            yield (
                "model.transformer.moe_grouped_gemm needs CUDA; on a CPU leave it out (experts run one after another)"
            )
        if fields.get("gradient_accumulation_fusion"):
            yield "model.transformer.gradient_accumulation_fusion needs NVIDIA's apex and CUDA; leave it out"
        if fields.get("cross_entropy_loss_fusion"):
            yield "model.transformer.cross_entropy_loss_fusion needs CUDA; leave it out"
