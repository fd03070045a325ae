"""Limits of the operating system that end runs: open files, locked memory, stack, shared memory, memory."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from card_megatron.planning.doctor.check import Check

GB = 1e9


def limit_checks(*, gpu: bool, infiniband: bool) -> Iterator[Check]:
    """What is enough for a laptop is not for eight ranks that talk to hundreds of others."""
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE), gpu)
    yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], infiniband)
    yield stack(resource.getrlimit(resource.RLIMIT_STACK)[0])
    yield shared_memory(gpu)
    yield memory()


def _shown(limit: int, unit: str = "") -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}{unit}"


def open_files(limits: tuple[int, int], gpu: bool) -> Check:
    """(soft, hard): data files, workers, sockets to other ranks; every checkpoint shard that is written."""
    soft, hard = limits
    enough, least = (65536, 4096) if gpu else (1024, 256)
    value = f"{_shown(soft)} (ulimit -n; at most {_shown(hard)})"
    if soft != resource.RLIM_INFINITY and soft < enough:
        verdict = "fail" if soft < least else "warn"
        remedy = f"ulimit -n {enough} in the job script, or LimitNOFILE of slurmd and the container"
        return Check("limits", "open files", value, f"at least {enough:,}", verdict, remedy)
    return Check("limits", "open files", value, f"at least {enough:,}")


def locked_memory(soft: int, infiniband: bool) -> Check:
    """InfiniBand registers memory that must not be swapped out."""
    value = _shown(soft, " bytes") + " (ulimit -l)"
    if infiniband and soft != resource.RLIM_INFINITY:
        remedy = "ulimit -l unlimited; under Slurm LimitMEMLOCK=infinity and PropagateResourceLimitsExcept=MEMLOCK"
        return Check("limits", "locked memory", value, "unlimited, for InfiniBand", "fail", remedy)
    return Check("limits", "locked memory", value, "unlimited" if infiniband else "any: no InfiniBand here")


def stack(soft: int) -> Check:
    value, least = _shown(soft, " bytes") + " (ulimit -s)", 8 << 20
    if soft != resource.RLIM_INFINITY and soft < least:
        return Check("limits", "stack", value, f"at least {least:,} bytes", "warn", "ulimit -s 8192")
    return Check("limits", "stack", value, f"at least {least:,} bytes")


def shared_memory(gpu: bool, path: str = "/dev/shm") -> Check:
    """Data workers hand batches over in it, and NCCL talks through it; a container has 64 MB unless told otherwise."""
    if not Path(path).is_dir():
        return Check(
            "limits", "shared memory", "none", "/dev/shm", "warn", "mount a tmpfs at /dev/shm, or use num_workers=0"
        )
    return judge_shared_memory(shutil.disk_usage(path).total, shutil.disk_usage(path).free, gpu)


def judge_shared_memory(total: int, free: int, gpu: bool) -> Check:
    least = 8 * GB if gpu else 0.064 * GB
    value = f"{free / GB:.1f} of {total / GB:.1f} GB free"
    if free < least:
        remedy = "docker --shm-size=16g or --ipc=host; in Pyxis a mount of /dev/shm; remove what dead jobs left there"
        verdict = "fail" if gpu and free < GB else "warn"
        return Check("limits", "shared memory", value, f"at least {least / GB:.2g} GB free", verdict, remedy)
    return Check("limits", "shared memory", value, f"at least {least / GB:.2g} GB free")


def memory() -> Check:
    """Memory and cores that this process may use."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    available = next(
        (int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable")),
        pages * size,
    )
    value = f"{available / GB:.1f} of {pages * size / GB:.1f} GB available, {cores} cores"
    if available < 2 * GB:
        return Check("limits", "memory", value, "at least 2 GB", "warn", "end what uses it, or ask for more (--mem)")
    return Check("limits", "memory", value, "at least 2 GB")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
