"""The file system of the run directory: does it take writes, how fast, is there room, do locks work."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from card_megatron.planning.doctor.check import Check, judged

MB, GB = 1e6, 1e9
BLOCK = 4 << 20
SLOW, TOO_SLOW = 100.0, 5.0
"""MB/s: below the first a checkpoint of a 1B model (16 GB) takes minutes, below the second hours."""


def storage_checks(folder: Path, megabytes: int) -> Iterator[Check]:
    """Writes, syncs, reads back and removes a file of `megabytes`; folders that it made are removed again."""
    try:
        with existing(folder):
            yield room(folder)
            yield from speed(folder, megabytes)
            yield locks(folder)
    except OSError as error:
        remedy = "choose another --run-dir, or make room and get write permission there"
        yield Check("storage", "run directory", f"{folder}: {error.strerror or error}", "takes files", "fail", remedy)


@contextlib.contextmanager
def existing(folder: Path) -> Iterator[None]:
    """A folder that is there meanwhile: those that had to be made are removed again, unless others use them by then."""
    missing = [path for path in (folder, *folder.parents) if not os.access(path, os.F_OK)]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def room(folder: Path) -> Check:
    usage = shutil.disk_usage(folder)
    return judged(
        "storage",
        "free space",
        usage.free / GB,
        "GB",
        floor=20.0,
        fail=1.0,
        remedy="make room, or keep fewer checkpoints",
    )


def speed(folder: Path, megabytes: int) -> Iterator[Check]:
    """One process's speed, synced, as a checkpoint is written; and read back from the disk, not from memory."""
    path = folder / f".doctor-{uuid.uuid4().hex[:8]}"
    block = os.urandom(BLOCK)  # nothing that a file system could compress
    blocks = max(1, int(megabytes * MB) // BLOCK)
    remedy = "use the cluster's parallel file system for run_dir; ask its people if this is it"
    try:
        started = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(blocks):
                file.write(block)
            os.fsync(file.fileno())
            written = blocks * BLOCK / (time.perf_counter() - started) / MB
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield judged("storage", "write + fsync", written, "MB/s", floor=SLOW, fail=TOO_SLOW, remedy=remedy)
        started = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(BLOCK):
                pass
        read = blocks * BLOCK / (time.perf_counter() - started) / MB
        yield judged("storage", "read", read, "MB/s", floor=SLOW, fail=TOO_SLOW, remedy=remedy)
    finally:
        path.unlink(missing_ok=True)


def locks(folder: Path) -> Check:
    """A run locks its directory, so that no second one gets into it."""
    path = folder / f".doctor-{uuid.uuid4().hex[:8]}"
    try:
        with path.open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return Check("storage", "file locks", "work")
    except OSError as error:
        remedy = "mount with locks (Lustre: -o flock); until then see to it that no two runs share a run_dir"
        return Check("storage", "file locks", f"{error.strerror or error}", "work", "warn", remedy)
    finally:
        path.unlink(missing_ok=True)
