"""What a GPU and its links can do at best, from NVIDIA's data sheets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU in a node that is joined by NVLink inside and by one network card a GPU outside."""

    memory: float
    """Bytes that a process can see."""
    bf16_flops: float
    """Dense, a second."""
    fp32_flops: float
    """Without tensor cores, as torch multiplies fp32 unless it is told otherwise."""
    fp8_flops: float | None
    memory_bandwidth: float
    nvlink: float
    """Bytes a second, each way."""
    network: float
    """Bytes a second of this GPU's own card, each way."""


GPUS = {
    "h100-80gb": Gpu(79.1 * 2**30, 989e12, 67e12, 1979e12, 3.35e12, 450e9, 50e9),
    "h200-141gb": Gpu(139.8 * 2**30, 989e12, 67e12, 1979e12, 4.8e12, 450e9, 50e9),
    "a100-80gb": Gpu(79.1 * 2**30, 312e12, 19.5e12, None, 2.04e12, 300e9, 25e9),
}
"""SXM modules. The speed model is fitted on H100s alone: other GPUs are scaled by their peaks."""
