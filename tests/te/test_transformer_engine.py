"""Transformer Engine's layers without a GPU: built for every preset, named as they must be, exchanged with local ones.

Opt-in: `make test-te` builds an environment with CUDA torch and Transformer Engine. No kernel of it runs here; that is
what tests/gpu is for. A fixture answers as an H100 would, for as long as modules are built.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from card_megatron.config import RunConfig, load_config
from card_megatron.config.precision import FP8
from card_megatron.model import build_model, build_transformer_config, unwrap
from tests.configs import MOCK

pytestmark = [pytest.mark.te, pytest.mark.usefixtures("one_rank", "as_on_an_h100")]

SHAPE = [
    *(
        "--model.num_layers=3",
        "--model.hidden_size=128",
        "--model.ffn_hidden_size=256",
        "--model.num_attention_heads=4",
    ),
    *("--model.num_query_groups=2", "--model.qk_layernorm=true", "--model.share_embeddings_and_output_weights=false"),
]


@pytest.fixture
def as_on_an_h100(monkeypatch, one_rank) -> Iterator[None]:
    """What Transformer Engine asks of a GPU while it builds modules."""
    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0, name="H100", total_memory=80 << 30)
    answers = dict(
        is_available=lambda: True,
        get_device_capability=lambda *device: (9, 0),
        get_device_properties=lambda *device: properties,
        device=lambda *device: contextlib.nullcontext(),
    )
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    yield


def configured(*overrides: str) -> RunConfig:
    return load_config([*MOCK, *SHAPE, *overrides])[0]


def built(*overrides: str, seed: int = 1234):
    config = dataclasses.replace(configured(*overrides), seed=seed)
    return unwrap(build_model(config, build_transformer_config(config)))[0]


RECIPES = {
    "fp8_tensorwise": "float8_current_scaling",
    "fp8_blockwise": "float8_block_scaling",
    "fp8_delayed": "delayed",
    "mxfp8": "mxfp8",
}
"""What Transformer Engine's recipe says of itself."""
# keeping weights in FP8 needs a kernel to round them: that one is tests/gpu's
WITHOUT_KERNELS = "--precision.fp8_param_gather=false"


@pytest.mark.parametrize("preset", ["bf16", *FP8])
def test_every_preset_builds_transformer_engines_layers_in_bf16(preset):
    import transformer_engine.pytorch as te
    from megatron.core.fp8_utils import get_fp8_recipe

    options = ["--model.spec=te", f"--precision={preset}", *([WITHOUT_KERNELS] if preset in FP8 else [])]
    model = built(*options)
    layer = model.decoder.layers[1]
    assert isinstance(layer.self_attention.linear_qkv, te.LayerNormLinear)
    assert isinstance(layer.self_attention.linear_proj, te.Linear)
    assert isinstance(layer.mlp.linear_fc1, te.LayerNormLinear) and isinstance(layer.mlp.linear_fc2, te.Linear)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    if preset in FP8:
        recipe = get_fp8_recipe(model.config)
        assert getattr(recipe, RECIPES[preset])(), recipe
        assert str(recipe.fp8_format).endswith(FP8[preset]["fp8_format"].upper())
    if preset == "fp8_delayed":
        assert (recipe.amax_history_len, recipe.amax_compute_algo) == (1024, "max")


NAMES = {
    "embedding.word_embeddings.weight",
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.self_attention.q_layernorm.weight",
    "decoder.layers.0.self_attention.k_layernorm.weight",
    "decoder.layers.0.self_attention.linear_proj.weight",
    "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc2.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
}


def test_parameters_have_the_names_that_others_expect():
    names = {name for name, _ in built("--model.spec=te", "--precision=bf16").named_parameters()}
    assert {name for name in names if "layers.1." not in name and "layers.2." not in name} == NAMES


def checkpoint_names(model) -> dict[str, str]:
    """Key -> kind, of what a distributed checkpoint holds."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories

    shards = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    apply_factories(shards)
    return {value.key: type(value).__name__ for value in nested_values(shards) if hasattr(value, "key")}


@pytest.mark.parametrize("preset", ["bf16", "fp8_tensorwise", "fp8_delayed"])
def test_checkpoints_have_the_same_weights_under_the_same_names(preset):
    options = [f"--precision={preset}", *([WITHOUT_KERNELS] if preset in FP8 else [])]
    engine = checkpoint_names(built("--model.spec=te", *options))
    local = checkpoint_names(built("--model.spec=local", "--precision=bf16"))
    assert {key for key in engine if "_extra_state" not in key} == {key for key in local if "_extra_state" not in key}


def tensors(model) -> dict[str, torch.Tensor]:
    """Weights by the names of the local layers."""
    fused = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }
    found = {}
    for name, value in model.named_parameters():
        for theirs, ours in fused.items():
            name = name.replace(theirs, ours)
        found[name] = value.detach()
    return found


@pytest.mark.parametrize(("source", "target"), [("te", "local"), ("local", "te")])
def test_weights_go_from_one_to_the_other_bit_for_bit(source, target, tmp_path):
    """Through our own loading of checkpoints, from Megatron's own saving."""
    from megatron.core import dist_checkpointing

    from card_megatron.checkpoint.contents import load_weights

    saved = built(f"--model.spec={source}", "--precision=bf16", seed=1)
    with torch.no_grad():
        for parameter in saved.parameters():
            if parameter.dim() == 1:
                parameter.normal_()  # norms are ones: equal whatever happens to them
    loaded = built(f"--model.spec={target}", "--precision=bf16", seed=2)
    dist_checkpointing.save(saved.sharded_state_dict(metadata={"non_homogeneous_layers": True}), tmp_path)
    assert any(not torch.equal(a, tensors(saved)[name]) for name, a in tensors(loaded).items())
    load_weights([loaded], tmp_path, "")
    theirs = tensors(saved)
    assert theirs.keys() == tensors(loaded).keys()
    for name, value in tensors(loaded).items():
        assert torch.equal(value, theirs[name]), name


def test_the_emulation_rounds_as_transformer_engines_own_reference():
    from transformer_engine.pytorch.custom_recipes.quantization_current_scaling import CurrentScalingQuantizerRef

    from card_megatron.model.fp8_emulation import E4M3, E5M2, round_to_fp8

    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    for dtype in (E4M3, E5M2):
        theirs = CurrentScalingQuantizerRef(dtype=dtype, rowwise=True, columnwise=True).quantize(x)
        torch.testing.assert_close(round_to_fp8(x, dtype), theirs.data.float() * theirs.scale, rtol=2**-22, atol=0)
