"""Checkpoints of Megatron-LM: its arguments are read right, or refused; its weights are converted and compared."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from card_megatron import cli
from card_megatron.checkpoint.source import open_source
from card_megatron.config.errors import CheckpointError
from card_megatron.config.schema import ParallelConfig
from card_megatron.platform import Ranks, model_parallel
from tests.convert import MODELS, PLAIN, megatron_model, weights


def megatron_lm_checkpoint(
    root: Path, model_config=PLAIN, numbered: bool = False, **changes
) -> tuple[Path, dict[str, torch.Tensor]]:
    """What Megatron-LM's save_checkpoint writes for a GPT model, by the same calls of megatron.core."""
    from megatron.core import dist_checkpointing

    arguments = argparse.Namespace(
        **dict(
            num_layers=2,
            hidden_size=32,
            ffn_hidden_size=48,
            num_attention_heads=4,
            group_query_attention=False,
            num_query_groups=1,
            kv_channels=8,
            padded_vocab_size=128,
            vocab_size=None,
            max_position_embeddings=64,
            untie_embeddings_and_output_weights=False,
            normalization="RMSNorm",
            layernorm_epsilon=1e-6,
            swiglu=True,
            position_embedding_type="rope",
            rotary_base=10000,
            rotary_percent=1.0,
            rotary_interleaved=False,
            add_bias_linear=False,
            add_qkv_bias=False,
            qk_layernorm=False,
            num_moe_experts=None,
            seq_length=32,
        )
        | changes
    )
    (root / "iter_0000007").mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    with model_parallel(Ranks(), ParallelConfig()):
        model = megatron_model(model_config)
        metadata = {"non_homogeneous_layers": True} if numbered else None
        weights = model.sharded_state_dict(metadata=metadata)
        state = {"args": arguments, "checkpoint_version": 3.0, "iteration": 7, "model": weights}
        dist_checkpointing.save(state, str(root / "iter_0000007"))
    return root, dict(model.named_parameters())


def test_megatron_lms_checkpoints_are_read(tmp_path):
    root, params = megatron_lm_checkpoint(tmp_path / "theirs")
    cli.main(["convert", "to-hf", str(root), str(tmp_path / "out"), "--vocab-size=101"])
    ours = weights(tmp_path / "out")
    assert torch.equal(ours["model.embed_tokens.weight"], params["embedding.word_embeddings.weight"][:101])
    assert "mask_token_id" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("generation", ["0.16", "0.15"])
def test_megatron_lms_arguments_are_read_under_either_name(tmp_path, generation):
    """0.16 named its arguments after TransformerConfig's fields: what is misread here, no comparison can see."""
    root, _ = megatron_lm_checkpoint(tmp_path / "theirs")
    common = torch.load(root / "iter_0000007" / "common.pt", weights_only=False)
    if generation == "0.15":
        arguments = vars(common["args"])
        arguments["norm_epsilon"], arguments["num_experts"] = arguments.pop("layernorm_epsilon"), None
        del arguments["num_moe_experts"]
        torch.save(common, root / "iter_0000007" / "common.pt")
    model = open_source(root, 101).config.model
    assert (model.layernorm_epsilon, model.num_moe_experts, model.vocab_size) == (1e-6, None, 101)
    del common["args"].rotary_percent
    torch.save(common, root / "iter_0000007" / "common.pt")
    with pytest.raises(CheckpointError, match="no argument rotary_percent"):
        open_source(root, 101)


def test_layers_may_have_names_of_their_own(tmp_path):
    """As Megatron saves layers that are not alike: converted, and compared by Megatron's own loader."""
    model = MODELS["untied"]
    options = dict(group_query_attention=True, num_query_groups=2, untie_embeddings_and_output_weights=True)
    root, params = megatron_lm_checkpoint(tmp_path / "theirs", model, numbered=True, layernorm_epsilon=1e-5, **options)
    cli.main(["convert", "to-hf", str(root), str(tmp_path / "out"), "--vocab-size=100"])
    ours = weights(tmp_path / "out")["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(ours, params["decoder.layers.1.mlp.linear_fc2.weight"])


@pytest.mark.parametrize(
    "changes",
    [
        {"rotary_interleaved": True},
        {"layernorm_zero_centered_gamma": True},
        {"apply_layernorm_1p": True},
        {"qk_l2_norm": True},
        {"softmax_scale": 0.1},
        {"apply_residual_connection_post_layernorm": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_megatron_lms_models_of_another_kind_are_refused(tmp_path, changes):
    root, _ = megatron_lm_checkpoint(tmp_path / "theirs", **changes)
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        open_source(root, 101)


def test_megatron_lms_vocabulary_must_be_known(tmp_path):
    root, _ = megatron_lm_checkpoint(tmp_path / "theirs", vocab_size=100)
    with pytest.raises(CheckpointError, match="128 embedding rows are real"):
        open_source(root)
    with pytest.raises(CheckpointError, match="between 1 and the checkpoint's 128 rows"):
        open_source(root, 129)
