"""Checkpoints that Megatron-LM saved (`--ckpt-format torch_dist`): its arguments, as a configuration of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from card_megatron.config.errors import CheckpointError
from card_megatron.config.schema import DataConfig, ModelConfig, ObjectiveConfig, RunConfig

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"


def newest_iteration(path: Path) -> Path | None:
    """The iteration that a folder of Megatron-LM's names as its last; None for any other folder."""
    tracker = path / TRACKER
    if not tracker.is_file():
        return None
    name = tracker.read_text().strip()
    return path / (f"iter_{int(name):07d}" if name.isdecimal() else name)


def is_megatron_lm(checkpoint: Path) -> bool:
    return (checkpoint / COMMON).is_file() and not (checkpoint / "manifest.json").is_file()


def read_config(checkpoint: Path, vocab_size: int | None) -> RunConfig:
    """The configuration that Megatron-LM's own arguments describe; refuses what ours cannot say.

    The file is a pickle, so only for trusted checkpoints, as all distributed checkpoints are.
    """
    try:
        common = torch.load(checkpoint / COMMON, map_location="cpu", weights_only=False)
        arguments = vars(common["args"])
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint / COMMON} holds no arguments of Megatron-LM ({type(error).__name__}: {error}); give a "
            "checkpoint that card_megatron or Megatron-LM saved"
        ) from error
    _refuse(checkpoint, arguments)

    def need(*names: str) -> Any:
        """A value under any of its names: 0.16 named arguments after the fields of TransformerConfig."""
        for name in names:
            if name in arguments:
                return arguments[name]
        raise CheckpointError(
            f"{checkpoint / COMMON} has no argument {' or '.join(names)}: which Megatron-LM saved it?"
        )

    padded = need("padded_vocab_size")
    if vocab_size is None:  # args.vocab_size does not count what the tokenizer adds
        raise CheckpointError(
            f"{checkpoint} does not say how many of its {padded} embedding rows are real; "
            "give the true vocabulary size, or the tokenizer"
        )
    if not 0 < vocab_size <= padded:
        raise CheckpointError(f"a vocabulary of {vocab_size} must lie between 1 and the checkpoint's {padded} rows")
    model = ModelConfig(
        num_layers=need("num_layers"),
        hidden_size=need("hidden_size"),
        ffn_hidden_size=need("ffn_hidden_size"),
        num_attention_heads=need("num_attention_heads"),
        num_query_groups=need("num_query_groups") if need("group_query_attention") else None,
        kv_channels=need("kv_channels"),
        vocab_size=vocab_size,
        # Megatron-LM's padding depends on its tensor-parallel size: this multiple gives its number of rows back
        make_vocab_size_divisible_by=padded,
        max_position_embeddings=need("max_position_embeddings"),
        share_embeddings_and_output_weights=not need("untie_embeddings_and_output_weights"),
        normalization=need("normalization"),
        layernorm_epsilon=need("layernorm_epsilon", "norm_epsilon"),
        activation=_activation(arguments),
        rotary_base=need("rotary_base"),
        rotary_percent=need("rotary_percent"),
        rope_scaling=_rope_scaling(arguments),
        rope_scaling_factor=_rope_factor(arguments),
        qk_layernorm=need("qk_layernorm"),
        add_bias_linear=need("add_bias_linear"),
        add_qkv_bias=need("add_qkv_bias"),
        num_moe_experts=need("num_moe_experts", "num_experts"),
    )
    return RunConfig(
        run_dir=str(checkpoint),
        model=model,
        objective=ObjectiveConfig(name="arm"),
        data=DataConfig(sequence_length=arguments.get("seq_length") or need("max_position_embeddings")),
    )


PLAIN_GPT: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope",),
    "rotary_interleaved": (False,),
    "no_rope_freq": (None,),
    "mrope_section": (None,),
    "apply_layernorm_1p": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "multi_latent_attention": (False,),
    "qk_l2_norm": (False,),
    "attention_output_gate": (False,),
    "experimental_attention_variant": (None,),
    "window_size": (None,),
    "softmax_type": ("vanilla",),
    "softmax_scale": (None,),
    "openai_gelu": (False,),
    "quick_geglu": (False,),
    "glu_linear_offset": (0, 0.0),
    "activation_func_clamp_value": (None,),
    "mtp_num_layers": (None, 0),
    "heterogeneous_layers_config_path": (None,),
    "is_hybrid_model": (False,),
}
"""Arguments of Megatron-LM that change what a model computes, most of them without a weight that would show it, and the
values that our configuration means. No comparison with transformers can find one that is misread here."""


def _refuse(checkpoint: Path, arguments: dict[str, Any]) -> None:
    wrong = [
        f"{name}={arguments[name]} (allowed: {', '.join(map(str, values))})"
        for name, values in PLAIN_GPT.items()
        if name in arguments and arguments[name] not in values
    ]
    if arguments.get("swiglu") and arguments.get("squared_relu"):
        wrong.append("swiglu with squared_relu")
    if arguments.get("use_rope_scaling") and arguments.get("rotary_seq_len_interpolation_factor"):
        wrong.append("use_rope_scaling with rotary_seq_len_interpolation_factor")
    if wrong:
        raise CheckpointError(f"{checkpoint} is no plain GPT model with rotary positions: {'; '.join(wrong)}")


def _activation(arguments: dict[str, Any]) -> Any:
    if arguments.get("swiglu"):
        return "swiglu"
    return "squared_relu" if arguments.get("squared_relu") else "gelu"


def _rope_scaling(arguments: dict[str, Any]) -> Any:
    if arguments.get("use_rope_scaling"):
        return "llama3"
    return "linear" if arguments.get("rotary_seq_len_interpolation_factor") else None


def _rope_factor(arguments: dict[str, Any]) -> float:
    if arguments.get("use_rope_scaling"):
        return float(arguments.get("rope_scaling_factor", 8.0))
    return float(arguments.get("rotary_seq_len_interpolation_factor") or 8.0)
