"""An output folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from card_megatron.config.errors import ConfigError


def refuse_existing(output: Path, source: Path, *, force: bool, may_replace: Sequence[str]) -> None:
    """Refuse an output path that is taken, before any work. With force, all but a former output: a folder that has a
    match of every pattern of `may_replace`, and that is not where the conversion reads from."""
    here, there = output.resolve(), source.resolve()
    if here == there or there in here.parents or here in there.parents:
        raise ConfigError(f"{output} is, holds or lies in {source}, which is read; choose another path")
    if not os.path.lexists(output):
        return
    if not force:
        raise ConfigError(f"{output} exists already; choose another path, or --force to replace it")
    made_here = output.is_dir() and not output.is_symlink() and all(any(output.glob(name)) for name in may_replace)
    if not made_here:
        raise ConfigError(
            f"{output} is no output of this command (such a folder has {', '.join(may_replace)}), so --force does not "
            "replace it; choose another path"
        )


@contextlib.contextmanager
def whole_folder(output: Path, source: Path, *, force: bool, may_replace: Sequence[str]) -> Iterator[Path]:
    """A folder to write into, which takes the output's name when the context ends well and vanishes when not."""
    refuse_existing(output, source, force=force, may_replace=may_replace)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished = output.with_name(f"{output.name}.unfinished-{uuid.uuid4().hex[:8]}")
        unfinished.mkdir()
    except OSError as error:
        raise ConfigError(f"{output} cannot be made ({error.strerror}); choose a path that can be written") from error
    try:
        yield unfinished
        refuse_existing(output, source, force=force, may_replace=may_replace)
        _take_name(unfinished, output)
    except OSError as error:
        raise ConfigError(f"{output} was not made: {error}; what was there before is as it was") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _take_name(unfinished: Path, output: Path) -> None:
    """Replace what has the name, by renames: at any moment one of the two is whole."""
    if not output.exists():
        unfinished.rename(output)
        return
    discarded = output.with_name(f"{output.name}.discarded-{uuid.uuid4().hex[:8]}")
    output.rename(discarded)
    try:
        unfinished.rename(output)
    except OSError:
        discarded.rename(output)
        raise
    shutil.rmtree(discarded, ignore_errors=True)
