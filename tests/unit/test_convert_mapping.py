"""The table of weights, by name and by shape, against Megatron's own model and transformers' own classes."""

from __future__ import annotations

import pytest
import torch

from card_megatron.config.errors import CheckpointError
from card_megatron.config.schema import ModelConfig
from card_megatron.convert import mapping
from card_megatron.convert.hf_config import architecture_of, from_hf_config, to_hf_config
from card_megatron.convert.mapping import Sizes, weights_of
from tests.convert import MODELS, megatron_model, transformers_model


def shapes_of_table(model: ModelConfig, side: str) -> dict[str, tuple[int, ...]]:
    if side == "megatron":
        return {weight.megatron: weight.megatron_shape for weight in weights_of(model)}
    return {
        name: shape for weight in weights_of(model) for name, shape in zip(weight.hf, weight.hf_shapes, strict=True)
    }


@pytest.mark.parametrize("name", MODELS)
def test_megatrons_side_is_megatrons_own_model(one_rank, name):
    """Names and shapes come from the sharded state dict: what a checkpoint holds."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    model = MODELS[name]
    sharded = megatron_model(model).sharded_state_dict(metadata={"non_homogeneous_layers": True})
    theirs = {
        value.key: tuple(value.data.shape)
        for value in nested_values(sharded)
        if isinstance(value, (ShardedTensor, ShardedTensorFactory))
    }
    assert shapes_of_table(model, "megatron") == theirs


@pytest.mark.parametrize("name", MODELS)
def test_the_other_side_is_transformers_own_class(name):
    model = MODELS[name]
    theirs = {key: tuple(tensor.shape) for key, tensor in transformers_model(model).state_dict().items()}
    if model.share_embeddings_and_output_weights:
        assert theirs.pop("lm_head.weight") == theirs["model.embed_tokens.weight"]
    assert shapes_of_table(model, "hf") == theirs


@pytest.mark.parametrize("name", MODELS)
def test_splitting_and_joining_are_inverse(name):
    model = MODELS[name]
    sizes = Sizes.of(model)
    for weight in weights_of(model):
        tensor = torch.randn(weight.megatron_shape)
        parts = weight.transform.split(tensor, sizes)
        assert tuple(tuple(part.shape) for part in parts) == weight.hf_shapes
        back = weight.transform.join(parts, sizes)
        rows = sizes.vocab if isinstance(weight.transform, mapping.Vocabulary) else len(tensor)
        assert torch.equal(back[:rows], tensor[:rows])
        assert not back[rows:].any(), "padding rows come back as zeros"


def test_heads_of_a_group_stand_together():
    """By definition: row r of group g's j-th query head is row ((g * (Q/G + 2)) + j) * head + r of Megatron's."""
    sizes = Sizes(hidden=1, ffn=1, head=3, queries=6, groups=2, vocab=1, padded_vocab=1)
    tensor = torch.arange(10 * 3).float()[:, None]
    query, key, value = mapping.QueryKeyValue(mapping.hidden).split(tensor, sizes)
    for group in range(2):
        base = group * 5
        for j in range(3):
            for row in range(3):
                assert query[(group * 3 + j) * 3 + row, 0] == (base + j) * 3 + row
        assert key[group * 3, 0] == (base + 3) * 3 and value[group * 3, 0] == (base + 4) * 3


def test_the_table_itself():
    model = MODELS["biases everywhere"]
    table = {weight.megatron: weight.hf for weight in weights_of(model)}
    assert table["decoder.layers.1.self_attention.linear_qkv.bias"] == (
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.1.self_attn.v_proj.bias",
    )
    assert table["decoder.layers.0.mlp.linear_fc1.weight"] == (
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    )
    assert next(iter(table)) == "embedding.word_embeddings.weight"
    everything = [rule.megatron for rule in mapping.TABLE]
    assert len(set(everything)) == len(everything) - 1, "only the query/key/value bias has two rules"


def test_missing_and_unknown_names_are_named():
    with pytest.raises(CheckpointError, match=r"missing: a\n.*unknown: c"):
        mapping.refuse_misfits(["a", "b"], ["b", "c"], "somewhere")


def test_norms_that_are_modules_have_the_fused_name():
    name = "decoder.layers.3.pre_mlp_layernorm.weight"
    assert mapping.canonical(name) == "decoder.layers.3.mlp.linear_fc1.layer_norm_weight"
    assert mapping.canonical("decoder.layers.input_layernorm.weight") in {
        weight.without_layer() for weight in weights_of(MODELS["plain"])
    }


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"num_moe_experts": 4}, "num_moe_experts=4"),
        ({"normalization": "LayerNorm"}, "normalization=LayerNorm"),
        ({"activation": "gelu"}, "activation=gelu"),
        ({"rotary_percent": 0.5}, "rotary_percent=0.5"),
        ({"qk_layernorm": True, "add_bias_linear": True}, "add_bias_linear"),
        ({"qk_layernorm": True, "add_qkv_bias": True}, "add_qkv_bias"),
        ({"transformer": {"rotary_interleaved": True}}, "model.transformer.rotary_interleaved=True"),
    ],
)
def test_what_no_stock_class_computes_is_refused(fields, fault):
    with pytest.raises(CheckpointError, match=fault):
        architecture_of(ModelConfig(vocab_size=100, **fields))


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_survives_the_way_there_and_back(name):
    model = MODELS[name]
    back = from_hf_config(to_hf_config(model, dtype="fp32", eos=2, mask=4))
    same = [field for field in vars(model) if field not in ("make_vocab_size_divisible_by", "kv_channels")]
    groups = model.num_query_groups or model.num_attention_heads
    assert {field: getattr(back, field) for field in same} == {
        **{field: getattr(model, field) for field in same},
        "num_query_groups": groups,
    }


@pytest.mark.parametrize("name", MODELS)
def test_transformers_own_configuration_is_read(name):
    """What save_pretrained writes has other keys than ours (rope_parameters)."""
    model = MODELS[name]
    saved = transformers_model(model).config.to_dict()
    assert from_hf_config(saved).rotary_base == model.rotary_base
    assert from_hf_config(saved).rope_scaling == model.rope_scaling


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*none of LlamaForCausalLM"),
        ({"hidden_act": "relu"}, "hidden_act=relu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type=yarn"),
        ({"rope_theta": 10000.5}, "rope_theta=10000.5"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"mlp_bias": True}, "mlp_bias=true with attention_bias=false"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
)
def test_what_megatron_would_compute_otherwise_is_refused(change, fault):
    config = to_hf_config(MODELS["plain"], dtype="fp32", eos=None, mask=None)
    with pytest.raises(ValueError, match=fault):
        from_hf_config(config | change)
