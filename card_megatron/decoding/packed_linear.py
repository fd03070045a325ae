"""Linear layers for decoding on a CPU: weights packed once for oneDNN.

torch multiplies fp32 matrices by MKL, which on many CPUs does not use the widest instructions, and multiplies a vector
on one core; oneDNN with its own layout of the weights does better on all but the smallest products. The results differ
by rounding alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

SMALLEST_PRODUCT = 2**18
"""Multiplications (tokens x weights) below which calling oneDNN costs more than it gains."""


class PackedWeight:
    """A weight [out, in] and its packed copy; the copy does not follow later changes of the weight."""

    def __init__(self, weight: torch.Tensor):
        self.weight = weight
        self.packed: torch.Tensor | None = None
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
            # what torch.compile calls for frozen weights
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.packed is None or x.numel() * self.weight.shape[0] < SMALLEST_PRODUCT:
            return F.linear(x, self.weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")


class PackedLinear(torch.nn.Module):
    """In the place of an nn.Linear whose parameters it shares."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.packed = PackedWeight(linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed.linear(x, self.bias)
