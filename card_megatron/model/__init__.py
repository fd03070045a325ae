"""Megatron-Core's GPTModel from a configuration."""

from card_megatron.model.build import build_model, unwrap
from card_megatron.model.transformer_config import build_transformer_config

__all__ = ["build_model", "build_transformer_config", "unwrap"]
