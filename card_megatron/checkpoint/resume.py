"""Which checkpoint a run goes on from: the newest that is whole and fits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from card_megatron.checkpoint import folder
from card_megatron.checkpoint.agree import on_first_rank, problems_on_all_ranks
from card_megatron.checkpoint.manifest import Manifest, problems_of, read_manifest
from card_megatron.checkpoint.source import Source
from card_megatron.config.errors import CheckpointError, UnreadableCheckpoint
from card_megatron.config.keys import flatten
from card_megatron.config.schema import RunConfig

LEGAL_MODEL_CHANGES = {
    *("model.init", "model.spec", "model.hidden_dropout", "model.attention_dropout", "model.init_method_std"),
    *("model.recompute_granularity", "model.recompute_method", "model.recompute_num_layers"),
}
"""Fields of the model that a resumed run may change: they change no weight's shape or meaning."""
SAME_DATA = ("seed", "data.sequence_length", "data.train", "data.split", "data.tokenizer", "data.mock")
"""Fields that the order of samples follows from: with another value `consumed_samples` would mean other text."""


def newest_whole(run_dir: str | Path, *, checksums: bool, say: Callable[[str], None]) -> tuple[Path, Manifest] | None:
    """The newest checkpoint whose files are as its manifest says; damaged ones are named and set aside.

    Every rank must call this; the files are shared out among them.
    """
    names, problems = on_first_rank(lambda: [path.name for path in folder.visible(run_dir)])
    if problems:
        raise CheckpointError(f"{folder.checkpoints_of(run_dir)} cannot be listed: {'; '.join(problems)}")
    for name in names:
        checkpoint = folder.checkpoints_of(run_dir) / name
        manifest, problem, blocked = None, None, None
        try:
            manifest = read_manifest(checkpoint)
            mine = list(manifest.files)[dist.get_rank() :: dist.get_world_size()]
            problem = "; ".join(problems_of(checkpoint, manifest, mine, checksums=checksums)) or None
        except UnreadableCheckpoint as error:
            blocked = str(error)
        except CheckpointError as error:
            problem = str(error)
        if said := problems_on_all_ranks(blocked):
            raise UnreadableCheckpoint("; ".join(said))  # it may be whole: neither passed over nor set aside
        found = problems_on_all_ranks(problem)
        if not found and manifest is not None:
            on_first_rank(functools.partial(_correct_latest, checkpoint))
            return checkpoint, manifest
        _, kept = on_first_rank(functools.partial(folder.set_aside, checkpoint, folder.DAMAGED))
        say(f"{checkpoint} is damaged and {'stays' if kept else 'is set aside'}: {'; '.join(found)}")
    if names:
        raise CheckpointError(
            f"none of the {len(names)} checkpoints of {run_dir} is whole; they are kept as *{folder.DAMAGED}-*. "
            "Restore one from a backup, or choose another run_dir to start anew"
        )
    return None


def _correct_latest(checkpoint: Path) -> None:
    """A crash, or a damaged checkpoint that was set aside, can leave `latest` behind or without a name."""
    if folder.latest(checkpoint.parent) != checkpoint.name:
        folder.point_latest(checkpoint)


def refuse_misfit(config: dict[str, Any], manifest: Manifest, checkpoint: Path) -> None:
    """Raise with every field that makes the checkpoint another model's or another data order's."""
    if wrong := _differences(config, manifest.config, lambda key: _shapes_model(key) or key in SAME_DATA):
        raise CheckpointError(
            f"{checkpoint} does not fit this run:\n  - "
            + "\n  - ".join(f"{key}: checkpoint {theirs!r}, run {ours!r}" for key, theirs, ours in wrong)
            + "\nset these back, or choose another run_dir to start anew"
        )


def refuse_other_model(config: dict[str, Any], saved: dict[str, Any], checkpoint: Path) -> None:
    """Raise with every field that makes the checkpoint's weights another model's."""
    if wrong := _differences(config, saved, _shapes_model):
        raise CheckpointError(
            f"{checkpoint} holds another model than this run's:\n  - "
            + "\n  - ".join(f"{key}: checkpoint {theirs!r}, run {ours!r}" for key, theirs, ours in wrong)
            + "\nset these as the checkpoint has them (a checkpoint of `card convert from-hf` brings a run.yaml "
            "for --config), or choose another checkpoint"
        )


def refuse_damaged(source: Source, *, checksums: bool) -> None:
    """Compare a checkpoint's files with its manifest, where it has one. Ranks share the files; all must call this."""
    if source.manifest is None:
        return
    mine = list(source.manifest.files)[dist.get_rank() :: dist.get_world_size()]
    problems = problems_of(source.path, source.manifest, mine, checksums=checksums)
    if said := problems_on_all_ranks("; ".join(problems) or None):
        raise CheckpointError(f"{source.path} is damaged: {'; '.join(said)}")


def _shapes_model(key: str) -> bool:
    return key.startswith("model.") and key not in LEGAL_MODEL_CHANGES


def _differences(
    config: dict[str, Any], saved: dict[str, Any], matters: Callable[[str], bool]
) -> list[tuple[str, Any, Any]]:
    """(field, checkpoint's value, run's value) where they differ; a field that the checkpoint's version did not have
    had its default."""
    defaults = dict(flatten(asdict(RunConfig())))
    theirs, ours = defaults | dict(flatten(saved)), dict(flatten(config))
    return [(key, theirs.get(key), value) for key, value in ours.items() if theirs.get(key) != value and matters(key)]


def changes(config: dict[str, Any], manifest: Manifest) -> list[str]:
    """Other fields that differ from the checkpoint's, which are legal and worth a line in the log."""
    quiet = ("run_dir", "logging.", "checkpoint.", "preset")
    changed = _differences(config, manifest.config, lambda key: not key.startswith(quiet))
    return [f"{key}: {theirs!r} -> {ours!r}" for key, theirs, ours in changed]


def same_layout(manifest: Manifest, current: Manifest) -> bool:
    """True where each rank is the rank that it was: only then do its random states mean anything."""
    return manifest.layout == current.layout
