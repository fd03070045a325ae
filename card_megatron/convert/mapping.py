"""Which weight of Megatron's GPTModel is which of a Llama-family model: one table, pure.

Names on the left are those of distributed checkpoints, the same for every layout, for Transformer Engine's layers and
for local ones. `{}` stands for the layer's number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from card_megatron.config.derived import GATED_ACTIVATIONS, padded_vocab_size
from card_megatron.config.errors import CheckpointError
from card_megatron.config.schema import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """The numbers that shapes are made of."""

    hidden: int
    ffn: int
    head: int
    queries: int
    """Query heads."""
    groups: int
    """Key/value heads."""
    vocab: int
    """True vocabulary: rows of the inference format."""
    padded_vocab: int
    """Rows of the checkpoint."""

    @classmethod
    def of(cls, model: ModelConfig) -> Sizes:
        assert model.vocab_size is not None, "a saved configuration has its vocabulary"
        return cls(
            hidden=model.hidden_size,
            ffn=model.ffn_hidden_size,
            head=model.kv_channels or model.hidden_size // model.num_attention_heads,
            queries=model.num_attention_heads,
            groups=model.num_query_groups or model.num_attention_heads,
            vocab=model.vocab_size,
            padded_vocab=padded_vocab_size(model),
        )


# ---------------------------------------------------------------- how one tensor becomes others


class Same:
    """The same tensor under another name."""

    def __init__(self, shape: Callable[[Sizes], Shape]):
        self.shape = shape

    def megatron_shape(self, sizes: Sizes) -> Shape:
        return self.shape(sizes)

    def hf_shapes(self, sizes: Sizes) -> list[Shape]:
        return [self.shape(sizes)]

    def split(self, tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        return [tensor]

    def join(self, parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
        return parts[0]


class Vocabulary(Same):
    """A row a token: Megatron's has rows that only pad it."""

    def __init__(self) -> None:
        super().__init__(lambda sizes: (sizes.padded_vocab, sizes.hidden))

    def hf_shapes(self, sizes: Sizes) -> list[Shape]:
        return [(sizes.vocab, sizes.hidden)]

    def split(self, tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        return [tensor[: sizes.vocab]]

    def join(self, parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
        padding = parts[0].new_zeros(sizes.padded_vocab - sizes.vocab, sizes.hidden)
        return torch.cat([parts[0], padding])


class Gated:
    """The two halves of a gated MLP's input projection: the activated one, then the one that it multiplies."""

    def __init__(self, *rest: Callable[[Sizes], int]):
        self.rest = rest

    def megatron_shape(self, sizes: Sizes) -> Shape:
        return (2 * sizes.ffn, *(size(sizes) for size in self.rest))

    def hf_shapes(self, sizes: Sizes) -> list[Shape]:
        return [(sizes.ffn, *(size(sizes) for size in self.rest))] * 2

    def split(self, tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        return list(tensor.chunk(2))

    def join(self, parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
        return torch.cat(list(parts))


class QueryKeyValue:
    """Megatron keeps the heads of a query group together: its queries, its key, its value; then the next group's."""

    def __init__(self, *rest: Callable[[Sizes], int]):
        self.rest = rest

    def megatron_shape(self, sizes: Sizes) -> Shape:
        return ((sizes.queries + 2 * sizes.groups) * sizes.head, *(size(sizes) for size in self.rest))

    def hf_shapes(self, sizes: Sizes) -> list[Shape]:
        rest = [size(sizes) for size in self.rest]
        return [(heads * sizes.head, *rest) for heads in (sizes.queries, sizes.groups, sizes.groups)]

    def split(self, tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        rest, queries = tensor.shape[1:], sizes.queries // sizes.groups
        grouped = tensor.reshape(sizes.groups, queries + 2, sizes.head, *rest)
        return [part.reshape(-1, *rest) for part in grouped.split([queries, 1, 1], dim=1)]

    def join(self, parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
        rest = parts[0].shape[1:]
        grouped = [part.reshape(sizes.groups, -1, sizes.head, *rest) for part in parts]
        return torch.cat(grouped, dim=1).reshape(-1, *rest)


class QueryKeyValueBias(QueryKeyValue):
    """The bias of queries, keys and values alone. Llama has a fourth one, of attention's output: zero here."""

    def hf_shapes(self, sizes: Sizes) -> list[Shape]:
        return [*super().hf_shapes(sizes), (sizes.hidden,)]

    def split(self, tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        return [*super().split(tensor, sizes), tensor.new_zeros(sizes.hidden)]

    def join(self, parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
        if parts[3].any():
            raise CheckpointError("a bias of attention's output without biases in the MLP: Megatron has no such model")
        return super().join(parts[:3], sizes)


Transform = Same | Gated | QueryKeyValue


# ---------------------------------------------------------------- the table


def hidden(sizes: Sizes) -> int:
    return sizes.hidden


NORM = Same(lambda sizes: (sizes.hidden,))
HEAD_NORM = Same(lambda sizes: (sizes.head,))


def _always(model: ModelConfig) -> bool:
    return True


@dataclass(frozen=True)
class Rule:
    """One kind of weight."""

    megatron: str
    hf: tuple[str, ...]
    transform: Transform
    when: Callable[[ModelConfig], bool] = _always
    """Which models have it."""


def _biases(model: ModelConfig) -> bool:
    return model.add_bias_linear


def _qkv_bias_alone(model: ModelConfig) -> bool:
    return model.add_qkv_bias and not model.add_bias_linear


def _qk_norm(model: ModelConfig) -> bool:
    return model.qk_layernorm


def _untied(model: ModelConfig) -> bool:
    return not model.share_embeddings_and_output_weights


ATTENTION, MLP = "decoder.layers.{}.self_attention.", "decoder.layers.{}.mlp."
HF_ATTENTION, HF_MLP = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


def _names(prefix: str, modules: Iterable[str], suffix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{module}.{suffix}" for module in modules)


TABLE: tuple[Rule, ...] = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocabulary()),
    Rule(f"{ATTENTION}linear_qkv.layer_norm_weight", ("model.layers.{}.input_layernorm.weight",), NORM),
    Rule(f"{ATTENTION}linear_qkv.weight", _names(HF_ATTENTION, QKV, "weight"), QueryKeyValue(hidden)),
    Rule(f"{ATTENTION}linear_qkv.bias", _names(HF_ATTENTION, QKV, "bias"), QueryKeyValue(), _biases),
    Rule(
        f"{ATTENTION}linear_qkv.bias",
        _names(HF_ATTENTION, (*QKV, "o_proj"), "bias"),
        QueryKeyValueBias(),
        _qkv_bias_alone,
    ),
    Rule(f"{ATTENTION}q_layernorm.weight", (f"{HF_ATTENTION}q_norm.weight",), HEAD_NORM, _qk_norm),
    Rule(f"{ATTENTION}k_layernorm.weight", (f"{HF_ATTENTION}k_norm.weight",), HEAD_NORM, _qk_norm),
    Rule(
        f"{ATTENTION}linear_proj.weight",
        (f"{HF_ATTENTION}o_proj.weight",),
        Same(lambda sizes: (sizes.hidden, sizes.queries * sizes.head)),
    ),
    Rule(f"{ATTENTION}linear_proj.bias", (f"{HF_ATTENTION}o_proj.bias",), NORM, _biases),
    Rule(f"{MLP}linear_fc1.layer_norm_weight", ("model.layers.{}.post_attention_layernorm.weight",), NORM),
    Rule(f"{MLP}linear_fc1.weight", _names(HF_MLP, GATE_UP, "weight"), Gated(hidden)),
    Rule(f"{MLP}linear_fc1.bias", _names(HF_MLP, GATE_UP, "bias"), Gated(), _biases),
    Rule(
        f"{MLP}linear_fc2.weight",
        (f"{HF_MLP}down_proj.weight",),
        Same(lambda sizes: (sizes.hidden, sizes.ffn)),
    ),
    Rule(f"{MLP}linear_fc2.bias", (f"{HF_MLP}down_proj.bias",), NORM, _biases),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), NORM),
    Rule("output_layer.weight", ("lm_head.weight",), Vocabulary(), _untied),
)

ALIASES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Norms that are modules of their own, in checkpoints whose layers do not fuse them and say so."""


# ---------------------------------------------------------------- the table for one model


@dataclass(frozen=True)
class Weight:
    """One tensor of a checkpoint and the tensors that it is in the inference format."""

    megatron: str
    """With the layer's number where it belongs to one."""
    layer: int | None
    hf: tuple[str, ...]
    transform: Transform
    megatron_shape: Shape
    hf_shapes: tuple[Shape, ...]

    def without_layer(self) -> str:
        """The name under which Megatron stacks this weight of all layers into one tensor."""
        return self.megatron.replace(f".layers.{self.layer}.", ".layers.", 1)


def weights_of(model: ModelConfig) -> list[Weight]:
    """Every weight of a model, in the order of the forward pass."""
    sizes = Sizes.of(model)
    rules = [rule for rule in TABLE if rule.when(model)]
    first_layer = next(number for number, rule in enumerate(rules) if "{}" in rule.megatron)
    last_layer = max(number for number, rule in enumerate(rules) if "{}" in rule.megatron)
    ordered: list[tuple[Rule, int | None]] = [(rule, None) for rule in rules[:first_layer]]
    for layer in range(model.num_layers):
        ordered += [(rule, layer) for rule in rules[first_layer : last_layer + 1]]
    ordered += [(rule, None) for rule in rules[last_layer + 1 :]]
    return [
        Weight(
            megatron=rule.megatron.format(layer),
            layer=layer,
            hf=tuple(name.format(layer) for name in rule.hf),
            transform=rule.transform,
            megatron_shape=rule.transform.megatron_shape(sizes),
            hf_shapes=tuple(rule.transform.hf_shapes(sizes)),
        )
        for rule, layer in ordered
    ]


def canonical(name: str) -> str:
    """A checkpoint's name for a weight, as the table has it."""
    for theirs, ours in ALIASES.items():
        name = name.replace(theirs, ours)
    return name


def refuse_misfits(expected: Iterable[str], found: Iterable[str], where: str) -> None:
    """Raise with every name that is missing or that nothing knows."""
    expected, found = set(expected), set(found)
    problems = [
        *(f"missing: {name}" for name in sorted(expected - found)),
        *(f"unknown: {name}" for name in sorted(found - expected)),
    ]
    if problems:
        shown = problems[:20] + ([f"... and {len(problems) - 20} more"] if len(problems) > 20 else [])
        raise CheckpointError(
            f"{where} does not hold the weights of its own configuration:\n  - " + "\n  - ".join(shown)
        )


def refuse_inexpressible(model: ModelConfig) -> None:
    """Raise with everything about a model that no stock Llama-family class computes."""
    problems = []
    if model.num_moe_experts:
        problems.append(f"model.num_moe_experts={model.num_moe_experts}: experts have no place in a dense model")
    if model.normalization != "RMSNorm":
        problems.append(f"model.normalization={model.normalization}: Llama's norm is RMSNorm")
    if model.activation not in GATED_ACTIVATIONS:
        problems.append(f"model.activation={model.activation}: Llama's MLP is gated (swiglu, geglu)")
    if model.rotary_percent != 1.0:
        problems.append(f"model.rotary_percent={model.rotary_percent}: Llama rotates whole heads (1.0)")
    if model.qk_layernorm and model.add_bias_linear:
        problems.append("model.qk_layernorm and model.add_bias_linear: Qwen3, which has the norms, has no such biases")
    if model.qk_layernorm and model.add_qkv_bias:
        problems.append("model.qk_layernorm and model.add_qkv_bias: Qwen3, which has the norms, has no such bias")
    for name, value in model.transformer.items():
        if name not in HARMLESS_FIELDS:
            problems.append(f"model.transformer.{name}={value}: not known to leave the model's function as it is")
    if problems:
        raise CheckpointError(
            "this model has no equal among transformers' Llama and Qwen3:\n  - " + "\n  - ".join(problems)
        )


HARMLESS_FIELDS = {
    *("apply_rope_fusion", "attention_softmax_in_fp32", "bias_activation_fusion", "bias_dropout_fusion"),
    *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "deterministic_mode", "distribute_saved_activations"),
    *("embedding_init_method_std", "fp32_residual_connection", "fp8", "fp8_amax_compute_algo", "fp8_amax_history_len"),
    *("fp8_margin", "fp8_param", "fp8_recipe", "fp8_wgrad", "first_last_layers_bf16", "num_layers_at_start_in_bf16"),
    *("gradient_accumulation_fusion", "masked_softmax_fusion", "memory_efficient_layer_norm", "persist_layer_norm"),
    *("num_layers_at_end_in_bf16", "recompute_modules", "tp_comm_overlap", "use_cpu_initialization"),
}
"""Fields of TransformerConfig that change how a model is computed or trained, not what it computes."""
