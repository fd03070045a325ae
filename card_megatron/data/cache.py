"""Megatron's index cache on a shared file system: one job builds at a time, and what a killed one left is not used.

Megatron's builder lets rank 0 build and the others wait. It takes a file that is there for a file that is whole, and
a build that was killed can leave the last one cut short.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

LOCK = ".lock"


@contextlib.contextmanager
def building(folder: str | Path, *, first: bool) -> Iterator[None]:
    """Hold the cache for a build; only the first rank does, and it is the only one that writes."""
    if not first:
        yield
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        _acquire(lock, folder)
        for path in folder.glob("*.npy"):
            if not is_whole(path):
                path.unlink()
        yield


def _acquire(lock, folder: Path) -> None:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for another job that builds the index cache {folder}", flush=True)
        fcntl.lockf(lock, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks: then one job at a time is up to the user


def is_whole(path: Path) -> bool:
    """True for a .npy file that has as many bytes as its header says."""
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            expected = file.tell() + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            return os.fstat(file.fileno()).st_size == expected
    except (OSError, ValueError, EOFError):
        return False
