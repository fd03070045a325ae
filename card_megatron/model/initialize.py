"""Initial weights keyed by (seed, global parameter name): every layout starts from the same model.

Megatron draws a shard from a generator that depends on the rank. Here the whole tensor is drawn, from a generator
keyed by the name that the tensor has in Megatron's own distributed checkpoints, and each rank keeps its part of it.
That name and part come from `sharded_state_dict`, so tensor, pipeline and expert parallelism, tied embeddings and
gated MLPs need no rules of their own here.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.transformer import TransformerConfig

RESIDUAL_OUTPUTS = re.compile(r"\.(linear_proj|linear_fc2)\.weight")
"""Projections back into the residual stream: Megatron draws them smaller by sqrt(2 * num_layers)."""


def initialize_keyed(chunks: list[torch.nn.Module], config: TransformerConfig, seed: int) -> None:
    """Fill every matrix of the model in place; norms and biases already are 1 and 0."""
    for chunk in chunks:
        with _unrounded(chunk):
            filled = sum(_fill(shard, config, seed) for shard in _matrices(chunk))
        wanted = sum(param.numel() for param in chunk.parameters() if param.dim() >= 2)
        if filled != wanted:
            raise RuntimeError(f"keyed initialisation filled {filled} of {wanted} weights; use model.init=megatron")


@contextlib.contextmanager
def _unrounded(chunk: torch.nn.Module) -> Iterator[None]:
    """Weights that are stored in FP8 are filled before they are rounded.

    Beside such a weight Transformer Engine keeps what it was drawn as, and Megatron's optimizer takes its fp32 weight
    from there: filling the weight alone would leave training with Megatron's own initial values.
    """
    rounded = [
        (module, name, param)
        for module in chunk.modules()
        for name, param in module.named_parameters(recurse=False)
        if hasattr(param, "get_high_precision_init_val")
    ]
    for module, name, param in rounded:
        module._parameters[name] = torch.nn.Parameter(param.get_high_precision_init_val())
    yield
    for module, name, param in rounded:
        drawn = module._parameters[name]
        assert drawn is not None
        param.get_high_precision_init_val().copy_(drawn.data)
        with torch.no_grad():
            param.copy_(drawn.to(param.device))
        module._parameters[name] = param


def _matrices(chunk: torch.nn.Module) -> Iterator[ShardedTensor]:
    """The weights to draw, as Megatron's checkpoints know them; a gated MLP's two halves come apart."""
    shards = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})  # type: ignore[operator]
    apply_factories(shards)
    for shard in nested_values(shards):
        if isinstance(shard, ShardedTensor) and shard.data is not None and shard.data.dim() >= 2:
            yield shard


def _fill(shard: ShardedTensor, config: TransformerConfig, seed: int) -> int:
    # an expert's number is a leading axis of the global tensor: each expert is drawn on its own
    lead = shard.prepend_axis_num
    key = "/".join([shard.key, *map(str, shard.global_offset[:lead])])
    whole = torch.empty(shard.global_shape[lead:], dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_seed_of(seed, key))  # the CPU's alone: dropout's on a GPU stay as they are
        _method(shard.key, config)(whole)
    window = tuple(
        slice(offset, offset + length)
        for offset, length in zip(shard.global_offset[lead:], shard.data.shape, strict=True)
    )
    with torch.no_grad():
        shard.data.copy_(whole[window])
    return shard.data.numel()


def _seed_of(seed: int, key: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=7).digest(), "little")


def _method(key: str, config: TransformerConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    if RESIDUAL_OUTPUTS.search(key):
        return config.output_layer_init_method
    if "embedding" in key:
        return config.embedding_init_method
    return config.init_method
