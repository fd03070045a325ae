"""Runs that save: what their tests do to them, and what they look at."""

from __future__ import annotations

import contextlib
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from card_megatron.checkpoint import folder, writer
from card_megatron.checkpoint.contents import weights_of
from card_megatron.checkpoint.manifest import problems_of, read_manifest
from card_megatron.checkpoint.optimizer_state import layout_metadata
from card_megatron.training import loop
from card_megatron.training.state import TrainState
from tests.runs import events

STEPS = 6
TINY = [f"--train.train_iters={STEPS}", "--checkpoint.keep_last=9"]
EVERY_2 = "--checkpoint.interval=2"
EMA = "--ema.decay=0.9"
SHARD = "__0_1.distcp"


@contextlib.contextmanager
def after_each_step(do: Callable[[TrainState], Any]) -> Iterator[None]:
    """A run in this context calls do(state) after each step, before anything is saved."""
    step = loop.train_step

    def step_and_do(state):
        result = step(state)
        do(state)
        return result

    loop.train_step = step_and_do
    try:
        yield
    finally:
        loop.train_step = step


def cut_off(run_dir: Path, target: Path, step: int) -> Path:
    """A copy of a run as it was when checkpoint `step` was its newest."""
    shutil.copytree(run_dir, target)
    for checkpoint in folder.visible(target):
        if (folder.step_of(checkpoint) or 0) > step:
            shutil.rmtree(checkpoint)
    folder.point_latest(folder.final_path(target, step))
    (target / "summary.json").unlink()
    (target / "events.jsonl").unlink()
    return target


def steps_of(run_dir: Path) -> list[int | None]:
    return [folder.step_of(path) for path in folder.visible(run_dir)]


def assert_all_whole(run_dir: Path) -> None:
    for checkpoint in folder.visible(run_dir):
        assert problems_of(checkpoint, read_manifest(checkpoint)) == []


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def steps_in(run_dir: Path, event: str) -> list[int]:
    return [line["step"] for line in events(run_dir, event)]


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def shards_of(sharded: Any) -> list[ShardedTensor]:
    """The tensors of one of Megatron's sharded state dicts."""
    everything = {"all": sharded}
    apply_factories(everything)
    return [value for value in nested_values(everything) if isinstance(value, ShardedTensor)]


def optimizer_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """What this rank would save of the optimizer, by name and place."""
    weights = weights_of(state.model)
    saved = [
        part.sharded_param_state_fully_reshardable(weights, False, layout_metadata())
        for part in state.optimizer.chained_optimizers
    ]
    return {f"{shard.key} {shard.global_offset}": shard.data.clone() for shard in shards_of(saved)}


# ---------------------------------------------------------------- saves that wait or fail


class Gate:
    """While it is closed, writer processes wait before they write."""

    def __init__(self, path: Path):
        self.path, self.write = path, writer._write
        path.touch()
        writer._write = self.wait_and_write

    def wait_and_write(self, *args: Any) -> writer.Written:
        deadline = time.monotonic() + 30
        while not self.path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.write(*args)

    def open(self) -> None:
        self.path.touch()

    def close(self) -> None:
        self.path.unlink(missing_ok=True)

    def remove(self) -> None:
        self.open()
        writer._write = self.write


def limit_file_size(most: int | None) -> None:
    """Let no file of this process, and of those that it starts, grow past a size: a full disk that a test can make."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if most is None else most, hard))


def writers_now() -> list[psutil.Process]:
    """The writer processes of this one, the first of each save before those that it started."""
    me = psutil.Process()
    alive = [child for child in me.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if child.cmdline() == me.cmdline()]


def kill_writer(state: TrainState, gate: Gate, which: int = 0) -> None:
    """In the middle of the save of step 4."""
    if state.step == 4:
        gate.close()
    if state.step == 5:
        while len(found := writers_now()) < writer.WRITERS:
            time.sleep(0.01)
        found[which].kill()
        gate.open()
