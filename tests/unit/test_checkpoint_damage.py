"""Checkpoints that a run must not resume from: damaged ones, and those of another configuration."""

from __future__ import annotations

import os

import pytest
import torch

from card_megatron.checkpoint import folder
from card_megatron.checkpoint.manifest import MANIFEST
from card_megatron.config.errors import CheckpointError
from tests.checkpoints import EMA, EVERY_2, SHARD, assert_all_whole, cut_off, flip_a_byte, same_bits, steps_in, steps_of
from tests.runs import records, tensors

# ---------------------------------------------------------------- damage


DAMAGE = {
    # what happens to a checkpoint, and what is said of it
    "a truncated shard": (lambda path: os.truncate(path / SHARD, 1000), f"{SHARD} has 1,000 bytes; the manifest says"),
    "a flipped byte": (lambda path: flip_a_byte(path / SHARD), f"{SHARD} has CRC-32"),
    "a deleted shard": (lambda path: (path / SHARD).unlink(), f"{SHARD} is missing"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), f"{MANIFEST}: no such file"),
    "half a manifest": (lambda path: os.truncate(path / MANIFEST, 1000), f"{MANIFEST} cannot be read"),
    "a half-deleted folder": (
        lambda path: [(path / name).unlink() for name in ("__0_0.distcp", ".metadata", "common.pt")],
        "common.pt is missing",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_falls_back_to_the_newest_whole_checkpoint(straight, interrupted, train, capsys, damage):
    spoil, said = DAMAGE[damage]
    spoil(folder.final_path(interrupted, 4))
    train(EVERY_2, EMA, console=True)
    output = capsys.readouterr().out
    assert "step_000004 is damaged and is set aside: rank 0: " in output and said in output
    assert "resumed from " in output and steps_in(interrupted, "resumed") == [2]
    assert len(list((interrupted / "checkpoints").glob("step_000004.damaged-*"))) == 1
    assert steps_of(interrupted) == [6, 4, 2]
    assert_all_whole(interrupted)
    assert records(interrupted) == records(straight)
    assert same_bits(tensors(folder.final_path(interrupted, 6)), tensors(folder.final_path(straight, 6)))


def test_latest_follows_the_checkpoint_that_a_run_resumes_from(interrupted, train):
    os.truncate(folder.final_path(interrupted, 4) / SHARD, 1000)
    seen: list[str | None] = []
    train(EMA, after=lambda state: seen.append(folder.latest(interrupted / "checkpoints")))
    assert seen == ["step_000002"] * 4


def test_a_run_without_a_whole_checkpoint_does_not_start_anew(interrupted, train):
    for checkpoint in folder.visible(interrupted):
        flip_a_byte(checkpoint / SHARD)
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints of .* is whole; they are kept as \*.damaged"):
        train()
    assert len(list((interrupted / "checkpoints").glob("*.damaged-*"))) == 2


def test_damage_that_sizes_do_not_show_names_the_checkpoint(interrupted, train):
    """Without checkpoint.verify a flipped byte can reach the reader: still a clear error, not a stack of torch's."""
    metadata = folder.final_path(interrupted, 4) / ".metadata"
    metadata.write_bytes(bytes(metadata.stat().st_size))
    with pytest.raises(CheckpointError, match="step_000004 does not load: rank 0: metadata is None"):
        train("--checkpoint.verify=false")


# ---------------------------------------------------------------- another configuration


def test_a_checkpoint_that_does_not_fit_names_every_difference(interrupted, train):
    wrong = {"model.num_layers": 2, "model.ffn_hidden_size": 96, "seed": 7, "data.sequence_length": 16}
    with pytest.raises(CheckpointError, match="step_000004 does not fit this run") as caught:
        train(*(f"--{key}={value}" for key, value in wrong.items()), "--optimizer.lr=5e-4")
    lines = str(caught.value).splitlines()
    assert {line.split(":")[0] for line in lines if line.startswith("  - ")} == {f"  - {key}" for key in wrong}
    assert "  - model.num_layers: checkpoint 4, run 2" in lines
    assert steps_of(interrupted) == [4, 2], "it is not damaged, and stays"


def test_other_data_does_not_fit(interrupted, train, corpus):
    with pytest.raises(CheckpointError, match=r"data.train: checkpoint \[.*first.*second.*\], run \[.*first'\]"):
        train(f"--data.train=[{corpus}/first]")


def test_a_legal_change_is_said_and_counts(straight, interrupted, train, capsys):
    train(EMA, "--optimizer.lr=5e-4", "--optimizer.min_lr=1.5e-5", "--train.micro_batch_size=4", console=True)
    output = capsys.readouterr().out
    assert "changed since the checkpoint: optimizer.lr: 0.001 -> 0.0005" in output
    assert "changed since the checkpoint: train.micro_batch_size: 2 -> 4" in output
    before, after = records(straight), records(interrupted)
    assert [line["lr"] for line in after[:4]] == [line["lr"] for line in before[:4]]
    assert [line["lr"] for line in after[4:]] == pytest.approx([line["lr"] / 2 for line in before[4:]])
    assert after[4]["loss"] == pytest.approx(before[4]["loss"], rel=1e-5), "the same samples, the same weights"
    assert after[5]["loss"] != before[5]["loss"]


def test_an_average_may_begin_at_a_checkpoint_that_has_none(train, tmp_path, capsys):
    plain = train(EVERY_2, name="plain")
    resumed = cut_off(plain, tmp_path / "run", 4)
    train("--ema.decay=0.5", console=True)
    assert "the average starts from its weights" in capsys.readouterr().out
    saved = {step: tensors(folder.final_path(resumed, step)) for step in (4, 6)}
    name = "decoder.final_layernorm.weight"
    assert f"ema.{name}" not in saved[4]
    start, end, average = saved[4][name], saved[6][name], saved[6][f"ema.{name}"]
    assert ((average - start).abs() <= (end - start).abs() + 1e-3).all() and not torch.equal(average, end)
