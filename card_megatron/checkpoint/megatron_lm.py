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
    padded = arguments["padded_vocab_size"]
    vocab_size = vocab_size or arguments.get("vocab_size")
    if vocab_size is None:
        raise CheckpointError(
            f"{checkpoint} does not say how many of its {padded} embedding rows are real; "
            "give --vocab-size or --tokenizer"
        )
    if not 0 < vocab_size <= padded:
        raise CheckpointError(f"--vocab-size {vocab_size} must lie between 1 and the checkpoint's {padded} rows")
    model = ModelConfig(
        num_layers=arguments["num_layers"],
        hidden_size=arguments["hidden_size"],
        ffn_hidden_size=arguments["ffn_hidden_size"],
        num_attention_heads=arguments["num_attention_heads"],
        num_query_groups=arguments["num_query_groups"] if arguments.get("group_query_attention") else None,
        kv_channels=arguments.get("kv_channels"),
        vocab_size=vocab_size,
        # Megatron-LM's padding depends on its tensor-parallel size: this multiple gives its number of rows back
        make_vocab_size_divisible_by=padded,
        max_position_embeddings=arguments["max_position_embeddings"],
        share_embeddings_and_output_weights=not arguments["untie_embeddings_and_output_weights"],
        normalization=arguments["normalization"],
        layernorm_epsilon=arguments.get("norm_epsilon", 1e-5),
        activation=_activation(arguments),
        rotary_base=arguments["rotary_base"],
        rotary_percent=arguments["rotary_percent"],
        rope_scaling=_rope_scaling(arguments),
        rope_scaling_factor=_rope_factor(arguments),
        qk_layernorm=arguments.get("qk_layernorm", False),
        add_bias_linear=arguments["add_bias_linear"],
        add_qkv_bias=arguments.get("add_qkv_bias", False),
        num_moe_experts=arguments.get("num_experts"),
    )
    return RunConfig(
        run_dir=str(checkpoint),
        model=model,
        objective=ObjectiveConfig(name="arm"),
        data=DataConfig(sequence_length=arguments.get("seq_length") or arguments["max_position_embeddings"]),
    )


def _refuse(checkpoint: Path, arguments: dict[str, Any]) -> None:
    """Whatever would make the model compute something else than our configuration says."""
    allowed = {
        "position_embedding_type": ("rope",),
        "rotary_interleaved": (False,),
        "apply_layernorm_1p": (False,),
        "multi_latent_attention": (False,),
        "squared_relu": (False,) if arguments.get("swiglu") else (True, False),
        "openai_gelu": (False,),
        "window_size": (None,),
        "softmax_type": ("vanilla",),
        "mtp_num_layers": (None, 0),
    }
    wrong = [
        f"{name}={arguments[name]} (allowed: {', '.join(map(str, values))})"
        for name, values in allowed.items()
        if name in arguments and arguments[name] not in values
    ]
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
