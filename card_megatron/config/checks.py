"""What cannot run, said before any process group exists: the value, the rule, the remedy.

Each check yields messages; all of them are shown at once, so that a user does not meet them one by one.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from card_megatron.config.derived import (
    batch_size_at,
    data_parallel_size,
    model_parallel_size,
    padded_vocab_size,
    pipeline_chunks,
    pipeline_layout,
    total_samples,
)
from card_megatron.config.errors import ConfigError
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
    "bf16": "precision.dtype",
    "fp16": "precision.dtype",
    "params_dtype": "precision.dtype",
    "pipeline_dtype": "precision.dtype",
    "calculate_per_token_loss": "objective.normalize",
}
"""Fields of Megatron's TransformerConfig that have a place of their own: giving them twice would hide one."""


def check(config: RunConfig, *, world_size: int, cuda: bool, transformer_engine: bool = False) -> None:
    """Raise ConfigError with every rule that this run breaks on this many ranks of this machine."""
    problems = [
        *_sizes(config),
        *_objective(config),
        *_data(config),
        *_optimizer(config),
    ]
    # the rules below divide by sizes: they are only asked once the sizes make sense
    if not problems:
        problems += [*_layout(config, world_size), *_batch(config, world_size)]
        problems += [*_machine(config, cuda=cuda, transformer_engine=transformer_engine)]
    if problems:
        raise ConfigError(problems[0] if len(problems) == 1 else "\n  - ".join(["this run cannot start:", *problems]))


def nearest_multiples(value: int, of: int) -> str:
    """'96 or 144': the multiples of `of` on both sides of a value."""
    below, above = value // of * of, -(-value // of) * of
    return f"{below} or {above}" if below else f"{above}"


def _positive(config: RunConfig, section: str, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(getattr(config, section), name)
        if value is not None and value < 1:
            yield f"{section}.{name}={value} must be at least 1"


def _sizes(config: RunConfig) -> Iterator[str]:
    model = config.model
    yield from _positive(
        config,
        "model",
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("vocab_size", "make_vocab_size_divisible_by", "max_position_embeddings", "num_moe_experts"),
        *("recompute_num_layers",),
    )
    yield from _positive(
        config,
        "parallel",
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    )
    yield from _positive(config, "train", "train_iters", "train_tokens", "global_batch_size", "micro_batch_size")
    yield from _positive(config, "data", "sequence_length")
    yield from _positive(config, "eval", "samples")
    yield from _positive(config, "logging", "interval")
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= getattr(model, name) < 1:
            yield f"model.{name}={getattr(model, name)} must lie in [0, 1)"
    if config.data.num_workers < 0:
        yield f"data.num_workers={config.data.num_workers} must be 0 or more"
    if config.eval.interval < 0:
        yield f"eval.interval={config.eval.interval} must be 0 (at the end only) or more"
    if (config.train.train_iters is None) == (config.train.train_tokens is None):
        given = "both" if config.train.train_iters is not None else "neither"
        yield (
            f"{given} of train.train_iters and train.train_tokens given; give exactly one "
            "(a preset's can be taken back with --train.train_tokens null)"
        )
    heads, groups = model.num_attention_heads, model.num_query_groups
    if heads >= 1 and model.kv_channels is None and model.hidden_size % heads:
        yield (
            f"model.hidden_size={model.hidden_size} is not a multiple of model.num_attention_heads={heads}; "
            f"try {nearest_multiples(model.hidden_size, heads)}, or set model.kv_channels"
        )
    if groups is not None and groups >= 1 and heads % groups:
        yield f"model.num_attention_heads={heads} is not a multiple of model.num_query_groups={groups}"
    if config.data.sequence_length > model.max_position_embeddings:
        yield (
            f"data.sequence_length={config.data.sequence_length} is longer than "
            f"model.max_position_embeddings={model.max_position_embeddings}; raise the latter"
        )


def _objective(config: RunConfig) -> Iterator[str]:
    objective = config.objective
    if not objective.tail_factor >= 1:
        yield f"objective.tail_factor={objective.tail_factor} must be at least 1 (the strict tail); inf is random"
    if not 0 <= objective.decay <= 1:
        yield f"objective.decay={objective.decay} (the paper's p) must lie in [0, 1]"
    if not (objective.beta > 0 and math.isfinite(objective.beta)):
        yield f"objective.beta={objective.beta} must be positive: a clean context has weight 1/beta"
    if not 0 <= objective.t_min <= objective.t_max <= 1:
        yield f"objective.t_min={objective.t_min} and t_max={objective.t_max} must satisfy 0 <= t_min <= t_max <= 1"
    if not 0 <= objective.clean_fraction <= 1:
        yield f"objective.clean_fraction={objective.clean_fraction} must lie in [0, 1]"


def _data(config: RunConfig) -> Iterator[str]:
    data = config.data
    if data.mock and data.train:
        yield "data.mock=true and data.train are both given; mock data needs no files: drop one of them"
    if data.mock and config.model.vocab_size is None:
        yield "data.mock=true has no tokenizer to take the vocabulary from; set model.vocab_size"
    if not data.mock and not data.train:
        yield "data.train is empty; give prefixes of .bin/.idx files (`card data build` makes them) or data.mock=true"
    if not data.mock and data.tokenizer is None:
        yield "data.tokenizer is not set; give the SentencePiece .model that made data.train"
    for entry in data.train:
        words = entry.split()
        if len(words) > 2 or (len(words) == 2 and not _is_weight(words[0])):
            yield f"data.train entry {entry!r} is not 'PREFIX' or 'WEIGHT PREFIX' with a positive weight"
    if len({len(entry.split()) for entry in data.train}) > 1:
        yield f"data.train={data.train} mixes entries with and without a weight; give all of them one, or none"
    if data.split is not None:
        if not re.fullmatch(r"\s*[\d.]+(\s*,\s*[\d.]+){2}\s*", data.split):
            yield f"data.split={data.split!r} is not three shares such as '98,1,1'"
        elif float(data.split.split(",")[0]) <= 0:
            yield f"data.split={data.split!r} leaves nothing to train on"
        if data.validation or data.test:
            yield "data.split and data.validation/data.test are both given; held-out sets come from one of them"


def _is_weight(word: str) -> bool:
    try:
        return 0 < float(word) < math.inf
    except ValueError:
        return False


def _optimizer(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if not optimizer.lr > 0:
        yield f"optimizer.lr={optimizer.lr} must be positive"
    if not 0 <= optimizer.min_lr <= optimizer.lr:
        yield f"optimizer.min_lr={optimizer.min_lr} must lie between 0 and optimizer.lr={optimizer.lr}"
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(optimizer, name) < 1:
            yield f"optimizer.{name}={getattr(optimizer, name)} must lie in [0, 1)"
    for name in ("weight_decay", "clip_grad", "lr_warmup_iters"):
        if getattr(optimizer, name) < 0:
            yield f"optimizer.{name}={getattr(optimizer, name)} must be 0 or more"
    if config.train.train_iters is not None and optimizer.lr_warmup_iters >= config.train.train_iters:
        yield (
            f"optimizer.lr_warmup_iters={optimizer.lr_warmup_iters} does not end within the run's "
            f"train.train_iters={config.train.train_iters}; warm up for fewer steps"
        )
    if optimizer.lr_decay_iters is not None and optimizer.lr_decay_iters <= optimizer.lr_warmup_iters:
        yield (
            f"optimizer.lr_decay_iters={optimizer.lr_decay_iters} must be more than "
            f"optimizer.lr_warmup_iters={optimizer.lr_warmup_iters}"
        )


def _layout(config: RunConfig, world_size: int) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    needed = model_parallel_size(parallel)
    if world_size % needed:
        yield (
            f"{world_size} ranks cannot hold replicas of tensor {tp} x pipeline {pp} x context {cp} = {needed} ranks; "
            f"start {nearest_multiples(world_size, needed)} ranks (--nproc, or torchrun) or make the layout smaller"
        )
    divisible: list[tuple[str, int]] = [
        ("model.num_attention_heads", model.num_attention_heads),
        ("model.ffn_hidden_size", model.ffn_hidden_size),
    ]
    if model.vocab_size is not None:
        divisible.append(("the padded vocabulary", padded_vocab_size(model)))
    for name, value in divisible:
        if value % tp:
            yield (
                f"{name}={value} is not a multiple of parallel.tensor_model_parallel_size={tp}; "
                f"try {nearest_multiples(value, tp)}, or another tensor-parallel size"
            )
    groups = model.num_query_groups or model.num_attention_heads
    if groups % tp and tp % groups:
        yield (
            f"model.num_query_groups={groups} and parallel.tensor_model_parallel_size={tp}: "
            "one must be a multiple of the other"
        )
    if parallel.sequence_parallel and tp == 1:
        yield (
            "parallel.sequence_parallel=true needs tensor parallelism; "
            "set parallel.tensor_model_parallel_size to 2 or more, or turn it off"
        )
    pieces = (2 * cp if cp > 1 else 1) * (tp if parallel.sequence_parallel else 1)
    if config.data.sequence_length % pieces:
        yield (
            f"data.sequence_length={config.data.sequence_length} is not a multiple of {pieces}: context parallelism "
            f"cuts it into 2 x {cp} pieces and sequence parallelism each rank's share into {tp}; "
            f"try {nearest_multiples(config.data.sequence_length, pieces)}"
        )
    if vpp is not None and pp == 1:
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
    if parallel.overlap_param_gather and not parallel.overlap_grad_reduce:
        yield "parallel.overlap_param_gather=true needs parallel.overlap_grad_reduce=true"
    yield from _experts(config, world_size)
    yield from _transformer_fields(model.transformer, interleaved=vpp is not None)


def _pipeline_layout(config: RunConfig) -> Iterator[str]:
    layout = config.parallel.pipeline_model_parallel_layout
    if layout is None:
        return
    chunks = pipeline_chunks(config.parallel)
    unrolled = re.sub(r"\(([^)]+)\)\*(\d+)", lambda m: m[1] * int(m[2]), layout.replace(",", ""))
    unrolled = re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), unrolled)
    automatic = dataclasses.replace(config.parallel, pipeline_model_parallel_layout=None)
    example = pipeline_layout(config.model, automatic) or "leave it out"
    if unrolled.count("t") != config.model.num_layers or unrolled.count("|") + 1 != chunks:
        yield (
            f"parallel.pipeline_model_parallel_layout={layout!r} has {unrolled.count('t')} layers in "
            f"{unrolled.count('|') + 1} stages; it needs model.num_layers={config.model.num_layers} in {chunks}: "
            f"e.g. {example}"
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
        yield f"model.num_moe_experts={experts} is not a multiple of parallel.expert_model_parallel_size={ep}"
    if data_parallel_size(config.parallel, world_size) * config.parallel.context_parallel_size % ep:
        yield f"parallel.expert_model_parallel_size={ep} does not divide the data-parallel ranks"
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


def _batch(config: RunConfig, world_size: int) -> Iterator[str]:
    train, parallel = config.train, config.parallel
    replicas = data_parallel_size(parallel, world_size)
    if replicas == 0:
        return  # _layout has said that there are too few ranks
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
        wrong = [size for size in range(start, train.global_batch_size, increment) if size % rows]
        if wrong:
            yield (
                f"train.rampup_batch_size={ramp} passes through {wrong[0]}, not a multiple of "
                f"micro_batch_size*dp={rows}; start at and step by multiples of {rows}"
            )
            return
        sizes.add(batch_size_at(train, 0))
    if parallel.virtual_pipeline_model_parallel_size is not None:
        pp = parallel.pipeline_model_parallel_size
        for size in sorted(sizes):
            if (size // rows) % pp:
                yield (
                    f"a batch of {size} makes {size // rows} micro-batches; the interleaved pipeline needs a "
                    f"multiple of pipeline_model_parallel_size={pp}: "
                    f"try a batch of {nearest_multiples(size, rows * pp)}"
                )
    warmup_samples = config.optimizer.lr_warmup_iters * train.global_batch_size
    if warmup_samples >= total_samples(config):
        yield (
            f"optimizer.lr_warmup_iters={config.optimizer.lr_warmup_iters} is {warmup_samples} samples, but the run "
            f"has only {total_samples(config)}; warm up for fewer steps"
        )


def _machine(config: RunConfig, *, cuda: bool, transformer_engine: bool) -> Iterator[str]:
    fields = config.model.transformer
    if config.model.spec == "te" and not (cuda and transformer_engine):
        lacking = "CUDA" if not cuda else "Transformer Engine (pip install 'card_megatron[gpu]')"
        yield f"model.spec=te needs {lacking}, which is not here; use model.spec=local or auto"
    if (fields.get("fp8") or fields.get("fp4")) and not (cuda and transformer_engine):
        yield (
            "model.transformer.fp8/fp4 needs CUDA and Transformer Engine: without them megatron-core trains silently "
            "in higher precision; remove it"
        )
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
