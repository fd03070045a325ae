"""What this machine can do: asked once, by looking, never by importing something heavy."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch

from card_megatron.config.remedies import INSTALL_ENGINE

PEAK_BF16_FLOPS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
}
"""Dense bf16 peak of a GPU by a part of its name, from NVIDIA's data sheets; the first match counts."""


@dataclass(frozen=True)
class Capabilities:
    """The accelerators and optional libraries found here; None where there is none."""

    device: str
    """"cpu", or the name of the first GPU."""
    gpus: int
    transformer_engine: Optional[str]
    """Version of a usable Transformer Engine: its torch extension is there too."""
    apex: Optional[str]
    """Version of NVIDIA's apex; PyPI's package of that name is something else and does not count."""
    nccl: Optional[str]
    mpi4py: Optional[str]
    cpu_cores: int
    compute_capability: Optional[tuple[int, int]] = None
    """(9, 0) is Hopper."""
    cuda_version: Optional[tuple[int, int]] = None
    """That torch was built with."""
    transformer_engine_problem: Optional[str] = None
    """What a Transformer Engine that is installed lacks, and the remedy."""
    apex_problem: Optional[str] = None
    """Why an `apex` that is installed is none of NVIDIA's, and the remedy."""
    wgrad_fusion: bool = False
    """NVIDIA's apex brought fused_weight_gradient_mlp_cuda."""
    flash_attention: Optional[str] = None

    @property
    def cuda(self) -> bool:
        return self.gpus > 0

    @property
    def peak_flops(self) -> Optional[float]:
        """Dense bf16 FLOP/s of one device, or None where it is not known: then no MFU is shown."""
        return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name in self.device), None)


@functools.cache
def capabilities() -> Capabilities:
    """Look at this machine; the answer cannot change while the process lives."""
    cuda = torch.cuda.is_available()
    (engine, engine_problem), (apex, apex_problem) = _transformer_engine(), _nvidia_apex()
    return Capabilities(
        device=torch.cuda.get_device_name(0) if cuda else "cpu",
        gpus=torch.cuda.device_count() if cuda else 0,
        transformer_engine=engine,
        apex=apex,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        mpi4py=_version("mpi4py"),
        compute_capability=torch.cuda.get_device_capability(0) if cuda else None,
        cuda_version=_cuda_version(),
        transformer_engine_problem=engine_problem,
        apex_problem=apex_problem,
        wgrad_fusion=apex is not None and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        flash_attention=_version("flash_attn"),
        cpu_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def _version(package: str) -> Optional[str]:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_version() -> Optional[tuple[int, int]]:
    if torch.version.cuda is None:
        return None
    major, minor = torch.version.cuda.split(".")[:2]
    return int(major), int(minor)


def _transformer_engine() -> tuple[Optional[str], Optional[str]]:
    """(version, what is wrong with it). Without its compiled torch extension Megatron's specs crash on import."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        return None, None
    package = Path(spec.origin).parent
    extension = "transformer_engine_torch*.so"  # beside the package, or inside it when it came as a wheel
    if any(package.parent.glob(extension)) or any(package.rglob(extension)):
        return _version("transformer_engine"), None
    return None, (
        f"Transformer Engine {_version('transformer_engine')} is half installed: its torch extension "
        f"(transformer_engine_torch) is missing, and Megatron cannot be imported; {INSTALL_ENGINE}, or "
        "pip uninstall transformer_engine"
    )


def _nvidia_apex() -> tuple[Optional[str], Optional[str]]:
    """(version, what is wrong with it). NVIDIA's build brings the compiled `amp_C`; PyPI's web toolkit does not."""
    if importlib.util.find_spec("apex") is None:
        return None, None
    if importlib.util.find_spec("amp_C") is not None:
        return _version("apex") or "of unknown version", None
    return None, (
        f"the package apex {_version('apex')} here is not NVIDIA's apex with its CUDA extensions (PyPI's apex is a web "
        "toolkit), and Megatron would take its norms from it; pip uninstall apex, or build NVIDIA's from source "
        "(docs/installation.md)"
    )
