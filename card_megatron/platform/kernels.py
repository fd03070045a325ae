"""Which implementation runs where Megatron-Core has several: resolved once, printed at the start, kept with the run.

Megatron's order is Transformer Engine, then apex, then torch, each chosen by what can be imported. This is the same
choice from what was found, so that it can be read, and tested for machines that are not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from card_megatron.config.derived import fuses_activation
from card_megatron.config.precision import resolve_precision
from card_megatron.config.schema import RunConfig
from card_megatron.platform.capabilities import Capabilities

ENGINE, APEX, TORCH = "TE", "apex", "torch"
BLOCK_ATTENTION = ("bd3lm",)
"""Objectives whose core attention is model/block_attention.py's, whatever the other layers are."""
OPTIONS = {
    "overlap_grad_reduce": "gradients with backward",
    "overlap_param_gather": "weights with forward",
    "tp_comm_overlap": "tensor parallelism with products",
}


def resolve_kernels(config: RunConfig, machine: Capabilities) -> dict[str, str]:
    """What does each part of a step, by part."""
    engine_here = machine.cuda and machine.transformer_engine is not None
    precision, fields = resolve_precision(config.precision), config.model.transformer
    engine = config.model.spec == "te" or (config.model.spec == "auto" and engine_here and not precision.emulate)
    overlaps = [text for name, text in OPTIONS.items() if getattr(config.parallel, name)]
    return {
        "linear": ENGINE if engine else TORCH,
        "fp8": _fp8(precision) if precision.fp8 else "none",
        "norm": ENGINE if engine else TORCH,
        "attention": _attention(config, machine, engine=engine),
        "softmax": "inside attention",
        "activation": "fused" if fuses_activation(config.model, cuda=machine.cuda) else TORCH,
        "Adam": ENGINE if engine_here else APEX if machine.cuda and machine.apex else "torch fused",
        "gradient norm": ENGINE if engine_here else APEX if machine.cuda and machine.apex else TORCH,
        "cross entropy": _cross_entropy(fields),
        "wgrad fusion": (ENGINE if engine else APEX) if fields.get("gradient_accumulation_fusion") else "none",
        "overlap": ", ".join(overlaps) or "none",
        "CUDA graphs": fields.get("cuda_graph_impl", "none"),
    }


def kernels_line(kernels: Mapping[str, str]) -> str:
    """All of them in one line."""
    return "kernels: " + ", ".join(f"{part}: {choice}" for part, choice in kernels.items())


def _fp8(precision: Any) -> str:
    how = "emulated" if precision.emulate else ENGINE
    return f"{how} {precision.fp8_recipe} {precision.fp8_format}"


def _attention(config: RunConfig, machine: Capabilities, *, engine: bool) -> str:
    """Transformer Engine chooses at the first call: what it may choose from."""
    if config.objective.name in BLOCK_ATTENTION and machine.cuda:
        return "torch FlexAttention"
    if config.objective.name in BLOCK_ATTENTION or not engine:
        return "torch SDPA"
    chosen = str(config.model.transformer.get("attention_backend", "auto"))
    if chosen != "auto":
        return f"{ENGINE} {chosen}"
    return f"{ENGINE} fused or flash" if machine.flash_attention else f"{ENGINE} fused"


def _cross_entropy(fields: Mapping[str, Any]) -> str:
    if not fields.get("cross_entropy_loss_fusion"):
        return "Megatron unfused"
    return ENGINE if fields.get("cross_entropy_fusion_impl") == "te" else "Megatron fused"
