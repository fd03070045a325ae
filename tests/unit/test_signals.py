"""Signals: heard from the first moment on, answered in good order once, and at once the second time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from card_megatron.checkpoint import folder
from tests.faults import kill_all
from tests.runs import events
from tests.unit.test_cli import CARD, MOCK, RUN, TORCHRUN
from tests.unit.test_watchdog import LIMIT, start

# ---------------------------------------------------------------- the handlers alone

AT_TORCHS_IMPORT = """
import os, signal
from card_megatron.cli import main

def hook(event, arguments):
    if event == "import" and arguments[0] == "torch":
        from card_megatron.training import signals
        handlers = [signal.getsignal(number) for number in signals.SIGNALS]
        taken = all(getattr(handler, "__module__", "") == signals.__name__ for handler in handlers)
        os.write(1, b"taken" if taken else b"not taken")
        os._exit(0)

sys.addaudithook(hook)
assert "torch" not in sys.modules
main(["train", "--data.mock=true"])
"""
WAITING = """
import os, time
from card_megatron.training import signals
signals.install()
os.write(1, b"ready")
while True:
    time.sleep(0.02)
    if signals.received():
        os.write(1, str(int(signals.received())).encode())
        break
time.sleep(60)
"""
STUCK_IN_C = """
import ctypes, os
from card_megatron.training import signals
signals.install()
os.write(1, b"ready")
mutex = ctypes.create_string_buffer(64)
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(mutex)  # the second one waits for ever, as a collective of a dead rank does
"""


@contextlib.contextmanager
def running(code: str, **environment: str):
    """A process that has said it is ready."""
    process = start(code, **environment)
    try:
        assert os.read(process.stdout.fileno(), 5) == b"ready"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_handlers_stand_before_torch_is_imported():
    process = start(AT_TORCHS_IMPORT)
    stdout, stderr = process.communicate(timeout=LIMIT)
    assert stdout == "taken", stderr


def test_two_signals_within_a_second_are_one_request():
    with running(WAITING) as process:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert int(os.read(process.stdout.fileno(), 2)) in (signal.SIGINT, signal.SIGTERM)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert process.poll() is None


@pytest.mark.parametrize("code", [WAITING, STUCK_IN_C], ids=["waiting", "stuck in C"])
def test_a_later_signal_leaves_at_once(code):
    with running(code) as process:
        process.send_signal(signal.SIGTERM)
        time.sleep(1.2)
        assert process.poll() is None
        process.send_signal(signal.SIGUSR1)
        assert process.wait(5) == 128 + signal.SIGUSR1
        assert "SIGUSR1 again: leaving at once, without a save" in process.stderr.read()


def test_in_a_job_of_slurm_a_later_term_leaves_the_save_its_time():
    """It comes when a grace time or a time limit is over; KILL follows when SLURM means it."""
    with running(WAITING, SLURM_JOB_ID="1") as process:
        process.send_signal(signal.SIGUSR1)
        time.sleep(1.2)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 128 + signal.SIGINT


def test_a_child_does_not_pass_its_signals_on():
    """A data worker or a writer that is told to end must not end the run."""
    code = """
import os, signal, time
from card_megatron.training import signals
signals.install()
child = os.fork()
if child == 0:
    time.sleep(60)
time.sleep(0.1)
os.kill(child, signal.SIGTERM)
time.sleep(0.2)
os.kill(child, signal.SIGKILL)
os.write(1, str(signals.received()).encode())
"""
    process = start(code)
    assert process.communicate(timeout=LIMIT)[0] == "None"


# ---------------------------------------------------------------- real runs

LONG = ["--train.train_iters=100000", *[option for option in RUN if "run_dir" not in option]]


@contextlib.contextmanager
def training(run_dir: Path, command: list[str], *options: str):
    """A run that has taken its first steps."""
    process = subprocess.Popen(
        [*command, "train", *MOCK, *LONG, f"--run_dir={run_dir}", *options],
        **dict(env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, start_new_session=True),
        **dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE),
    )
    try:
        deadline = time.monotonic() + LIMIT
        metrics = run_dir / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
            time.sleep(0.05)
        yield process
    finally:
        kill_all(process)
        process.communicate()


def stopped_in_good_order(run_dir: Path, name: str) -> int:
    """The step of a run that a signal ended, with its marker, its event and its checkpoint."""
    marker = json.loads((run_dir / "stopped.json").read_text())
    newest = folder.visible(run_dir)[0]
    assert marker["reason"] == name and marker["checkpoint"] == str(newest)
    assert folder.step_of(newest) == marker["step"] == events(run_dir, "stopped")[-1]["step"]
    assert not (run_dir / "summary.json").exists()
    return marker["step"]


def test_term_to_every_process_of_a_run_saves_and_ends(tmp_path):
    """As scancel sends it: the data workers get it too, and the step that is under way needs their samples."""
    with training(tmp_path, CARD, "--data.num_workers=2") as process:
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(LIMIT) == 0, process.stderr.read()
        stopped_in_good_order(tmp_path, "SIGTERM")


def test_ctrl_c_saves_and_ends(tmp_path):
    with training(tmp_path, CARD) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 0, process.stderr.read()
        stopped_in_good_order(tmp_path, "SIGINT")


def test_a_signal_to_one_rank_under_torchrun_stops_all_and_the_run_goes_on_later(tmp_path):
    with training(tmp_path, TORCHRUN) as process:
        worker = json.loads((tmp_path / "heartbeats" / "rank_1.json").read_text())["pid"]
        os.kill(worker, signal.SIGTERM)
        assert process.wait(LIMIT) == 0, process.stderr.read()
        step = stopped_in_good_order(tmp_path, "SIGTERM")
    with training(tmp_path, TORCHRUN, f"--train.train_iters={step + 5}") as process:
        assert process.wait(LIMIT) == 0, process.stderr.read()
    assert [event["step"] for event in events(tmp_path, "resumed")] == [step]
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == step + 5
    assert not (tmp_path / "stopped.json").exists()
