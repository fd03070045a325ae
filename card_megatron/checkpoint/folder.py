"""RUN/checkpoints: names, the `latest` pointer, and the order of operations that makes a checkpoint visible."""

from __future__ import annotations

import re
import threading
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


def make_unfinished(run_dir: str | Path, step: int) -> Path:
    """An empty folder for a save that begins."""
    folder = checkpoints_of(run_dir)
    if not folder.is_dir():
        files.make_directory(folder)
        files.sync(folder.parent)
    unfinished = unfinished_path(run_dir, step)
    files.make_directory(unfinished)
    return unfinished


def visible(run_dir: str | Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    folder = checkpoints_of(run_dir)
    found = [path for path in folder.iterdir() if step_of(path) is not None] if folder.is_dir() else []
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def publish(unfinished: Path, final: Path) -> None:
    """Make a complete, synced folder visible by one rename; the pointer moves only afterwards."""
    files.sync(unfinished)
    if final.exists():  # the same step once more, after a damaged one was left behind
        set_aside(final, DISCARDED)
    files.rename(unfinished, final)
    files.sync(final.parent)
    point_latest(final)
    remove_leftovers(final.parent, [DISCARDED])


def point_latest(final: Path) -> None:
    """Let `latest` name this checkpoint: it changes as a whole or not at all."""
    pointer = final.parent / LATEST
    unfinished = pointer.with_name(LATEST + UNFINISHED)
    files.write(unfinished, f"{final.name}\n".encode())
    files.rename(unfinished, pointer)
    files.sync(final.parent)


def latest(folder: Path) -> str | None:
    """The name that the pointer in a folder of checkpoints holds."""
    pointer = folder / LATEST
    return pointer.read_text().strip() if pointer.is_file() else None


def set_aside(checkpoint: Path, suffix: str) -> Path:
    """Take a checkpoint out of sight, whole, by one rename; `latest` does not go on naming it."""
    if latest(checkpoint.parent) == checkpoint.name:
        files.remove(checkpoint.parent / LATEST)
    target = checkpoint.with_name(f"{checkpoint.name}{suffix}-{uuid.uuid4().hex[:8]}")
    files.rename(checkpoint, target)
    return target


def discard(checkpoints: Iterable[Path], *, background: bool = False) -> None:
    """Delete checkpoints: out of sight at once, each by one rename, so that a crash leaves none half-deleted.

    Deleting gigabytes takes a while: in the background, nobody waits for it.
    """
    aside = [set_aside(checkpoint, DISCARDED) for checkpoint in checkpoints]

    if background:
        threading.Thread(target=_remove, args=(aside,)).start()
    else:
        _remove(aside)


def to_discard(newest_first: list[Path], keep_last: int, keep_every: int | None) -> list[Path]:
    """What retention lets go: all but the newest `keep_last` and the steps that `keep_every` divides."""

    def kept_for_ever(checkpoint: Path) -> bool:
        return keep_every is not None and (step_of(checkpoint) or 0) % keep_every == 0

    return [checkpoint for checkpoint in newest_first[keep_last:] if not kept_for_ever(checkpoint)]


def remove_leftovers(folder: Path, suffixes: Iterable[str] = (UNFINISHED, DISCARDED)) -> None:
    """Delete what a crash left behind: unfinished saves and deletions that did not get to their end."""
    if not folder.is_dir():
        return
    _remove([path for path in folder.iterdir() if path.is_dir() and any(suffix in path.name for suffix in suffixes)])


def _remove(out_of_sight: list[Path]) -> None:
    for folder in {path.parent for path in out_of_sight}:
        files.sync(folder)  # else a power cut could bring an old name back, with half of its files
    for path in out_of_sight:
        files.remove_tree(path)
