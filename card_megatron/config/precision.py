"""What `precision` means: one record that the model, data parallelism, the optimizer and the planner read.

Megatron keeps FP8 in three places (TransformerConfig.fp8_param, DistributedDataParallelConfig.fp8_param_gather,
OptimizerConfig.fp8_recipe) that nothing of its own keeps in agreement. Here they come from one record. Names are
Megatron's; number formats are words, so that nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Optional

from card_megatron.config.schema import PrecisionConfig

BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}
"""Size of one number."""


@dataclass(frozen=True)
class Precision:
    """Every number format of a run, resolved."""

    params_dtype: Literal["fp32", "bf16"]
    """Weights and activations, but for what FP8 takes over."""
    grad_reduce_in_fp32: bool
    """Gradients are summed over micro-batches and ranks in fp32 (always so with fp32 weights)."""
    fp8_format: Optional[Literal["hybrid", "e4m3"]] = None
    """Megatron's `fp8`. hybrid: E4M3 forward, E5M2 gradients; None where there is no FP8."""
    fp8_recipe: Optional[Literal["tensorwise", "blockwise", "delayed", "mxfp8"]] = None
    emulate: bool = False
    """The values of FP8 in torch's own matrix products: Megatron, Transformer Engine and the optimizer see none."""
    fp8_param_gather: bool = False
    """Linear weights are stored and gathered in FP8; also Megatron's fp8_param."""
    fp8_amax_history_len: int = 1
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "most_recent"
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0

    @property
    def fp8(self) -> bool:
        """True where linear layers see FP8 values, by whatever means."""
        return self.fp8_format is not None

    @property
    def hardware_fp8(self) -> bool:
        """True where Transformer Engine's FP8 kernels run."""
        return self.fp8 and not self.emulate

    @property
    def main_params(self) -> bool:
        """True where the optimizer keeps fp32 weights beside the model's own."""
        return self.params_dtype != "fp32" or self.fp8_param_gather

    @property
    def linear_weight_bytes(self) -> int:
        """Bytes of one weight of the layers' linear modules; those of layers kept in bf16 take BYTES[params_dtype]."""
        return BYTES["fp8" if self.fp8_param_gather else self.params_dtype]

    @property
    def grad_bytes(self) -> int:
        """Bytes of one gradient in Megatron's buffers."""
        return BYTES["fp32" if self.grad_reduce_in_fp32 else self.params_dtype]

    def in_fp8(self, layer: int, num_layers: int) -> bool:
        """True where this layer, counted from 0 over the whole model, has FP8 linears."""
        first, last = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        return self.fp8 and first <= layer < num_layers - last


FP8: dict[str, dict[str, Any]] = {
    # NVIDIA's advice for Hopper: the fastest that is stable. The scale is the tensor's own, so amax has no history.
    "fp8_tensorwise": dict(fp8_format="hybrid", fp8_recipe="tensorwise", fp8_param_gather=True),
    # 1x128 and 128x128 blocks with a scale each: outliers cost their block only, and gradients fit E4M3
    "fp8_blockwise": dict(fp8_format="e4m3", fp8_recipe="blockwise", fp8_param_gather=False),
    # scales from earlier steps: Transformer Engine's own history, where megatron-core would take the last step alone
    "fp8_delayed": dict(
        fp8_format="hybrid",
        fp8_recipe="delayed",
        fp8_param_gather=True,
        fp8_amax_history_len=1024,
        fp8_amax_compute_algo="max",
        first_last_layers_bf16=False,  # Megatron refuses both together: the amax of all layers is reduced in one go
    ),
    "mxfp8": dict(fp8_format="e4m3", fp8_recipe="mxfp8", fp8_param_gather=False),
}
"""What an FP8 preset says where a field is not given. First and last layers stay in bf16 wherever that is legal."""

EMULATED = ("tensorwise", "blockwise")
"""Recipes with a twin in torch (model/fp8_emulation.py)."""


def resolve_precision(given: PrecisionConfig) -> Precision:
    """The preset, with every field that was given in its place; what cannot be is refused elsewhere, by check()."""
    chosen = {name: value for name, value in vars(given).items() if value is not None}
    preset, emulate = chosen.pop("preset"), chosen.pop("emulate")
    in_fp32 = chosen.pop("grad_reduce_in_fp32", True)
    if preset not in FP8:
        return Precision(preset, in_fp32 or preset == "fp32")
    # emulated, everything else stays in fp32: what differs from an fp32 run is FP8's doing alone
    params_dtype = chosen.pop("params_dtype", "fp32" if emulate else "bf16")
    fields: dict[str, Any] = dict(first_last_layers_bf16=True) | FP8[preset]
    if emulate:
        fields |= dict(fp8_param_gather=False)
    fields |= chosen
    edge = int(fields["first_last_layers_bf16"])
    fields = dict(num_layers_at_start_in_bf16=edge, num_layers_at_end_in_bf16=edge) | fields
    return Precision(params_dtype, in_fp32 or params_dtype == "fp32", emulate=emulate, **fields)
