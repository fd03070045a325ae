"""Small models of every kind that the inference format can hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from card_megatron.config.schema import DataConfig, ModelConfig, RunConfig
from card_megatron.convert.hf_config import to_hf_config

PLAIN = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    vocab_size=100,
    max_position_embeddings=64,
)
MODELS = {
    "plain": PLAIN,
    "grouped queries": replace(PLAIN, num_query_groups=2, rotary_base=500000),
    "one key head, wide": replace(PLAIN, num_query_groups=1, kv_channels=16),
    "untied": replace(PLAIN, share_embeddings_and_output_weights=False, num_query_groups=2),
    "query and key norms": replace(PLAIN, qk_layernorm=True, num_query_groups=2),
    "biases everywhere": replace(PLAIN, add_bias_linear=True, num_query_groups=2),
    "query, key, value biases": replace(PLAIN, add_qkv_bias=True, num_query_groups=2),
    "geglu": replace(PLAIN, activation="geglu", layernorm_epsilon=1e-6),
    "linear rope": replace(PLAIN, rope_scaling="linear", rope_scaling_factor=4.0),
    "llama3 rope": replace(
        PLAIN,
        rope_scaling="llama3",
        rope_scaling_factor=8.0,
        rope_high_freq_factor=4.0,
        rope_original_max_position_embeddings=16,
    ),
    "unpadded": replace(PLAIN, vocab_size=128),
}


def run_config(model: ModelConfig) -> RunConfig:
    return RunConfig(model=model, data=DataConfig(mock=True, sequence_length=32))


def megatron_model(model: ModelConfig) -> Any:
    """A GPTModel in the world of one that is there, with every parameter random: norms and biases too."""
    from card_megatron.inference import inference_config
    from card_megatron.model import build_model, build_transformer_config

    config = inference_config(run_config(model))
    (built,) = build_model(config, build_transformer_config(config))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in built.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.2 + (1.0 if param.dim() == 1 else 0.0))
    return built.eval()


def transformers_model(model: ModelConfig) -> Any:
    """transformers' model of the exported configuration, with its own random weights."""
    import transformers

    config = to_hf_config(model, dtype="fp32", eos=2, mask=4)
    kind = getattr(transformers, config["architectures"][0])
    torch.manual_seed(0)
    return kind(kind.config_class(**config)).eval()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
