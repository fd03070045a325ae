"""An output folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from card_megatron.config.errors import ConfigError

MADE_HERE = ("config.json", ".metadata")
"""A folder with one of these is a model: only such a one may be replaced."""


def refuse_existing(output: Path, *, force: bool) -> None:
    """Refuse an output path that is taken, before any work; with force, one that is no model."""
    if not os.path.lexists(output):
        return
    if not force:
        raise ConfigError(f"{output} exists already; choose another path, or --force to replace it")
    if output.is_symlink() or not output.is_dir() or not any((output / name).is_file() for name in MADE_HERE):
        raise ConfigError(f"{output} is no folder of a model, so --force does not replace it; choose another path")


@contextlib.contextmanager
def whole_folder(output: Path, *, force: bool) -> Iterator[Path]:
    """A folder to write into, which takes the output's name when the context ends well and vanishes when not."""
    refuse_existing(output, force=force)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished = output.with_name(f"{output.name}.unfinished-{uuid.uuid4().hex[:8]}")
        unfinished.mkdir()
    except OSError as error:
        raise ConfigError(
            f"{output} cannot be made ({error.strerror}); choose a path that can be written to"
        ) from error
    try:
        yield unfinished
        refuse_existing(output, force=force)
        discarded = None
        if output.exists():
            discarded = output.with_name(f"{output.name}.discarded-{uuid.uuid4().hex[:8]}")
            output.rename(discarded)
        unfinished.rename(output)
        if discarded is not None:
            shutil.rmtree(discarded)
    except OSError as error:
        raise ConfigError(f"{output} could not be written: {error.strerror or error}; nothing is left of it") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
