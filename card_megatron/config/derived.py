"""Numbers that follow from a configuration: pure arithmetic, so that they are known before anything runs."""

from __future__ import annotations

import math
import re

from card_megatron.config.schema import ModelConfig, ObjectiveConfig, ParallelConfig, RunConfig, TrainConfig

GATED_ACTIVATIONS = ("swiglu", "geglu")


def padded_vocab_size(model: ModelConfig) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple that does not depend on the layout."""
    assert model.vocab_size is not None, "vocab_size is resolved from the tokenizer before it is padded"
    multiple = model.make_vocab_size_divisible_by
    return math.ceil(model.vocab_size / multiple) * multiple


def model_parallel_size(parallel: ParallelConfig) -> int:
    """Ranks that together hold one replica of the model and one sequence."""
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """Replicas that read different samples."""
    return world_size // model_parallel_size(parallel)


def pipeline_chunks(parallel: ParallelConfig) -> int:
    """Pieces that the layers are cut into: pipeline ranks times virtual stages."""
    return parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)


def pipeline_layout(model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """Megatron's layout string of an uneven pipeline, or None where the layers divide evenly (its default).

    The stages that also hold the embedding or the loss are the first to be left one layer short.
    """
    chunks = pipeline_chunks(parallel)
    if parallel.pipeline_model_parallel_layout is not None:
        return parallel.pipeline_model_parallel_layout
    if model.num_layers % chunks == 0:
        return None
    short, extra = divmod(model.num_layers, chunks)
    middle_first = [*range(1, chunks - 1), 0, chunks - 1]
    longer = set(middle_first[:extra])
    stages = ["t" * (short + (index in longer)) for index in range(chunks)]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    return "|".join(stages)


def unrolled_layout(layout: str) -> str:
    """A layout string with its repetitions written out: 'Et*2|tL' is 'Ett|tL'."""
    unrolled = re.sub(r"\(([^)]+)\)\*(\d+)", lambda m: m[1] * int(m[2]), layout.replace(",", ""))
    return re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), unrolled)


def fuses_activation(model: ModelConfig, *, cuda: bool) -> bool:
    """Megatron fuses gated activations, and gelu where it has a bias to fuse."""
    given = model.transformer.get("bias_activation_fusion")
    return cuda and (model.activation in GATED_ACTIVATIONS or _fusable_gelu(model)) if given is None else bool(given)


def _fusable_gelu(model: ModelConfig) -> bool:
    return model.activation == "gelu" and model.add_bias_linear


def batch_size_at(train: TrainConfig, consumed_samples: int) -> int:
    """Global batch size of the step that starts after `consumed_samples`: Megatron's ramp, or constant."""
    if train.rampup_batch_size is None:
        return train.global_batch_size
    start, increment, ramp_samples = train.rampup_batch_size
    increments = (train.global_batch_size - start) // increment
    if increments == 0 or consumed_samples > ramp_samples:
        return train.global_batch_size
    return start + int(consumed_samples / (ramp_samples / increments)) * increment


def total_samples(config: RunConfig) -> int:
    """Samples that the run consumes: whole steps, at least as many tokens as were asked for."""
    train = config.train
    if train.train_iters is not None:
        ramped_steps, consumed = 0, 0
        while ramped_steps < train.train_iters and batch_size_at(train, consumed) < train.global_batch_size:
            consumed += batch_size_at(train, consumed)
            ramped_steps += 1
        return consumed + (train.train_iters - ramped_steps) * train.global_batch_size
    assert train.train_tokens is not None, "check() demands train_iters or train_tokens"
    wanted, consumed = math.ceil(train.train_tokens / config.data.sequence_length), 0
    while consumed < wanted and batch_size_at(train, consumed) < train.global_batch_size:
        consumed += batch_size_at(train, consumed)
    return consumed + math.ceil(max(0, wanted - consumed) / train.global_batch_size) * train.global_batch_size


def total_steps(config: RunConfig) -> int:
    """Optimizer steps of the whole run."""
    steps, consumed, end = 0, 0, total_samples(config)
    while consumed < end and batch_size_at(config.train, consumed) < config.train.global_batch_size:
        consumed += batch_size_at(config.train, consumed)
        steps += 1
    return steps + math.ceil((end - consumed) / config.train.global_batch_size)


def parameter_count(model: ModelConfig) -> int:
    """All parameters of the dense model, vocabulary padding included."""
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    head = model.kv_channels or hidden // model.num_attention_heads
    queries = model.num_attention_heads * head
    keys = (model.num_query_groups or model.num_attention_heads) * head
    gate = 2 if model.activation in GATED_ACTIVATIONS else 1
    norm = hidden * (2 if model.normalization == "LayerNorm" else 1)

    attention = hidden * (queries + 2 * keys) + queries * hidden
    mlp = hidden * ffn * gate + ffn * hidden
    layer = attention + mlp * (model.num_moe_experts or 1) + 2 * norm
    if model.num_moe_experts:
        layer += hidden * model.num_moe_experts  # the router
    if model.add_bias_linear:
        layer += queries + 2 * keys + hidden + (ffn * gate + hidden) * (model.num_moe_experts or 1)
    elif model.add_qkv_bias:
        layer += queries + 2 * keys
    if model.qk_layernorm:
        layer += 2 * head * (2 if model.normalization == "LayerNorm" else 1)

    tables = 1 if model.share_embeddings_and_output_weights else 2
    return model.num_layers * layer + norm + tables * padded_vocab_size(model) * hidden


def flops_per_token(model: ModelConfig, sequence_length: int, objective: ObjectiveConfig | None = None) -> float:
    """Forward and backward FLOPs of one token of text: 6 per multiplied weight, 12 per pair that attention scores.

    Only pairs that the objective's attention allows count: half the square for a causal one, which None is.
    """
    assert model.num_moe_experts is None, "an expert model uses only some of its weights for a token"
    head = model.kv_channels or model.hidden_size // model.num_attention_heads
    embedding = padded_vocab_size(model) * model.hidden_size  # as the output layer: a look-up multiplies nothing
    tables = 1 if model.share_embeddings_and_output_weights else 2
    layers = parameter_count(model) - tables * embedding
    copies, pairs = 1, sequence_length / 2
    if objective is not None and objective.name == "mdlm":
        pairs = sequence_length
    elif objective is not None and objective.name == "bd3lm":
        # a block sees on average (S - K) / 2 clean tokens before it and K of its own: once noisy, once clean
        copies, pairs = 2, sequence_length + objective.block_size
    attention = 12 * model.num_layers * model.num_attention_heads * head * pairs
    return 6.0 * (copies * layers + embedding) + attention
