"""A model's configuration in transformers' words, and back: pure, plain dicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.config.schema import ModelConfig
from card_megatron.convert.mapping import Sizes, refuse_inexpressible

ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Classes of transformers that the table of weights fits."""


def architecture_of(model: ModelConfig) -> str:
    """The stock class that computes what the model does."""
    refuse_inexpressible(model)
    return "Qwen3ForCausalLM" if model.qk_layernorm else "LlamaForCausalLM"


def to_hf_config(
    model: ModelConfig, *, dtype: str, eos: int | None, mask: int | None, pad: int | None = None
) -> dict[str, Any]:
    """config.json. vLLM reads `mask_token_id` or `pard_token` for parallel drafting."""
    architecture, sizes = architecture_of(model), Sizes.of(model)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": sizes.queries,
        "num_key_value_heads": sizes.groups,
        "head_dim": sizes.head,
        "hidden_act": ACTIVATIONS[model.activation],
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.layernorm_epsilon,
        "rope_theta": float(model.rotary_base),
        "rope_scaling": _rope_scaling(model),
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "attention_dropout": 0.0,
        "initializer_range": model.init_method_std,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "dtype": DTYPES[dtype],
    }
    if architecture == "LlamaForCausalLM":
        attention_bias = model.add_bias_linear or model.add_qkv_bias
        config |= {"attention_bias": attention_bias, "mlp_bias": model.add_bias_linear}
    else:
        config |= {"attention_bias": False}
    if mask is not None:
        config |= {"mask_token_id": mask, "pard_token": mask}
    return config


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    if model.rope_scaling is None:
        return None
    scaling: dict[str, Any] = {"rope_type": model.rope_scaling, "factor": model.rope_scaling_factor}
    if model.rope_scaling == "llama3":
        scaling |= {
            "low_freq_factor": model.rope_low_freq_factor,
            "high_freq_factor": model.rope_high_freq_factor,
            "original_max_position_embeddings": model.rope_original_max_position_embeddings,
        }
    return scaling


# ---------------------------------------------------------------- back

NEEDED = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"),
    *("max_position_embeddings", "rms_norm_eps", "hidden_act"),
)
"""Not guessed: transformers' defaults differ from class to class."""


def from_hf_config(config: dict[str, Any]) -> ModelConfig:
    """The model of a config.json; refuses whatever would compute something else."""
    names = config.get("architectures") or []
    architecture = next((name for name in names if name in ARCHITECTURES), None)
    if architecture is None:
        raise ConfigError(f"architectures={names} is none of {', '.join(ARCHITECTURES)}; only those can be imported")
    _refuse_windows(config)
    if missing := [key for key in NEEDED if config.get(key) is None]:
        raise ConfigError(
            f"config.json lacks {', '.join(missing)}; load the model by transformers and save it again: it writes all"
        )
    model = ModelConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config.get("num_key_value_heads") or config["num_attention_heads"],
        kv_channels=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        share_embeddings_and_output_weights=bool(config.get("tie_word_embeddings", False)),
        layernorm_epsilon=config["rms_norm_eps"],
        activation=_activation(config),
        qk_layernorm=architecture == "Qwen3ForCausalLM",
        **_biases(config, architecture),
    )
    return _with_rope(model, config)


def _activation(config: dict[str, Any]) -> Any:
    for ours, theirs in ACTIVATIONS.items():
        if config["hidden_act"] == theirs:
            return ours
    raise ConfigError(f"hidden_act={config['hidden_act']} is none of {', '.join(ACTIVATIONS.values())}")


def _biases(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    attention, mlp = bool(config.get("attention_bias", False)), bool(config.get("mlp_bias", False))
    if architecture == "Qwen2ForCausalLM":
        return {"add_qkv_bias": True, "add_bias_linear": False}
    if architecture != "LlamaForCausalLM":
        if attention:
            raise ConfigError(f"attention_bias=true of {architecture}: Megatron's attention has no such biases here")
        return {}
    if mlp and not attention:
        raise ConfigError(
            "mlp_bias=true with attention_bias=false: Megatron has biases in all linear layers or in none"
        )
    # attention's biases alone: those of queries, keys and values, if that of the output is zero
    return {"add_bias_linear": mlp, "add_qkv_bias": attention and not mlp}


def _refuse_windows(config: dict[str, Any]) -> None:
    windowed = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    if windowed or any(kind != "full_attention" for kind in config.get("layer_types") or []):
        raise ConfigError(
            f"sliding_window={config.get('sliding_window')}: the model attends to a window; only full causal attention "
            "can be imported"
        )


def _with_rope(model: ModelConfig, config: dict[str, Any]) -> ModelConfig:
    """transformers 5 writes `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    base = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if base != int(base):
        raise ConfigError(f"rope_theta={base} is no integer, which Megatron's rotary_base is")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(f"partial_rotary_factor={partial}: Llama's classes rotate whole heads")
    model = replace(model, rotary_base=int(base))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return model
    if kind == "linear":
        return replace(model, rope_scaling="linear", rope_scaling_factor=float(rope["factor"]))
    if kind == "llama3":
        return replace(
            model,
            rope_scaling="llama3",
            rope_scaling_factor=float(rope["factor"]),
            rope_low_freq_factor=float(rope["low_freq_factor"]),
            rope_high_freq_factor=float(rope["high_freq_factor"]),
            rope_original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        )
    raise ConfigError(f"rope_type={kind} is none of default, linear, llama3; only those can be imported")
