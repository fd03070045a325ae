"""Transformer Engine's communicators for parallel.tp_comm_overlap, which Megatron-Core leaves to a training loop."""

from __future__ import annotations

from card_megatron.config.precision import resolve_precision
from card_megatron.config.schema import RunConfig


def join_userbuffers(config: RunConfig) -> None:
    """Make the buffers of one micro-batch's activations; Megatron's groups must be there. All ranks must call this."""
    from transformer_engine.pytorch.module.base import UserBufferQuantizationMode, initialize_ub

    parallel, precision = config.parallel, resolve_precision(config.precision)
    tokens = config.data.sequence_length * config.train.micro_batch_size // parallel.context_parallel_size
    modes = [UserBufferQuantizationMode.FP8 if precision.hardware_fp8 else UserBufferQuantizationMode.NONE]
    if precision.hardware_fp8 and precision.first_last_layers_bf16:
        modes.append(UserBufferQuantizationMode.NONE)  # layers in bf16 have buffers of their own
    initialize_ub(
        shape=[tokens, config.model.hidden_size],
        tp_size=parallel.tensor_model_parallel_size,
        quantization_modes=modes,
        bootstrap_backend="nccl",
    )
