"""Which modules a layer is made of: Transformer Engine's, or local ones that run anywhere."""

from __future__ import annotations

import copy

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from card_megatron.config.precision import Precision
from card_megatron.model.attention import TorchAttention
from card_megatron.model.block_attention import BlockDiffusionAttention
from card_megatron.model.fp8_emulation import emulate_fp8
from card_megatron.model.norm import Norm
from card_megatron.objectives import Attention


def uses_transformer_engine(spec: str, *, cuda: bool, transformer_engine: bool, emulate: bool = False) -> bool:
    """`auto` takes Transformer Engine wherever it can run, but for an emulation, which is of local layers."""
    return spec == "te" or (spec == "auto" and cuda and transformer_engine and not emulate)


def block_spec(
    config: TransformerConfig,
    precision: Precision,
    *,
    transformer_engine: bool,
    vp_stage: int | None,
    attention: Attention = "causal",
    block_size: int = 1,
):
    """The layers of one pipeline chunk. `attention` is what the objective declares; "block" has a `block_size`."""
    if transformer_engine:
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
        set_attention(layer, attention, block_size)
        return layer
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    specs = [local_layer_spec(config) for _ in layers]
    for layer, spec in zip(layers, specs, strict=True):
        set_attention(spec, attention, block_size)
        if precision.emulate and precision.in_fp8(layer, config.num_layers):
            emulate_fp8(spec, precision)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm)


def set_attention(layer: ModuleSpec, attention: Attention, block_size: int) -> None:
    """Megatron's layers are causal; every core attention takes another kind of mask from the spec."""
    self_attention = layer.submodules.self_attention
    if attention == "full":
        self_attention.params = self_attention.params | {"attn_mask_type": AttnMaskType.no_mask}
    elif attention == "block":
        core = ModuleSpec(module=BlockDiffusionAttention, params={"block_size": block_size})
        self_attention.submodules.core_attention = core


def local_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Megatron's local layer with a norm that allows sequence parallelism and attention that allows context's."""
    spec = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            normalization=config.normalization,
        )
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = TorchAttention
    for name in ("q_layernorm", "k_layernorm"):
        if getattr(attention, name) is not IdentityOp:
            setattr(attention, name, Norm)
    return spec
