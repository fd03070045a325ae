"""A checkpoint that something other than its own run reads: its folder, its configuration, its weights' names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from card_megatron.checkpoint import folder, megatron_lm
from card_megatron.checkpoint.manifest import Manifest, read_manifest
from card_megatron.config.errors import CheckpointError
from card_megatron.config.load import config_from_tree
from card_megatron.config.schema import RunConfig

EMA_PREFIX = "ema."
"""Names of averaged weights in a checkpoint: this, then the weight's own."""


@dataclass(frozen=True)
class Source:
    """Where weights come from, and the model that they belong to."""

    path: Path
    """The folder that holds .metadata and the shards."""
    config: RunConfig
    """Of the run that saved it, resolved: model.vocab_size is the true vocabulary."""
    manifest: Manifest | None
    """None where another program saved it."""

    @property
    def tokenizer(self) -> dict[str, Any] | None:
        """Facts of the tokenizer that the model was trained with, where they are known."""
        return None if self.manifest is None else self.manifest.tokenizer

    def prefix(self, *, ema: bool) -> str:
        """What stands before the name of every weight that is asked for."""
        if ema and not (self.manifest is not None and self.manifest.ema):
            raise CheckpointError(
                f"{self.path} has no averaged weights; train with ema.decay set, or take the weights themselves"
            )
        return EMA_PREFIX if ema else ""


def open_source(path: str | Path, vocab_size: int | None = None) -> Source:
    """A checkpoint, or the newest of a run directory; Megatron-LM's too, which may need the true vocabulary size."""
    checkpoint = resolve(Path(path))
    if megatron_lm.is_megatron_lm(checkpoint):  # the only kind whose true vocabulary size must be said
        return Source(checkpoint, megatron_lm.read_config(checkpoint, vocab_size), None)
    manifest = read_manifest(checkpoint)
    return Source(checkpoint, config_from_tree(manifest.config), manifest)


def resolve(path: Path) -> Path:
    """A checkpoint, or the newest of a run directory."""
    if folder.step_of(path) is not None or folder.DAMAGED in path.name or (path / ".metadata").is_file():
        return path
    if (theirs := megatron_lm.newest_iteration(path)) is not None:
        return theirs
    found = folder.visible(path)
    if not found:
        raise CheckpointError(f"{path} is no checkpoint (step_NNNNNN) and no run directory that has one")
    return found[0]
