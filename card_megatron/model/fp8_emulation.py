"""FP8's values on any machine: linear layers that round as Transformer Engine's recipes do and multiply in fp32.

Rounding is FP8's whole effect on training: hardware multiplies FP8 numbers exactly and adds them up in fp32, as is
done here with the rounded numbers. What differs is said in docs/precision.md. Communication is Megatron's own.

Shapes: T tokens, K inputs, N outputs of a linear layer y_TN = x_TK @ w_NK^T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from card_megatron.config.precision import Precision

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 128
LINEARS = {"self_attention": ("linear_qkv", "linear_proj"), "mlp": ("linear_fc1", "linear_fc2")}
"""Where Transformer Engine multiplies in FP8. The output layer is Megatron's own there too, and stays as it is."""


def round_to_fp8(
    x: torch.Tensor, dtype: torch.dtype, block: Optional[tuple[int, int]] = None, group: Any = None
) -> torch.Tensor:
    """A matrix, in fp32, as it is after rounding to FP8: scaled so that the largest magnitude just fits.

    Without a block there is one scale, of the matrix whose parts the ranks of `group` hold. With a block of
    (rows, columns) each has its own, rounded down to a power of two as Transformer Engine does; the last ones may
    be cut short. What is not finite becomes NaN, so that the guard of a training step sees it.
    """
    rows, columns = x.shape
    high, wide = block or (rows, columns)
    padded = F.pad(x.float(), (0, -columns % wide, 0, -rows % high))
    blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    amax = blocks.abs().amax((1, 3), keepdim=True)
    if group is not None and group.size() > 1:
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)
    scale = _scale(amax, dtype, power_of_two=block is not None)
    limit = torch.finfo(dtype).max
    # E5M2 would round what lies above its largest number to infinity
    codes = (blocks * scale).clamp(-limit, limit).to(dtype)
    return (codes.float() / scale).view_as(padded)[:rows, :columns]


def _scale(amax: torch.Tensor, dtype: torch.dtype, *, power_of_two: bool) -> torch.Tensor:
    # a true division: torch makes `number / tensor` a product with the reciprocal, and its error turns ties around
    scale = torch.full_like(amax, torch.finfo(dtype).max) / amax
    scale = scale.clamp(max=torch.finfo(torch.float32).max)  # amax may be so small that it would overflow
    if power_of_two:
        rounded = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
        scale = torch.where(scale > 0, rounded, scale)  # 0 and NaN, of an infinite amax and of NaN, stay
    return torch.where(amax == 0, 1.0, scale)


@dataclass(frozen=True)
class Recipe:
    """Which numbers share a scale, and what is left of them."""

    gradient: torch.dtype
    """E5M2 (hybrid) or E4M3; inputs and weights are E4M3."""
    block: Optional[int] = None
    """None: one scale a tensor. Else 1 x block numbers along the summed axis, and block x block of a weight."""

    def weight(self, w_NK: torch.Tensor, group: Any) -> torch.Tensor:
        return self._round(w_NK, E4M3, (self.block, self.block), group)

    def along_rows(self, x: torch.Tensor, dtype: torch.dtype, group: Any) -> torch.Tensor:
        """For a product that sums over the columns of x."""
        return self._round(x, dtype, (1, self.block), group)

    def along_columns(self, x: torch.Tensor, dtype: torch.dtype, group: Any) -> torch.Tensor:
        """For a product that sums over the rows of x, as a weight's gradient does over tokens."""
        return self._round(x, dtype, (self.block, 1), group)

    def _round(self, x, dtype, block, group) -> torch.Tensor:
        return round_to_fp8(x, dtype, None, group) if self.block is None else round_to_fp8(x, dtype, block)


class Fp8Linear(torch.autograd.Function):
    """y = x @ w^T, and its gradients, each a product of two rounded matrices."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, w_NK: torch.Tensor, recipe: Recipe, group: Any) -> torch.Tensor:
        x_TK, weight = x.flatten(0, -2), recipe.weight(w_NK, group)
        rounded = recipe.along_rows(x_TK, E4M3, group)
        again = rounded if recipe.block is None else recipe.along_columns(x_TK, E4M3, group)
        ctx.save_for_backward(again, weight)
        ctx.recipe, ctx.group = recipe, group
        return (rounded @ weight.t()).to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        x_TK, weight = ctx.saved_tensors
        recipe, group, grad_TN = ctx.recipe, ctx.group, grad.flatten(0, -2)
        rounded = recipe.along_rows(grad_TN, recipe.gradient, group)
        again = rounded if recipe.block is None else recipe.along_columns(grad_TN, recipe.gradient, group)
        grad_x = (rounded @ weight).to(grad.dtype).view(*grad.shape[:-1], -1)
        return grad_x, (again.t() @ x_TK).to(grad.dtype), None, None


class _InFp8:
    """What a parallel linear layer of Megatron does, with the product in FP8."""

    def __init__(self, *args, recipe: Recipe, **kwargs):
        super().__init__(*args, **kwargs)
        self.recipe = recipe
        # one scale for a tensor that these ranks hold parts of, so that a layout does not change it
        self.amax_group = parallel_state.get_tensor_and_context_parallel_group()

    def _forward_impl(self, input, weight, bias=None, *, allreduce_dgrad, sequence_parallel, tp_group, **unused):
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        output = Fp8Linear.apply(input, weight, self.recipe, self.amax_group)
        return output if bias is None else output + bias


class ColumnParallelFp8Linear(_InFp8, ColumnParallelLinear):
    """Megatron's ColumnParallelLinear with FP8's values."""


class RowParallelFp8Linear(_InFp8, RowParallelLinear):
    """Megatron's RowParallelLinear with FP8's values."""


def emulate_fp8(layer: ModuleSpec, precision: Precision) -> None:
    """Put FP8 linears into the specification of a local layer, in place."""
    recipe = Recipe(
        gradient=E5M2 if precision.fp8_format == "hybrid" else E4M3,
        block=BLOCK if precision.fp8_recipe == "blockwise" else None,
    )
    modules = {ColumnParallelLinear: ColumnParallelFp8Linear, RowParallelLinear: RowParallelFp8Linear}
    for part, names in LINEARS.items():
        submodules = getattr(layer.submodules, part).submodules
        for name in names:
            module = modules[getattr(submodules, name)]
            setattr(submodules, name, ModuleSpec(module=module, params=dict(recipe=recipe)))
