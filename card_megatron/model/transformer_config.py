"""Our configuration, in Megatron's terms."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.transformer import TransformerConfig

from card_megatron.config.derived import GATED_ACTIVATIONS, fuses_activation, pipeline_layout
from card_megatron.config.errors import ConfigError
from card_megatron.config.precision import Precision, resolve_precision
from card_megatron.config.schema import RunConfig

ACTIVATIONS = {"swiglu": F.silu, "geglu": F.gelu, "gelu": F.gelu, "squared_relu": squared_relu}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_transformer_config(config: RunConfig) -> TransformerConfig:
    """Megatron's own checks run here too: call it before any process group exists."""
    _refuse_unknown(config.model.transformer)
    fields = _from_run(config) | config.model.transformer
    try:
        return TransformerConfig(**fields)
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(f"Megatron-Core refuses this model: {error}") from error


def _from_run(config: RunConfig) -> dict[str, Any]:
    model, parallel = config.model, config.parallel
    precision = resolve_precision(config.precision)
    dtype = DTYPES[precision.params_dtype]
    interleaved = parallel.virtual_pipeline_model_parallel_size is not None
    cuda = torch.cuda.is_available()
    return dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups or model.num_attention_heads,
        kv_channels=model.kv_channels,
        normalization=model.normalization,
        layernorm_epsilon=model.layernorm_epsilon,
        gated_linear_unit=model.activation in GATED_ACTIVATIONS,
        activation_func=ACTIVATIONS[model.activation],
        qk_layernorm=model.qk_layernorm,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_method_std=model.init_method_std,
        # also with init=keyed, which overwrites the weights: only Megatron's own initialisation marks them as
        # tensor-parallel, and without the marks the gradient norm is silently wrong
        perform_initialization=True,
        num_moe_experts=model.num_moe_experts,
        recompute_granularity=model.recompute_granularity,
        recompute_method=model.recompute_method,
        recompute_num_layers=model.recompute_num_layers,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        pipeline_model_parallel_layout=pipeline_layout(model, parallel),
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        tp_comm_overlap=parallel.tp_comm_overlap,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        **_fp8_fields(precision),
        # weights go into the loss sum and the count beside it: divided once, over the global batch
        calculate_per_token_loss=True,
        # batched p2p with an interleaved pipeline gives wrong losses in 0.16.1
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # gloo still reads an output that this would free
        deallocate_pipeline_outputs=cuda,
        # needs NVIDIA's apex with local layers; Transformer Engine brings its own
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=cuda,
        bias_dropout_fusion=cuda,
        bias_activation_fusion=fuses_activation(model, cuda=cuda),
        persist_layer_norm=False,
        deterministic_mode=config.train.deterministic,
    )


def _fp8_fields(precision: Precision) -> dict[str, Any]:
    """Transformer Engine's FP8; an emulation is our own modules' doing, and Megatron must know nothing of it."""
    if not precision.hardware_fp8:
        return {}
    return dict(
        fp8=precision.fp8_format,
        fp8_recipe=precision.fp8_recipe,
        fp8_param=precision.fp8_param_gather,
        fp8_amax_history_len=precision.fp8_amax_history_len,
        fp8_amax_compute_algo=precision.fp8_amax_compute_algo,
        first_last_layers_bf16=precision.first_last_layers_bf16,
        num_layers_at_start_in_bf16=precision.num_layers_at_start_in_bf16,
        num_layers_at_end_in_bf16=precision.num_layers_at_end_in_bf16,
    )


def _refuse_unknown(fields: dict[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(TransformerConfig)]
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"model.transformer.{name} is no field of Megatron's TransformerConfig{hint}")
