"""What a run asks for that a machine lacks, or has only half of: said before training, from what was found there.

Megatron-Core falls back to slower kernels and higher precision without a word, or crashes in an import. Here it is a
rule, over a record of what is there, so that the rules for a GPU can be tested without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional, Protocol

from packaging.version import InvalidVersion, Version

from card_megatron.config.errors import ConfigError
from card_megatron.config.precision import resolve_precision
from card_megatron.config.remedies import INSTALL_ENGINE
from card_megatron.config.schema import RunConfig

ENGINE_VERSIONS = ((2, 9), (2, 12))
"""What megatron-core 0.16.1 names in its own extras: from the first, before the second."""


class Machine(Protocol):
    """What is asked of a machine; platform.Capabilities is one."""

    @property
    def cuda(self) -> bool: ...
    @property
    def device(self) -> str: ...
    @property
    def compute_capability(self) -> Optional[tuple[int, int]]: ...
    @property
    def cuda_version(self) -> Optional[tuple[int, int]]: ...
    @property
    def transformer_engine(self) -> Optional[str]: ...
    @property
    def transformer_engine_problem(self) -> Optional[str]: ...
    @property
    def apex_problem(self) -> Optional[str]: ...
    @property
    def wgrad_fusion(self) -> bool: ...


def refuse_machine(config: RunConfig, machine: Machine) -> None:
    """Raise ConfigError with everything that this run needs and this machine does not have."""
    problems = list(hardware_problems(config, machine))
    if problems:
        raise ConfigError(problems[0] if len(problems) == 1 else "\n  - ".join(["this run cannot start:", *problems]))


def hardware_problems(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Rules of libraries and of FP8's hardware."""
    if machine.transformer_engine_problem is not None:
        yield machine.transformer_engine_problem  # Megatron's specs crash on import, whatever the run asks for
    if machine.apex_problem is not None:
        yield machine.apex_problem  # any importable apex makes Megatron choose its norms
    fields, precision = config.model.transformer, resolve_precision(config.precision)
    local = config.model.spec == "local" or precision.emulate or machine.transformer_engine is None
    if fields.get("gradient_accumulation_fusion") and local and not machine.wgrad_fusion:
        yield (
            "model.transformer.gradient_accumulation_fusion with local layers needs NVIDIA's apex with its CUDA "
            "extensions (fused_weight_gradient_mlp_cuda; docs/installation.md); leave it out, or use model.spec=te"
        )
    if not local and machine.cuda and machine.transformer_engine and not _engine_fits(machine.transformer_engine):
        low, high = (".".join(map(str, version)) for version in ENGINE_VERSIONS)
        yield (
            f"Transformer Engine {machine.transformer_engine} is not one that megatron-core 0.16.1 works with (from "
            f"{low}, before {high}), and this run's layers are its; {INSTALL_ENGINE}, or use model.spec=local"
        )
    if precision.hardware_fp8 and machine.cuda:
        yield from _fp8(config.precision.preset, precision.fp8_recipe or "", machine)


def _fp8(preset: str, recipe: str, machine: Machine) -> Iterator[str]:
    capability, cuda = machine.compute_capability or (0, 0), machine.cuda_version or (0, 0)
    where = f"{machine.device} has compute capability {capability[0]}.{capability[1]}"
    if recipe in ("tensorwise", "delayed") and capability < (8, 9):
        yield f"precision.preset={preset} needs compute capability 8.9 (Ada, Hopper) and {where}; use bf16"
    if recipe == "blockwise" and (capability < (9, 0) or cuda < (12, 9)):
        yield (
            f"precision.preset={preset} needs compute capability 9.0 (Hopper) and CUDA 12.9; {where}, and torch was "
            f"built with CUDA {cuda[0]}.{cuda[1]}; use fp8_tensorwise, or a newer CUDA"
        )
    if recipe == "mxfp8" and not (10, 0) <= capability < (12, 0):
        yield (
            f"precision.preset={preset} needs Blackwell (compute capability 10.x) and {where}; "
            "use fp8_tensorwise or fp8_blockwise"
        )


def require_engine(machine: Machine) -> None:
    """Raise ConfigError unless a Transformer Engine is here that Megatron-Core works with: for building images."""
    version = machine.transformer_engine
    if version is None or not _engine_fits(version):
        low, high = (".".join(map(str, bound)) for bound in ENGINE_VERSIONS)
        raise ConfigError(
            machine.transformer_engine_problem
            or f"Transformer Engine {version or 'is not here'}: megatron-core 0.16.1 works with {low} up to, not with, "
            f"{high}; choose another image"
        )


def _engine_fits(version: str) -> bool:
    try:
        return ENGINE_VERSIONS[0] <= Version(version).release[:2] < ENGINE_VERSIONS[1]
    except InvalidVersion:
        return False
