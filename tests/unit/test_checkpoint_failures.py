"""Saves that fail because of the disk or of a writer process, and what a run does then."""

from __future__ import annotations

import errno
import functools
import io
import json
import multiprocessing
import os
import time
import zlib
from pathlib import Path

import psutil
import pytest
import torch

from card_megatron.checkpoint import files, folder, saver, writer
from card_megatron.config.errors import CheckpointError
from card_megatron.training.state import TrainState
from tests.checkpoints import (
    EMA,
    EVERY_2,
    Gate,
    assert_all_whole,
    kill_writer,
    limit_file_size,
    same_bits,
    steps_in,
    steps_of,
    writers_now,
)
from tests.runs import events, tensors

# ---------------------------------------------------------------- saves that fail


def fill_disk(state: TrainState, gate: Gate) -> None:
    limit_file_size(100_000 if state.step == 4 else None)


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


def test_a_disk_that_fills_up_at_the_last_file(train, tmp_path, monkeypatch):
    """The shards are written; Megatron's metadata, which rank 0 writes last but one, finds no room."""

    class Full(writer.Writing):
        def collect(self):
            written = super().collect()
            limit_file_size(10_000)
            return written

    monkeypatch.setattr(saver, "Writing", Full)
    try:
        with pytest.raises(CheckpointError, match=r"step 6, the last one, could not be saved .*is None\. Make room"):
            train(EVERY_2, after=lambda state: limit_file_size(None))
    finally:
        limit_file_size(None)
    run_dir = tmp_path / "run"
    assert json.loads((run_dir / "summary.json").read_text())["checkpoint"] is None
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
    said = "the last one, could not be saved" if reaction == "continue" else "no checkpoint yet"
    with pytest.raises(CheckpointError, match=said):
        train(EVERY_2, f"--checkpoint.on_save_error={reaction}")
    failed = events(tmp_path / "run", "save_failed")
    assert [line["step"] for line in failed] == ([2, 4, 6] if reaction == "continue" else [2])
    assert str(tmp_path / "run" / "checkpoints") in failed[0]["problems"][0]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
@pytest.mark.parametrize("operation", ["make", "write", "rename"])
def test_a_disk_that_refuses_anything_leaves_the_last_checkpoint_alone(train, monkeypatch, operation, number):
    """Root may write everywhere: the answers of a read-only or forbidden directory are given in its place."""
    steps = []

    def refuse(doing, path, source=None):
        if doing == operation and steps[-1] == 4:
            raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(files, "step", refuse)
    run_dir = train("--checkpoint.async_save=false", EVERY_2, after=lambda state: steps.append(state.step))
    (failed,) = events(run_dir, "save_failed")
    assert failed["step"] == 4 and os.strerror(number) in failed["problems"][0]
    assert steps_of(run_dir) == [6, 2]
    assert_all_whole(run_dir)


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
    receiver, child = writer._start(tmp_path, LOADS, None)
    written = writer._answer(receiver)
    child.join()
    assert written.files.keys() == {"first", "second", "third"} and written.problem is None


@pytest.mark.timeout(30)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_writer_is_noticed_at_once(tmp_path, long_answers, victim):
    receiver, child = writer._start(tmp_path, LOADS, None)
    while len(found := writers_now()) < 3:
        time.sleep(0.01)
    found[victim].kill()
    assert writer._answer(receiver).problem == "a writer process died"
    child.join()
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
