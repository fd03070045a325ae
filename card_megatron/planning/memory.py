"""Bytes of one GPU, by what holds them.

Weights, gradients, optimizer state and saved activations of the local layers are held to reality in
tests/distributed/test_planning_memory.py, tensor by tensor, within 5%. Transformer Engine's layers save less (their
norms keep no fp32 copies, their activations are fused) and FP8 changes what they keep: those numbers follow from what
its modules save, and have not been measured here, where there is no GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from card_megatron.config.derived import data_parallel_size
from card_megatron.config.precision import BYTES, resolve_precision
from card_megatron.config.schema import ModelConfig, RunConfig
from card_megatron.planning.sizes import Sizes, Stage, stages

GIB = 2**30
FP32 = 4

CONTEXT = 3.0 * GIB
"""CUDA's context, NCCL's channels, cuBLAS's and Transformer Engine's workspaces: an assumption, not a measurement."""
FRAGMENTATION = 0.05
"""Share of the activations that torch's allocator cannot use: an assumption, not a measurement."""


@dataclass(frozen=True)
class Memory:
    """Bytes that the fullest GPU of a layout holds at its peak; a decoder's KV cache has no place in training."""

    weights: float
    gradients: float
    optimizer: float
    """fp32 main weights and Adam's moments, shared by data- and context-parallel ranks."""
    average: float
    """The moving average of the weights, shared in the same way; 0 without `ema.decay`."""
    activations: float
    """Saved for the backward pass, for all micro-batches in flight; the loss's are `logits`."""
    logits: float
    workspace: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def memory(config: RunConfig, world_size: int, *, engine: bool) -> Memory:
    """The fullest pipeline stage. `engine`: Transformer Engine's layers rather than local ones, on a GPU both."""
    return max(memory_by_stage(config, world_size, engine=engine), key=lambda held: held.total)


def memory_by_stage(config: RunConfig, world_size: int, *, engine: bool) -> list[Memory]:
    """What a GPU of each pipeline stage holds."""
    replicas = data_parallel_size(config.parallel, world_size)
    micro_batches = config.train.global_batch_size // (config.train.micro_batch_size * replicas)
    pipeline = stages(config.model, config.parallel, micro_batches)
    return [_stage_memory(config, stage, replicas, engine=engine) for stage in pipeline]


def _stage_memory(config: RunConfig, stage: Stage, replicas: int, *, engine: bool) -> Memory:
    sizes, precision = Sizes.of(config), resolve_precision(config.precision)
    number = BYTES[precision.params_dtype]
    in_fp8 = [precision.hardware_fp8 and precision.in_fp8(layer, config.model.num_layers) for layer in stage.layers]
    linear, other = parameters(config.model, sizes, stage, pipelined=config.parallel.pipeline_model_parallel_size > 1)
    # Hopper's FP8 products want both operands in rows: a weight is kept as it is and transposed
    fp8_weight = 2 + (0 if precision.fp8_param_gather else number)
    share = sum(in_fp8) / len(in_fp8) if in_fp8 else 0.0
    shards = replicas * config.parallel.context_parallel_size
    activations, logits = saved(config, sizes, stage, in_fp8, engine=engine)
    return Memory(
        weights=linear * (share * fp8_weight + (1 - share) * number) + other * number,
        gradients=(linear + other) * precision.grad_bytes,
        optimizer=(linear + other) * (2 * FP32 + (FP32 if precision.main_params else 0)) / shards,
        average=0.0 if config.ema.decay is None else (linear + other) * FP32 / shards,
        activations=activations,
        logits=logits,
        workspace=_workspace(sizes, stage, number, activations),
    )


def parameters(model: ModelConfig, sizes: Sizes, stage: Stage, *, pipelined: bool) -> tuple[float, float]:
    """(weights of the layers' matrices, all others) that a rank of this stage holds."""
    hidden, ffn, gate = sizes.hidden, sizes.ffn, sizes.gate
    norm = hidden * (2 if model.normalization == "LayerNorm" else 1)
    experts = model.num_moe_experts or 1
    matrices = hidden * (2 * sizes.query + 2 * sizes.key) + hidden * ffn * (gate + 1) * experts
    small = 2.0 * norm
    if model.num_moe_experts:
        small += hidden * experts
    if model.add_bias_linear:
        small += sizes.query + 2 * sizes.key + hidden + (ffn * gate + hidden) * experts
    elif model.add_qkv_bias:
        small += sizes.query + 2 * sizes.key
    if model.qk_layernorm:
        small += 2 * sizes.head * (2 if model.normalization == "LayerNorm" else 1)
    layers, table = len(stage.layers), sizes.vocab * hidden
    # a tied output layer is the embedding itself, unless a pipeline puts it on another rank: then it is a copy
    own_output = stage.last and (pipelined or not model.share_embeddings_and_output_weights)
    tables = table * (stage.first + own_output)
    return layers * matrices, layers * small + tables + (norm if stage.last else 0)


def saved(config: RunConfig, sizes: Sizes, stage: Stage, in_fp8: list[bool], *, engine: bool) -> tuple[float, float]:
    """(bytes of activations, bytes of logits) that autograd keeps at the stage's peak."""
    model, number = config.model, BYTES[resolve_precision(config.precision).params_dtype]
    whole = [sum(saved_by_layer(model, sizes, number, engine=engine, fp8=fp8).values()) for fp8 in in_fp8]
    residual = sizes.shared_tokens * sizes.hidden
    kept, inputs, group = whole, 0, 0.0
    if model.recompute_granularity == "full":
        given = model.recompute_num_layers or 1
        if model.recompute_method == "block":  # the first layers of every chunk, each from its own input
            inputs = min(given * (config.parallel.virtual_pipeline_model_parallel_size or 1), len(whole))
            kept, group = whole[inputs:], max(whole, default=0.0)
        else:  # all of them, in groups that begin with one saved input
            kept, inputs, group = [], math.ceil(len(whole) / given), given * max(whole, default=0.0)
    layers = stage.in_flight * (sum(kept) + inputs * residual * number)
    head, logits = 0.0, 0.0
    if stage.last:
        head = residual * (2 * number if engine or model.normalization == "LayerNorm" else 2 * FP32 + number)
        logits = sizes.tokens * sizes.vocab * FP32
    # a group is there again while its backward pass runs: after the loss's and that of the layers behind it
    recomputing = layers - sum(kept) + group if inputs else 0.0
    return max(layers + head, recomputing - logits), logits


def saved_by_layer(model: ModelConfig, sizes: Sizes, number: int, *, engine: bool, fp8: bool) -> dict[str, float]:
    """Bytes that one layer saves for one micro-batch, by part. `number`: bytes of an activation."""
    tokens, residual = sizes.tokens, sizes.shared_tokens * sizes.hidden
    matrix_input = 1 if fp8 else number
    if engine:
        norms = 2 * residual * (number + matrix_input)
    elif model.normalization == "RMSNorm":
        # torch's works in fp32 and keeps its input and the normalised values in it
        norms = 2 * residual * (2 * FP32 + number)
    else:
        norms = 2 * residual * 2 * number
    projected = sizes.query + 2 * sizes.key  # values are a part of it, and keep it whole
    keys = sizes.key
    if sizes.context > 1 and not engine:
        # local layers gather keys and values of the whole sequence
        projected, keys = 0.0, 2 * sizes.key * sizes.context
    attention = tokens * ((2 * sizes.query + keys + projected) * number + sizes.query / sizes.head * FP32)
    if fp8:
        attention += tokens * sizes.query  # the output projection's input, beside attention's own output
    if model.qk_layernorm:
        query_copies, key_copies = (number, number) if engine else (2 * FP32, FP32 if number == FP32 else 2 * FP32)
        attention += tokens * (sizes.query * query_copies + sizes.key * key_copies)
    if sizes.context > 1 and not engine and model.recompute_granularity != "selective":
        attention += sizes.sequence / sizes.context * sizes.sequence  # the mask, one byte an entry
    rotary = 4 * sizes.sequence / sizes.context * sizes.head * number  # cosines and sines, for queries and for keys
    inner = sizes.ffn * tokens
    if engine:
        mlp = inner * (sizes.gate * number + matrix_input)
    elif sizes.gate == 2:
        mlp = inner * 5 * number  # both halves, the activated one, the other's copy, their product
    else:
        mlp = inner * 2 * number
    return dict(norms=norms, attention=attention, rotary=rotary, mlp=mlp)


def _workspace(sizes: Sizes, stage: Stage, number: int, activations: float) -> float:
    """What comes and goes while a layer or the loss runs backwards, and what CUDA itself takes."""
    gathered = sizes.tokens * sizes.hidden * number  # a matrix's input, whole again under sequence parallelism
    gradients = sizes.tokens * (sizes.gate + 1) * sizes.ffn * number
    loss = sizes.tokens * sizes.vocab * number if stage.last else 0.0
    return CONTEXT + max(2 * gathered + gradients, loss) + FRAGMENTATION * activations
