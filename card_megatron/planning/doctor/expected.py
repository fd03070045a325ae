"""What links should give. Line rates are from data sheets; floors are a share of what is reached in practice.

In practice: NVLink 4 of an H100 or H200 (450 GB/s a direction) carries about 370 GB/s, and an all-reduce of eight with
NVLink SHARP reports 475-480; a 400 Gb/s InfiniBand port carries 46-48 GB/s (NVIDIA's own words in
github.com/NVIDIA/nccl-tests issues 212, 272 and 290). Messages here are smaller than in those tests, so floors are half
of the line rate. What is far below usually went another way: over PCIe, or over TCP.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NVLINK = {
    "B200": 900.0,
    "H200 NVL": 450.0,
    "H200": 450.0,
    "H100 NVL": 300.0,
    "H100 PCIe": 64.0,
    "H100": 450.0,
    "A100-SXM": 300.0,
    "A100": 32.0,
}
"""GB/s a direction between two GPUs of a host, by a part of the name: NVLink, or PCIe where a card has none."""
SHARE, GRAVE = 0.5, 0.1
"""Of the line rate: below the first a warning, below the second a failure."""
GLOO_FLOOR, GLOO_FAIL = 0.1, 0.005
"""GB/s through gloo, loopback or Ethernet: enough to try a layout; nobody trains a large model over it."""
ETHERNET = 1.25
"""GB/s of 10 Gb/s Ethernet: what is assumed between hosts with GPUs where no InfiniBand is seen."""


@dataclass(frozen=True)
class Link:
    """What is expected of a link, GB/s."""

    name: str
    floor: float
    fail: float
    remedy: str


def expected_link(across: bool, per_host: int = 1, *, collective: bool = False) -> Link:
    """Between ranks of one host, or across hosts; an all-reduce across hosts may use all ports of a host at once."""
    import torch
    import torch.distributed as dist

    if dist.get_backend() != "nccl":
        remedy = "other work on these hosts, or the wrong interface: set GLOO_SOCKET_IFNAME"
        return Link("gloo", GLOO_FLOOR, GLOO_FAIL, remedy)
    if not across:
        return inside_link(torch.cuda.get_device_name())
    ports = infiniband_gbits()
    # one pair uses one port; with a rank for each port, an all-reduce uses all of them
    used = ports if collective else ports[:1]
    return across_link(used, per_host)


def inside_link(device: str) -> Link:
    rate = next((rate for name, rate in NVLINK.items() if name in device), 32.0)
    remedy = (
        "`nvidia-smi topo -m` must show NV links; unset NCCL_P2P_DISABLE; fabric manager must run on NVSwitch hosts"
    )
    return Link(f"half of {rate:g} GB/s of {device}", SHARE * rate, GRAVE * rate, remedy)


def across_link(ports: list[float], per_host: int) -> Link:
    """`ports`: Gb/s of each InfiniBand port that takes part."""
    if not ports:
        remedy = (
            "no InfiniBand was found: is it in the container (--device /dev/infiniband)? Else set NCCL_SOCKET_IFNAME"
        )
        return Link("10 Gb/s Ethernet", SHARE * ETHERNET, GRAVE * ETHERNET, remedy)
    rate = sum(ports[: max(per_host, 1)]) / 8
    remedy = "NCCL_DEBUG=INFO must say NET/IB and GDRDMA: see NCCL_IB_HCA, nvidia-peermem, unlimited locked memory"
    return Link(f"half of {rate:g} GB/s of InfiniBand", SHARE * rate, GRAVE * rate, remedy)


def infiniband_gbits(root: str = "/sys/class/infiniband") -> list[float]:
    """The rate of every active port of this host, e.g. [400.0, 400.0]."""
    rates = []
    for port in sorted(Path(root).glob("*/ports/*")):
        try:
            if "ACTIVE" in (port / "state").read_text():
                rates.append(float((port / "rate").read_text().split()[0]))  # "400 Gb/sec (4X NDR)"
        except (OSError, ValueError, IndexError):
            continue
    return rates
