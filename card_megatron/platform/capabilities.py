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
    return Capabilities(
        device=torch.cuda.get_device_name(0) if cuda else "cpu",
        gpus=torch.cuda.device_count() if cuda else 0,
        transformer_engine=_transformer_engine(),
        apex=_nvidia_apex(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        mpi4py=_version("mpi4py"),
        cpu_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def _version(package: str) -> Optional[str]:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _transformer_engine() -> Optional[str]:
    """The core library alone is not enough: Megatron's specs crash without its compiled torch extension."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    extension = "transformer_engine_torch*.so"  # beside the package, or inside it when it came as a wheel
    if not any(package.parent.glob(extension)) and not any(package.rglob(extension)):
        return None
    return _version("transformer_engine")


def _nvidia_apex() -> Optional[str]:
    """NVIDIA's build brings `apex.multi_tensor_apply` and the compiled `amp_C`; the web toolkit on PyPI does not."""
    if importlib.util.find_spec("apex") is None or importlib.util.find_spec("amp_C") is None:
        return None
    return _version("apex")
