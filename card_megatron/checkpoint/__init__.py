"""Distributed checkpoints: used by training, conversion, decoding and evaluation."""

from card_megatron.checkpoint.weights import load_weights, save_weights

__all__ = ["load_weights", "save_weights"]
