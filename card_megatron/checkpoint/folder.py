"""RUN/checkpoints: names, the `latest` pointer, and the order of operations that makes a checkpoint visible."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from pathlib import Path

from card_megatron.checkpoint import files

LATEST = "latest"
NAME = re.compile(r"step_(\d{6,})")
"""Only a complete checkpoint has such a name."""
UNFINISHED, DISCARDED, DAMAGED = ".unfinished", ".discarded", ".damaged"


def checkpoints_of(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints"


def step_of(checkpoint: Path) -> int | None:
    """The step of a complete checkpoint; None for anything else."""
    match = NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def final_path(run_dir: str | Path, step: int) -> Path:
    return checkpoints_of(run_dir) / f"step_{step:06d}"


def unfinished_path(run_dir: str | Path, step: int) -> Path:
    """A name that no other attempt has: the writer of a killed run may still be alive and must not meet this one."""
    return final_path(run_dir, step).with_name(f"step_{step:06d}{UNFINISHED}-{uuid.uuid4().hex[:8]}")


def visible(run_dir: str | Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    folder = checkpoints_of(run_dir)
    found = [path for path in folder.iterdir() if step_of(path) is not None] if folder.is_dir() else []
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def publish(unfinished: Path, final: Path) -> None:
    """Make a complete, synced folder visible by one rename; the pointer moves only afterwards."""
    files.sync_directory(unfinished)
    if final.exists():  # the same step once more, after a damaged one was left behind
        set_aside(final, DISCARDED)
    files.rename(unfinished, final)
    files.sync_directory(final.parent)
    point_latest(final)
    remove_leftovers(final.parent, [DISCARDED])


def point_latest(final: Path) -> None:
    """Let `latest` name this checkpoint: it changes as a whole or not at all."""
    pointer = final.parent / LATEST
    unfinished = pointer.with_name(LATEST + UNFINISHED)
    files.write(unfinished, f"{final.name}\n".encode())
    files.rename(unfinished, pointer)
    files.sync_directory(final.parent)


def set_aside(checkpoint: Path, suffix: str) -> Path:
    """Take a checkpoint out of sight, whole, by one rename."""
    target = checkpoint.with_name(f"{checkpoint.name}{suffix}-{uuid.uuid4().hex[:8]}")
    files.rename(checkpoint, target)
    return target


def discard(checkpoints: Iterable[Path]) -> None:
    """Delete checkpoints; a crash in between leaves none of them half-deleted under its name."""
    for checkpoint in checkpoints:
        files.remove_tree(set_aside(checkpoint, DISCARDED))


def to_discard(newest_first: list[Path], keep_last: int, keep_every: int | None) -> list[Path]:
    """What retention lets go: all but the newest `keep_last` and the steps that `keep_every` divides."""

    def kept_for_ever(checkpoint: Path) -> bool:
        return keep_every is not None and (step_of(checkpoint) or 0) % keep_every == 0

    return [checkpoint for checkpoint in newest_first[keep_last:] if not kept_for_ever(checkpoint)]


def remove_leftovers(folder: Path, suffixes: Iterable[str] = (UNFINISHED, DISCARDED)) -> None:
    """Delete what a crash left behind: unfinished saves and deletions that did not get to their end."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.is_dir() and any(suffix in path.name for suffix in suffixes):
            files.remove_tree(path)
