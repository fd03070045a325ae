"""Everything together: what one process finds, and what all ranks find."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from card_megatron.planning.doctor.check import Check, Findings
from card_megatron.planning.doctor.expected import infiniband_gbits
from card_megatron.planning.doctor.hardware import (
    DriverError,
    driver_check,
    gpu_checks,
    matmul_check,
    matmul_tflops,
    read_gpus,
)
from card_megatron.planning.doctor.limits import limit_checks
from card_megatron.planning.doctor.software import software_checks
from card_megatron.planning.doctor.storage import storage_checks

SLOW_RANK = 0.8
"""A rank that multiplies slower than this share of the ranks' median holds up the others."""


@dataclass(frozen=True)
class Order:
    """What is to be looked at."""

    run_dir: Path
    storage_mb: int = 64
    network_mb: int = 64
    expect_gpus: int | None = None
    expect_ranks: int | None = None


def examine_here(order: Order, say: Callable[[str], None], *, storage: bool = True) -> list[Check]:
    """This process and its host, alone. `storage`: once a host is enough."""
    gpus, failure = None, None
    try:
        gpus = read_gpus()
    except DriverError as error:
        failure = driver_check(error)
    driver = gpus[0]["driver_version"] if gpus else None
    say("software and limits")
    checks = [*software_checks(driver), *limit_checks(gpu=bool(gpus), infiniband=bool(infiniband_gbits()))]
    say("hardware")
    checks += [failure] if failure is not None else gpu_checks(gpus, order.expect_gpus)
    if storage:
        say(f"file system of {order.run_dir}")
        checks += storage_checks(order.run_dir, order.storage_mb)
    return checks


def speed_here() -> tuple[float, Check] | None:
    """How fast this rank multiplies; None where torch cannot be used."""
    try:
        from card_megatron.platform import capabilities

        tflops = matmul_tflops()
    except Exception:
        return None  # the software checks say why
    return tflops, matmul_check(tflops, capabilities().peak_flops)


def examine_all(order: Order, say: Callable[[str], None]) -> list[Findings]:
    """As one of the ranks of a process group that is there; every rank gets everybody's findings."""
    import torch.distributed as dist

    from card_megatron.planning.doctor.network import gather, network_checks

    rank, host = dist.get_rank(), socket.gethostname()
    hosts = gather(host)
    checks = examine_here(order, say, storage=hosts.index(host) == rank)
    if order.expect_ranks is not None:
        checks.append(rank_check(dist.get_world_size(), order.expect_ranks))
    dist.barrier()
    say("matrix multiplications")
    speed = speed_here()
    speeds = gather(speed[0] if speed is not None else None)
    if speed is not None:
        checks.append(speed[1])
    if rank == 0:
        checks += slow_rank_checks(speeds, hosts)
    say("network")
    checks += network_checks(order.run_dir, order.network_mb)
    return gather(Findings(rank, host, tuple(checks)))


def rank_check(found: int, expected: int) -> Check:
    """A wrong --mpi silently starts so many worlds of one rank each."""
    if found == expected:
        return Check("network", "ranks", str(found), str(expected))
    remedy = "the launcher and the program do not agree on how ranks find each other: see --mpi, RANK and WORLD_SIZE"
    return Check("network", "ranks", str(found), str(expected), "fail", remedy)


def slow_rank_checks(speeds: Sequence[float | None], hosts: Sequence[str]) -> list[Check]:
    """The slowest of several ranks, against their median."""
    known = {rank: speed for rank, speed in enumerate(speeds) if speed is not None}
    if len(known) < 2:
        return []
    slowest, median = min(known, key=lambda rank: known[rank]), statistics.median(known.values())
    share = known[slowest] / median
    value, expected = f"{share:.0%} of the median", f"at least {SLOW_RANK:.0%}"
    where = f"rank {slowest} on {hosts[slowest]}"
    if share < SLOW_RANK:
        remedy = (
            "look at what else runs there, at clocks and temperatures; run it again, and leave the host out if it stays"
        )
        return [Check("hardware", "slowest rank", value, expected, "warn", remedy, where=where)]
    return [Check("hardware", "slowest rank", value, expected)]
