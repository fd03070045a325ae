"""What a precision cannot be: fields that contradict each other, and sizes that FP8 kernels do not take.

A part of check() in checks.py; what a machine lacks for it is said in machine_checks.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from card_megatron.config.layout_checks import nearest_multiples
from card_megatron.config.precision import EMULATED, FP8, Precision, resolve_precision
from card_megatron.config.schema import RunConfig

FP8_FIELDS = (
    *("params_dtype", "fp8_format", "fp8_recipe", "fp8_param_gather", "fp8_amax_history_len", "fp8_amax_compute_algo"),
    *("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
)
MULTIPLES = {"tensorwise": (8, 16), "delayed": (8, 16), "blockwise": (128, 128), "mxfp8": (32, 32)}
"""Of what a rank's tokens and widths must be multiples, by recipe: Transformer Engine's own rules."""


def precision_problems(config: RunConfig) -> Iterator[str]:
    """Rules of number formats that the run breaks on any machine."""
    given, precision = config.precision, resolve_precision(config.precision)
    if given.grad_reduce_in_fp32 is False and precision.params_dtype == "fp32":
        yield "precision.grad_reduce_in_fp32=false does nothing with fp32 weights, whose gradients are fp32; remove it"
    fields = config.model.transformer
    if fields.get("fp8_wgrad") is False and not (precision.hardware_fp8 and precision.fp8_recipe == "delayed"):
        yield "model.transformer.fp8_wgrad=false does nothing but with delayed scaling; remove it, or take fp8_delayed"
    for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
        if fields.get(name) and not precision.hardware_fp8:
            yield f"model.transformer.{name}=true does nothing without FP8; remove it, or take an FP8 preset"
    if given.preset not in FP8:
        for name in FP8_FIELDS:
            if getattr(given, name) is not None:
                yield (
                    f"precision.{name}={getattr(given, name)} does nothing with precision.preset={given.preset}; "
                    "remove it, or take an FP8 preset such as fp8_tensorwise"
                )
        if given.emulate:
            yield (
                f"precision.emulate=true has no FP8 to emulate with precision.preset={given.preset}; "
                "set precision.preset=fp8_tensorwise or fp8_blockwise"
            )
        return
    yield from _recipe(config, precision)
    yield from _layers_in_bf16(config, precision)
    yield from _emulation(config, precision) if precision.emulate else _kernels(config, precision)


def _recipe(config: RunConfig, precision: Precision) -> Iterator[str]:
    given = config.precision
    if precision.fp8_recipe != "delayed":
        for name in ("fp8_amax_history_len", "fp8_amax_compute_algo"):
            if getattr(given, name) is not None:
                yield (
                    f"precision.{name}={getattr(given, name)} does nothing with the recipe {precision.fp8_recipe}, "
                    "whose scales have no history; remove it, or take fp8_delayed"
                )
    elif precision.fp8_amax_history_len < 1:
        yield f"precision.fp8_amax_history_len={precision.fp8_amax_history_len} must be at least 1; 1024 is usual"
    if precision.fp8_param_gather and config.checkpoint.init_from is not None:
        yield (
            f"checkpoint.init_from={config.checkpoint.init_from} with precision.fp8_param_gather=true would start from "
            "weights rounded to FP8; set precision.fp8_param_gather=false"
        )
    if precision.fp8_recipe == "mxfp8" and precision.fp8_param_gather:
        yield (
            "precision.fp8_param_gather=true with mxfp8 needs the gradient buffer for the gathering of weights, and a "
            "training loop that copies them there; leave it out"
        )


def _layers_in_bf16(config: RunConfig, precision: Precision) -> Iterator[str]:
    given, layers = config.precision, config.model.num_layers
    first, last = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    if precision.first_last_layers_bf16 and precision.fp8_recipe == "delayed":
        yield (
            "precision.first_last_layers_bf16=true is not possible with delayed scaling, which reduces the amax of all "
            "layers at once; leave it out, or take fp8_tensorwise"
        )
    if not precision.first_last_layers_bf16:
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if getattr(given, name):
                yield (
                    f"precision.{name}={getattr(given, name)} does nothing with first_last_layers_bf16=false; "
                    "remove one of them"
                )
        return
    a_stage = layers // config.parallel.pipeline_model_parallel_size
    if min(first, last) < 0 or max(first, last) > a_stage:
        yield (
            f"precision.num_layers_at_start_in_bf16={first} and num_layers_at_end_in_bf16={last} must lie between 0 "
            f"and the {a_stage} layers of a pipeline stage"
        )
    elif first + last >= layers:
        yield (
            f"{first} layers at the start and {last} at the end in bf16 leave none of model.num_layers={layers} in "
            "FP8; set precision.first_last_layers_bf16=false"
        )


def _emulation(config: RunConfig, precision: Precision) -> Iterator[str]:
    if precision.fp8_recipe not in EMULATED:
        yield (
            f"precision.emulate=true knows the recipes {' and '.join(EMULATED)}, not {precision.fp8_recipe}; "
            "take fp8_tensorwise or fp8_blockwise"
        )
    if precision.fp8_param_gather:
        yield "precision.fp8_param_gather=true stores FP8 numbers, which an emulation does not have; leave it out"
    if config.model.spec == "te":
        yield "precision.emulate=true is of local layers: use model.spec=local or auto"
    if config.model.num_moe_experts is not None:
        yield "precision.emulate=true does not know experts; use a dense model"


def _kernels(config: RunConfig, precision: Precision) -> Iterator[str]:
    """Transformer Engine's layers and the sizes that they take, per rank."""
    model, parallel = config.model, config.parallel
    if model.spec == "local":
        yield (
            f"precision.preset={config.precision.preset} needs Transformer Engine's layers, and model.spec=local would "
            "train in bf16 without a word; use model.spec=auto, or precision.emulate=true"
        )
    if precision.params_dtype == "fp32":
        yield "precision.params_dtype=fp32 is for precision.emulate=true; FP8 kernels have bf16 around them: remove it"
    assert precision.fp8_recipe is not None
    of_tokens, of_widths = MULTIPLES[precision.fp8_recipe]
    tp, recipe = parallel.tensor_model_parallel_size, precision.fp8_recipe
    if model.hidden_size % of_widths:
        yield _size("model.hidden_size", model.hidden_size, 1, of_widths, recipe)
    if (model.ffn_hidden_size // tp) % of_widths:
        yield _size("model.ffn_hidden_size", model.ffn_hidden_size, tp, of_widths, recipe)
    head = model.kv_channels or model.hidden_size // model.num_attention_heads
    heads, groups = model.num_attention_heads, model.num_query_groups or model.num_attention_heads
    queries, all_three = heads, heads + 2 * groups  # what the matrices after and before attention have on one side
    of_heads = math.lcm(*(tp * of_widths // math.gcd(count, tp * of_widths) for count in (queries, all_three)))
    if head % of_heads:
        yield (
            f"{heads} heads and {groups} key/value groups of {head} give each of {tp} tensor-parallel ranks "
            f"{head * queries / tp:g} columns of queries and {head * all_three / tp:g} of queries, keys and values; "
            f"FP8 ({recipe}) needs multiples of {of_widths}; try model.kv_channels={nearest_multiples(head, of_heads)},"
            " other numbers of heads and groups, or another parallel.tensor_model_parallel_size"
        )
    row = config.data.sequence_length // parallel.context_parallel_size // (tp if parallel.sequence_parallel else 1)
    if row * config.train.micro_batch_size % of_tokens:
        legal = nearest_multiples(config.train.micro_batch_size, of_tokens // math.gcd(row, of_tokens))
        yield (
            f"train.micro_batch_size={config.train.micro_batch_size} of {row} tokens a rank is not a multiple of the "
            f"{of_tokens} that FP8 ({recipe}) needs; try {legal}, or another "
            "data.sequence_length"
        )


def _size(name: str, value: int, parts: int, multiple: int, recipe: str) -> str:
    return (
        f"{name}={value} is {value // parts} on each of {parts} tensor-parallel ranks, not a multiple of the "
        f"{multiple} that FP8 ({recipe}) needs; try {nearest_multiples(value, multiple * parts)}"
    )
