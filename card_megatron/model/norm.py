"""A torch norm that Megatron can use with sequence parallelism (its own WrappedTorchNorm refuses)."""

from __future__ import annotations

import torch


class Norm:
    """Builds a torch norm in the place of a Megatron module."""

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **unused) -> torch.nn.Module:  # type: ignore[misc]
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for param in norm.parameters():
            # each tensor-parallel rank sees its share of the sequence; Megatron sums these gradients over them
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
