"""Saving and resuming real runs: what is kept, what is refused, and what happens when disk or writer fail."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import multiprocessing
import os
import re
import resource
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tests.conftest  # noqa: F401  (first: on the ranks of run_distributed it installs the CPU platform)

# isort: split
import psutil
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from card_megatron import cli
from card_megatron.checkpoint import folder, saver, writer
from card_megatron.checkpoint.contents import weights_of
from card_megatron.checkpoint.manifest import MANIFEST, problems_of, read_manifest
from card_megatron.checkpoint.optimizer_state import layout_metadata, save_without_copies
from card_megatron.config import RunConfig
from card_megatron.config.errors import CheckpointError
from card_megatron.model import unwrap
from card_megatron.platform import Ranks, ranks_from_environment
from card_megatron.testing import run_distributed
from card_megatron.training import control, loop
from card_megatron.training.evaluate import evaluate
from card_megatron.training.preflight import preflight
from card_megatron.training.run import train_run
from card_megatron.training.state import TrainState, build_state
from card_megatron.training.step import train_step
from tests import runs
from tests.curves import tiny_config
from tests.runs import events, records, tensors

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


@pytest.fixture
def train(corpus, tmp_path):
    """Runs to the end on one rank, in tmp_path / name; returns the run directory."""

    def run(*overrides: str, name: str = "run", after: Callable = lambda state: None, console: bool = False) -> Path:
        with after_each_step(after):
            train_run(tiny_config(corpus, tmp_path / name, *TINY, *overrides), Ranks(), console=console)
        return tmp_path / name

    return run


@pytest.fixture
def build(corpus, tmp_path):
    """Builds a state in a world of one, and leaves it again."""

    def make(*overrides: str) -> TrainState:
        return build_state(preflight(tiny_config(corpus, tmp_path / "run", *TINY, *overrides), Ranks()))

    yield make
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory) -> Path:
    """A run that nothing interrupted, with checkpoints of steps 2, 4 and 6."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    train_run(tiny_config(corpus, run_dir, *TINY, EVERY_2, EMA), Ranks(), console=False)
    return run_dir


@pytest.fixture
def interrupted(straight, tmp_path) -> Path:
    """The same run, ended in the middle of step 5: checkpoints of steps 2 and 4."""
    return cut_off(straight, tmp_path / "run", 4)


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


# ---------------------------------------------------------------- damage


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


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


# ---------------------------------------------------------------- when to save, and what to keep


def test_saves_at_the_interval_and_at_the_end(train, straight):
    assert steps_of(straight) == [6, 4, 2]
    assert steps_of(train("--checkpoint.interval=4")) == [6, 4]
    assert steps_of(train(name="other")) == [6]


def test_saves_on_request(train, tmp_path, monkeypatch):
    monkeypatch.setattr(control, "LOOK_EVERY_SECONDS", 0)
    request = tmp_path / "run" / "save_now"
    left = []

    def touch(state):
        left.append(request.exists())
        if state.step == 3:
            request.touch()

    assert steps_of(train(after=touch)) == [6, 3]
    assert not any(left) and not request.exists()


def test_saves_by_the_clock(train):
    def wait(state):
        if state.step in (2, 5):
            time.sleep(0.7)

    assert steps_of(train(f"--checkpoint.interval_minutes={0.6 / 60}", after=wait)) == [6, 5, 2]


@pytest.mark.parametrize(("options", "kept"), [([2], [6, 5]), ([1, 2], [6, 4, 2]), ([1, 5], [6, 5])])
def test_old_checkpoints_go(train, options, kept):
    keep_last, *keep_every = options
    keep = [f"--checkpoint.keep_last={keep_last}", *(f"--checkpoint.keep_every={steps}" for steps in keep_every)]
    run_dir = train("--checkpoint.interval=1", *keep)
    assert steps_of(run_dir) == kept and steps_in(run_dir, "save_finished") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("bound", [1, 3])
def test_pending_saves_are_bounded(train, monkeypatch, bound):
    alive, most, write = set(), [], writer._write

    def wait_and_write(*args):
        time.sleep(0.3)
        return write(*args)

    class Counted(writer.Writing):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            alive.add(self)
            most.append(len(alive))

        def collect(self):
            alive.remove(self)
            return super().collect()

    monkeypatch.setattr(writer, "_write", wait_and_write)
    monkeypatch.setattr(saver, "Writing", Counted)
    run_dir = train("--checkpoint.interval=1", f"--checkpoint.max_pending={bound}", "--train.train_iters=5")
    assert max(most) == bound and not alive
    assert steps_of(run_dir) == [5, 4, 3, 2, 1]
    assert_all_whole(run_dir)


# ---------------------------------------------------------------- what is saved


def shards_of(sharded: Any) -> list[ShardedTensor]:
    """The tensors of one of Megatron's sharded state dicts."""
    everything = {"all": sharded}
    apply_factories(everything)
    return [value for value in nested_values(everything) if isinstance(value, ShardedTensor)]


def weights_now(state: TrainState) -> list[tuple[str, tuple, torch.Tensor]]:
    """(name, part of the whole tensor, value) of each weight of this rank."""
    shards = shards_of(weights_of(state.model))
    return [(shard.key, shard.global_slice(), shard.data.detach().clone()) for shard in shards]


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


@pytest.fixture
def gate(tmp_path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.remove()
    limit_file_size(None)


def test_an_async_save_is_the_step_that_asked_for_it(train, gate):
    """Training goes on while the writers wait; what they then write is still the state of their step."""
    weights = {}

    def keep(state):
        weights[state.step] = weights_now(state)
        gate.open() if state.step == STEPS else gate.close()

    run_dir = train(EVERY_2, EMA, "--checkpoint.max_pending=3", after=keep)
    for step in (2, 4, 6):
        saved = tensors(folder.final_path(run_dir, step))
        assert len(weights[step]) > 25
        for name, part, weight in weights[step]:
            assert torch.equal(saved[name][part], weight), f"{name} of step {step}"
    sync = train(EVERY_2, EMA, "--checkpoint.async_save=false", name="sync")
    for step in (2, 4, 6):
        one, other = (tensors(folder.final_path(run, step)) for run in (run_dir, sync))
        assert same_bits(one, other)


def optimizer_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """What this rank would save of the optimizer, by name and place."""
    weights = weights_of(state.model)
    saved = [
        part.sharded_param_state_fully_reshardable(weights, False, layout_metadata())
        for part in state.optimizer.chained_optimizers
    ]
    return {f"{shard.key} {shard.global_offset}": shard.data.clone() for shard in shards_of(saved)}


@pytest.mark.parametrize("options", [[], ["--model.num_moe_experts=4"]], ids=["dense", "experts"])
def test_the_optimizer_state_is_megatrons(build, options):
    state = build(*options)
    train_step(state)
    train_step(state)
    megatrons = optimizer_tensors(state)
    save_without_copies(state.optimizer)
    assert len(megatrons) > 60 and same_bits(optimizer_tensors(state), megatrons)


def test_before_the_first_update_the_moments_are_zero(build):
    """Megatron's own way knows no answer yet: KeyError."""
    state = build()
    save_without_copies(state.optimizer)
    weights = {name: weight for name, _, weight in weights_now(state)}
    saved = optimizer_tensors(state)
    assert len(saved) == 3 * len(weights_now(state))
    for name, tensor in saved.items():
        kind, key, _ = re.match(r"optimizer\.state\.(\w+)\.(\S+) (.*)", name).groups()
        assert kind == "param" or not tensor.any()
        if "layers" not in key and kind == "param":
            assert torch.equal(tensor, weights[key])


def test_a_mixture_of_experts_resumes_bit_for_bit(train, tmp_path):
    experts = ["--model.num_moe_experts=4", EVERY_2, EMA]
    whole = train(*experts, name="whole")
    resumed = cut_off(whole, tmp_path / "run", 4)
    train(*experts)
    assert steps_in(resumed, "resumed") == [4] and records(resumed) == records(whole)
    assert same_bits(tensors(folder.final_path(resumed, 6)), tensors(folder.final_path(whole, 6)))


# ---------------------------------------------------------------- saves that fail


def limit_file_size(most: int | None) -> None:
    """Let no file of this process, and of those that it starts, grow past a size: a full disk that a test can make."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if most is None else most, hard))


def writers_now() -> list[psutil.Process]:
    """The writer processes of this one, the first of each save before those that it started."""
    me = psutil.Process()
    return [child for child in me.children(recursive=True) if child.cmdline() == me.cmdline()]


def fill_disk(state: TrainState, gate: Gate) -> None:
    limit_file_size(100_000 if state.step == 4 else None)


def kill_writer(state: TrainState, gate: Gate, which: int = 0) -> None:
    """In the middle of the save of step 4."""
    if state.step == 4:
        gate.close()
    if state.step == 5:
        while len(found := writers_now()) < writer.WRITERS:
            time.sleep(0.01)
        found[which].kill()
        gate.open()


FAILURES = {
    "full disk": (fill_disk, "rank 0: File too large: "),
    "killed writer": (kill_writer, "rank 0: a writer process died"),
    "killed second writer": (functools.partial(kill_writer, which=1), "rank 0: a writer process died"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("failure", FAILURES)
def test_training_goes_on_after_a_failed_save(train, straight, gate, failure):
    fail, said = FAILURES[failure]
    run_dir = train(EVERY_2, EMA, after=lambda state: fail(state, gate))
    (failed,) = events(run_dir, "save_failed")
    assert failed["step"] == 4 and failed["newest"] == "step_000002" and failed["problems"][0].startswith(said)
    assert steps_in(run_dir, "save_finished") == [2, 6] and steps_of(run_dir) == [6, 2]
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"latest", "step_000002", "step_000006"}
    assert_all_whole(run_dir)
    assert same_bits(tensors(folder.final_path(run_dir, 6)), tensors(folder.final_path(straight, 6)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("failure", ["full disk", "killed writer"])
def test_or_the_run_stops_where_that_is_asked(train, gate, tmp_path, failure):
    fail, said = FAILURES[failure]
    with pytest.raises(CheckpointError, match=f"step 4 could not be written: {said}.*newest .* is still step_000002"):
        train(EVERY_2, "--checkpoint.on_save_error=stop", after=lambda state: fail(state, gate))
    assert steps_of(tmp_path / "run") == [2]
    assert_all_whole(tmp_path / "run")


def test_a_disk_that_fills_up_at_the_last_file(train, monkeypatch):
    """The shards are written; Megatron's metadata, which rank 0 writes last but one, finds no room."""

    class Full(writer.Writing):
        def collect(self):
            written = super().collect()
            limit_file_size(10_000)
            return written

    monkeypatch.setattr(saver, "Writing", Full)
    try:
        run_dir = train(EVERY_2, after=lambda state: limit_file_size(None))
    finally:
        limit_file_size(None)
    assert steps_in(run_dir, "save_failed") == [2, 4, 6] and steps_of(run_dir) == []
    assert events(run_dir, "save_failed")[0]["problems"] == ["File too large"]


def test_no_process_for_a_writer(train, monkeypatch):
    fork = os.fork

    def no_fork(state):
        def fail():
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

        monkeypatch.setattr(os, "fork", fail if state.step == 4 else fork)

    run_dir = train(EVERY_2, after=no_fork)
    assert events(run_dir, "save_failed")[0]["problems"] == [
        "rank 0: no writer process: Resource temporarily unavailable"
    ]
    assert steps_of(run_dir) == [6, 2]


@pytest.mark.parametrize("reaction", ["continue", "stop"])
def test_no_place_for_checkpoints(train, tmp_path, reaction):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    with (
        contextlib.nullcontext()
        if reaction == "continue"
        else pytest.raises(CheckpointError, match="no checkpoint yet")
    ):
        train(EVERY_2, f"--checkpoint.on_save_error={reaction}")
    failed = events(tmp_path / "run", "save_failed")
    assert [line["step"] for line in failed] == ([2, 4, 6] if reaction == "continue" else [2])
    assert str(tmp_path / "run" / "checkpoints") in failed[0]["problems"][0]


# ---------------------------------------------------------------- writer processes


@pytest.fixture
def long_answers(monkeypatch):
    """Writers that take their time, and whose answers are larger than a pipe."""

    def write(where, load, transforms):
        time.sleep(0.3)
        return writer.Written(files={name: {"bytes": 0, "crc32": "0" * 500_000} for name in load})

    monkeypatch.setattr(writer, "_write", write)


LOADS = [{"first": b"1"}, {"second": b"2"}, {"third": b"3"}]


@pytest.mark.timeout(30)
def test_answers_of_any_length_arrive(tmp_path, long_answers):
    written = writer._answer(*writer._start(tmp_path, LOADS, None))
    assert written.files.keys() == {"first", "second", "third"} and written.problem is None


@pytest.mark.timeout(30)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_writer_is_noticed_at_once(tmp_path, long_answers, victim):
    receiver, child = writer._start(tmp_path, LOADS, None)
    while len(found := writers_now()) < 3:
        time.sleep(0.01)
    found[victim].kill()
    assert writer._answer(receiver, child).problem == "a writer process died"
    assert not psutil.wait_procs(found, timeout=5)[1], "the others end too"


def start_and_leave(where: Path) -> None:
    writer._start(where, LOADS, None)


@pytest.mark.timeout(30)
def test_a_run_that_ends_does_not_wait_for_an_answer_that_it_never_reads(tmp_path, long_answers):
    run = multiprocessing.get_context("fork").Process(target=start_and_leave, args=(tmp_path,))
    run.start()
    run.join(10)
    left = writers_now()
    for process in left:
        process.kill()
    assert run.exitcode == 0 and not left


def test_a_short_write_is_gone_on_with(tmp_path):
    class Short(io.BytesIO):
        def write(self, data):
            return super().write(bytes(data)[:3])

    stream = writer.ChecksumStream(Short())
    data = torch.arange(10).numpy()
    assert stream.write(data) == 80
    assert stream.file.getvalue() == data.tobytes()
    assert stream.description() == {"bytes": 80, "crc32": f"{zlib.crc32(data.tobytes()):08x}"}


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


# ---------------------------------------------------------------- the average


def test_the_average_by_hand(build):
    state = build(EMA)
    assert state.ema is not None
    by_hand = [param.detach().clone() for param in unwrap(state.model)[0].parameters()]
    for _ in range(4):
        train_step(state)
        for average, param in zip(by_hand, unwrap(state.model)[0].parameters(), strict=True):
            average.copy_(0.9 * average + 0.1 * param.detach())
    ours = state.ema.average[0]
    assert sum(shard.numel() for shard in ours.values()) == sum(average.numel() for average in by_hand)
    for param, average in zip(unwrap(state.model)[0].parameters(), by_hand, strict=True):
        torch.testing.assert_close(ours[param].view_as(average), average, rtol=1e-6, atol=1e-8)


def test_validation_with_the_average(build, corpus):
    state = build(EMA, f"--data.validation.second=[{corpus}/second]", "--eval.samples=8")
    for _ in range(4):
        train_step(state)
    assert state.ema is not None
    before = [param.detach().clone() for param in unwrap(state.model)[0].parameters()]
    trained = evaluate(state, state.datasets.validation, "validation")
    with state.ema.in_model():
        averaged = evaluate(state, state.datasets.validation, "validation")
        for param in unwrap(state.model)[0].parameters():
            assert torch.equal(param.flatten(), state.ema.average[0][param])
    assert averaged["second"]["loss"] != trained["second"]["loss"]
    assert all(map(torch.equal, unwrap(state.model)[0].parameters(), before)), "the weights are back"
    assert evaluate(state, state.datasets.validation, "validation") == trained


def test_a_run_validates_with_the_average_when_asked(train, corpus):
    options = [EMA, f"--data.validation.second=[{corpus}/second]", "--eval.samples=8", "--eval.interval=2"]
    trained, averaged = train(*options, name="trained"), train(*options, "--ema.validate=true", name="averaged")
    one, other = ([line["validation"] for line in records(run) if "validation" in line] for run in (trained, averaged))
    assert len(one) == len(other) == 3 and all(a != b for a, b in zip(one, other, strict=True))
    assert same_bits(tensors(folder.final_path(trained, 6)), tensors(folder.final_path(averaged, 6)))


# ---------------------------------------------------------------- card checkpoint


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
    assert re.match(r"step_000004 +32 +1\.\d MB .* 1 ranks  latest$", newest)
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


# ---------------------------------------------------------------- two ranks


def on_two_ranks(configs: dict[str, RunConfig], base: Path) -> dict[str, Any]:
    """What a rank finds: runs whose saves fail on rank 1 alone, and its part of optimizer state and average."""
    rank = ranks_from_environment().rank
    gate = Gate(base / f"gate {rank}")

    def fail_on_rank_1(state):
        if rank == 1:
            limit_file_size(50_000 if state.step == 2 else None)
            kill_writer(state, gate)

    with after_each_step(fail_on_rank_1):
        summary = runs.train(configs["continue"])
        try:
            stopped = str(runs.train(configs["stop"]))
        except CheckpointError as error:
            stopped = str(error)
    limit_file_size(None)
    state = build_state(preflight(configs["state"], ranks_from_environment()))
    train_step(state)
    megatrons = optimizer_tensors(state)
    save_without_copies(state.optimizer)
    found = {
        "steps": summary["steps"],
        "stopped": stopped,
        "megatrons": megatrons,
        "ours": optimizer_tensors(state),
        "averaged": sum(shard.numel() for shard in state.ema.average[0].values()),
        "parameters": sum(param.numel() for param in unwrap(state.model)[0].parameters()),
    }
    parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def two_ranks(corpus, tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    base = tmp_path_factory.mktemp("two")
    options = {"continue": [], "stop": ["--checkpoint.on_save_error=stop"], "state": []}
    configs = {name: tiny_config(corpus, base / name, *TINY, EVERY_2, EMA, *more) for name, more in options.items()}
    return base, run_distributed(on_two_ranks, 2, configs, base, timeout=120)


def test_both_ranks_go_on_when_one_cannot_save(two_ranks):
    base, ranks = two_ranks
    assert [found["steps"] for found in ranks] == [STEPS, STEPS]
    full, killed = events(base / "continue", "save_failed")
    assert full["step"] == 2 and full["problems"][0].startswith("rank 1: File too large: ")
    assert killed["step"] == 4 and killed["problems"] == ["rank 1: a writer process died"]
    assert steps_of(base / "continue") == [6]
    assert_all_whole(base / "continue")


def test_or_both_stop(two_ranks):
    base, ranks = two_ranks
    assert ranks[0]["stopped"] == ranks[1]["stopped"]
    assert "step 2 could not be written: rank 1: File too large" in ranks[0]["stopped"]
    assert steps_of(base / "stop") == []


def test_two_ranks_save_megatrons_optimizer_state_once(two_ranks):
    _, (first, second) = two_ranks
    assert not first["ours"].keys() & second["ours"].keys(), "each tensor is saved by one rank"
    assert second["ours"] and same_bits(first["ours"] | second["ours"], first["megatrons"])


def test_two_ranks_share_the_average(two_ranks):
    _, ranks = two_ranks
    assert sum(found["averaged"] for found in ranks) == ranks[0]["parameters"]
    assert max(found["averaged"] for found in ranks) < 0.6 * ranks[0]["parameters"]
