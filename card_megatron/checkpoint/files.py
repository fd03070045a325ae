"""File operations that a crash cannot tear: each is announced to `step`, so that a test can stop after every one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def step(operation: str, path: Path, source: Path | None = None) -> None:
    """Called before each operation on disk; tests replace it to stop the world at that point."""


def make_directory(path: Path) -> None:
    """A new directory, and those above it; one that is there already is an error."""
    step("make", path)
    path.mkdir(parents=True)


def write(path: Path, data: bytes) -> None:
    """Write a whole file and wait until it is on disk."""
    step("write", path)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        step("fsync", path)
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file's contents, or the names in a directory, are on disk."""
    step("fsync", path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Give a file or directory another name, at once and whole."""
    step("rename", target, source)
    source.rename(target)


def remove(path: Path) -> None:
    """Delete a file."""
    step("remove", path)
    path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Delete a directory that no longer has a name that means anything."""
    step("remove", path)
    shutil.rmtree(path, ignore_errors=True)
