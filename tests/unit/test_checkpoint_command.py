"""card checkpoint: list, inspect, verify."""

from __future__ import annotations

import os
import re
from typing import Any

from card_megatron import cli
from card_megatron.checkpoint import folder
from card_megatron.checkpoint.manifest import MANIFEST
from tests.checkpoints import SHARD, flip_a_byte


def card(*arguments: Any) -> str | None:
    """What the command ends with: None for success, else the message with which it exits."""
    try:
        cli.main(["checkpoint", *map(str, arguments)])
    except SystemExit as end:
        return str(end.code)
    return None


def test_card_checkpoint_list(interrupted, tmp_path, capsys):
    os.truncate(folder.final_path(interrupted, 2) / MANIFEST, 10)
    assert card("list", interrupted) is None
    _, newest, damaged = capsys.readouterr().out.splitlines()
    assert re.match(r"step_000004 +32 +1\.\d MB .* 1 rank  latest$", newest)
    assert damaged.startswith("step_000002") and "cannot be read" in damaged
    assert "has no checkpoints" in (card("list", tmp_path / "nowhere") or "")


def test_card_checkpoint_inspect(interrupted, tmp_path, capsys):
    assert card("inspect", interrupted) is None
    output = capsys.readouterr().out
    for line in (
        "step         4 (32 samples consumed)",
        "model        53,536 parameters, with averaged weights",
        "decoder.layers.mlp.linear_fc1.weight  [4, 128, 32]  float32",
        "optimizer.state.exp_avg_sq.decoder.final_layernorm.weight  [32]  float32",
        "ema.embedding.word_embeddings.weight  [512, 32]  float32",
    ):
        assert line in output
    assert SHARD in output and "megatron-core 0.16.1" in output
    older = folder.final_path(interrupted, 2)
    (older / ".metadata").write_bytes(b"")
    assert f"{older}/.metadata cannot be read" in (card("inspect", older) or "")
    assert "is no checkpoint" in (card("inspect", tmp_path / "nowhere") or "")


def test_card_checkpoint_verify(interrupted, capsys):
    assert card("verify", interrupted) is None
    assert "step_000004: 5 files, " in capsys.readouterr().out
    newest, older = folder.visible(interrupted)
    flip_a_byte(newest / SHARD)
    (newest / "common.pt").unlink()
    said = card("verify", newest) or ""
    assert said.startswith(f"{newest} is damaged:") and len(said.splitlines()) == 3
    assert f"{newest / SHARD} has CRC-32" in said and f"{newest / 'common.pt'} is missing" in said
    assert card("verify", older) is None
    (older / MANIFEST).unlink()
    assert f"{older / MANIFEST}: no such file" in (card("verify", older) or "")
