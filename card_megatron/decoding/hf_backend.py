"""An exported model in plain transformers: its own modules, with attention over our cache.

Llama, Qwen2 and Qwen3 for causal language modelling, as the export makes them. Nothing here knows Megatron.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from card_megatron.decoding.cache import Branches, CachePass, KVCache
from card_megatron.decoding.packed_linear import PackedLinear

CACHED_ATTENTION = "card_cached_attention"
"""The name under which transformers finds our attention."""
MODEL_TYPES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary frequencies that do not depend on the length so far; the others would make cached keys wrong."""


class HFBackend:
    """decoding.engine's Backend over a transformers model.

    It works on a copy of the model's modules that shares the parameters: the model itself is never changed. Make a new
    one when the parameters change: linear layers are packed here.
    """

    def __init__(self, model: Any, *, vocab_size: int | None = None):
        from transformers import AttentionInterface

        config = model.config
        rope = (config.rope_parameters or {}).get("rope_type", "default")
        windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
        for name, value, valid, rule in (
            ("model_type", config.model_type, config.model_type in MODEL_TYPES, f"one of {', '.join(MODEL_TYPES)}"),
            ("rope_type", rope, rope in ROPE_TYPES, f"one of {', '.join(ROPE_TYPES)}"),
            ("sliding windows", windows, not windows, "off: the cache keeps every position"),
        ):
            if not valid:
                raise ValueError(f"{name}={value} of this model must be {rule}; use the model's own generate()")
        self.model = copy_with_shared_tensors(model)
        self.config = self.model.config
        self.config._attn_implementation = CACHED_ATTENTION
        pack_linears(self.model)
        self.vocab_size = vocab_size or config.vocab_size
        self.max_positions = config.max_position_embeddings
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.cache: KVCache | None = None
        AttentionInterface.register(CACHED_ATTENTION, _cached_attention)

    @torch.inference_mode()
    def reserve(self, slots: int, capacity: int) -> int:
        if self.cache is None or not self.cache.fits(slots, capacity):
            self.cache = None  # let go of the old one first
            weight = self.model.lm_head.weight
            layers, heads = self.config.num_hidden_layers, self.config.num_key_value_heads
            self.cache = KVCache(
                layers, slots, heads, capacity, self.head_dim, dtype=weight.dtype, device=weight.device
            )
        return self.cache.nbytes

    @torch.inference_mode()
    def forward(
        self,
        tokens_BW: np.ndarray,
        starts_B: np.ndarray,
        first_slot: int,
        wanted: np.ndarray | None,
        branches: Branches | None = None,
    ) -> torch.Tensor | None:
        assert self.cache is not None, "reserve() comes first"
        body, device = self.model.model, self.cache.keys.device
        cache_pass = CachePass(self.cache, first_slot, starts_B, tokens_BW.shape[1], self.groups, branches)
        hidden = body.embed_tokens(torch.from_numpy(np.ascontiguousarray(tokens_BW)).to(device))
        rotary = body.rotary_emb(hidden, cache_pass.positions_BW)
        for layer in body.layers:
            # what a layer does not know, it hands on to its attention
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotary, cache_pass=cache_pass)
        if wanted is not None and not len(wanted):
            return None
        hidden = hidden.flatten(0, 1)
        if wanted is not None:
            hidden = hidden[torch.from_numpy(wanted).to(device)]
        return self.model.lm_head(body.norm(hidden))

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        assert self.cache is not None
        self.cache.move(source, target, length)

    def agree(self, value: int) -> int:
        return value


def copy_with_shared_tensors(model: Any) -> Any:
    """Modules and configuration of its own, the very parameters and buffers of `model`; in evaluation mode."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).eval()


def pack_linears(model: Any) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:  # and no subclass, which may do more than multiply
                setattr(module, name, PackedLinear(child))


def _cached_attention(module, query, key, value, attention_mask, *, scaling, cache_pass: CachePass, **unused):
    """transformers' interface for attention: [B, heads, W, D] in, [B, W, heads, D] out."""
    return cache_pass.attend(module.layer_idx, query, key, value, scaling), None
