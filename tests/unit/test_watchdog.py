"""A rank that hangs: stacks, the name of the rank that did not arrive, and an end; heartbeats of those that live."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from card_megatron.training import watchdog
from card_megatron.training.watchdog import EXIT_CODE, Watchdog
from tests.curves import tiny_config

ROOT = Path(__file__).parents[2]
LIMIT = 60.0
MINUTES = 0.05
"""The limit of the runs that hang here: 3 seconds."""


def python(code: str, *arguments: object) -> list[str]:
    """The command that runs a piece of Python as `card` would run: from anywhere, with this project's tests."""
    found = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    return [sys.executable, "-c", found + code, *map(str, arguments)]


def start(code: str, *arguments: object, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        python(code, *arguments),
        **dict(env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, text=True, start_new_session=True),
        **dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE),
    )


def ends(*processes: subprocess.Popen) -> list[tuple[int, str]]:
    """(exit code, standard error) of each; those that outlive the limit are killed, and fail the test."""
    try:
        errors = [process.communicate(timeout=LIMIT)[1] for process in processes]
        return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]
    finally:
        for process in processes:
            process.kill()


# ---------------------------------------------------------------- a rank that hangs


def sleep_for_ever() -> None:
    time.sleep(3600)


def hold_the_lock_for_ever() -> None:
    ctypes.PyDLL(None).sleep(3600)  # a C function that keeps Python's lock: no Python thread runs any more


def hang_in_a_run(corpus: str, run_dir: str, how: str, store: str) -> None:
    """One of two ranks: the second one hangs in its third step."""
    import torch.distributed as dist

    from card_megatron.platform import init_process_group, install, ranks_from_environment

    install()
    ranks = ranks_from_environment()
    init_process_group(ranks, store=dist.FileStore(store, ranks.world_size))
    from card_megatron.training import step
    from card_megatron.training.run import train_run

    read = step.next_batch

    def read_or_hang(iterator):
        if ranks.rank == 1 and (batch := read(iterator)).index[0] >= 2 * 8:
            HANGS[how]()
        return batch if ranks.rank == 1 else read(iterator)

    step.next_batch = read_or_hang
    train_run(tiny_config(corpus, run_dir, f"--guard.hang_minutes={MINUTES}", "--train.micro_batch_size=1"), ranks)


HANGS = {"sleeps": sleep_for_ever, "holds the lock": hold_the_lock_for_ever}
HANG = "from tests.unit.test_watchdog import hang_in_a_run; hang_in_a_run(*sys.argv[1:])"


@pytest.fixture(scope="module")
def hung(corpus, tmp_path_factory):
    """how -> (run directory, ends of both ranks); the runs hang side by side."""
    base = tmp_path_factory.mktemp("hung")
    processes = {
        how: [
            start(HANG, corpus, base / how, how, base / f"{how} store", RANK=str(rank), WORLD_SIZE="2")
            for rank in range(2)
        ]
        for how in HANGS
    }
    return {how: (base / how, ends(*both)) for how, both in processes.items()}


@pytest.mark.parametrize(("how", "function"), [("sleeps", "sleep_for_ever"), ("holds the lock", "hold_the_lock")])
def test_a_hang_ends_all_ranks_and_names_the_one_that_did_not_arrive(hung, how, function):
    run_dir, ((code_0, error_0), (code_1, _)) = hung[how]
    assert code_0 == EXIT_CODE, error_0
    assert code_1 == (EXIT_CODE if how == "sleeps" else 1), "the backstop in C knows no other exit code than 1"
    assert "rank 0 made no progress for 3 s at step 2 (training, in " in error_0
    (behind,) = [line for line in error_0.splitlines() if "did not arrive" in line]
    # a rank that can run no Python cannot say where it is: what it said some seconds ago stands
    assert ": rank 1 (step 2, training, in sleep_for_ever, " in behind or (": rank 1 (step " in behind and code_1 == 1)
    stacks = [(run_dir / "heartbeats" / f"rank_{rank}.stacks").read_text() for rank in range(2)]
    assert function in stacks[1] and "hang_in_a_run" in stacks[1]
    assert "train_step" in stacks[0] and "hang_in_a_run" in error_0


def test_a_hang_leaves_the_last_collectives_of_each_rank(hung):
    run_dir, ((_, error_0), _) = hung["sleeps"]
    folder = run_dir / "flight_recorder"
    assert f"rank 0: its last collectives are in {folder / 'rank_0'}" in error_0
    last = []
    for rank in range(2):
        entries = pickle.loads((folder / f"rank_{rank}").read_bytes())["entries"]
        last.append([entry["collective_seq_id"] for entry in entries if entry["process_group"][1] == "default_pg"][-1])
        assert any("all_reduce" in entry["profiling_name"] for entry in entries)
    assert last == [last[0]] * 2, "rank 1 sleeps before the sums over all ranks of step 3"


def test_heartbeats_say_where_each_rank_stands(hung):
    run_dir, _ = hung["sleeps"]
    for rank in range(2):
        beat = json.loads((run_dir / "heartbeats" / f"rank_{rank}.json").read_text())
        assert (beat["rank"], beat["step"], beat["doing"]) == (rank, 2, "training")
        assert beat["pid"] > 0 and 0 <= time.time() - beat["time"] < 600


# ---------------------------------------------------------------- the watchdog alone


def test_a_rank_that_never_started_is_named(tmp_path):
    """Its file may be there, from an attempt that got further than this one."""
    folder = tmp_path / "heartbeats"
    folder.mkdir()
    old = {"rank": 1, "step": 500, "doing": "training", "time": time.time() - 3600, "pid": 1}
    (folder / "rank_1.json").write_text(json.dumps(old))
    dog = Watchdog(tmp_path, 0, 3, 0)
    dog.close()
    assert dog._who_is_behind().startswith("did not arrive: rank 1 (")
    assert "rank 2 (" in dog._who_is_behind() and "rank 0" not in dog._who_is_behind()


def test_stacks_of_an_earlier_attempt_stay(tmp_path):
    for _ in range(2):
        dog = Watchdog(tmp_path, 0, 1, 0)
        dog.stacks.write("stacks\n")
        dog.close()
    assert (tmp_path / "heartbeats" / "rank_0.stacks").read_text() == "stacks\nstacks\n"


def test_beats_keep_a_run_alive_and_a_late_one_calls_the_watchdog_off(tmp_path, monkeypatch):
    left = []
    monkeypatch.setattr(watchdog.os, "_exit", left.append)
    dog = Watchdog(tmp_path, 0, 1, 0.4 / 60)
    for step in range(8):
        dog.beat(step, "training")
        time.sleep(0.1)
    time.sleep(0.5)  # the limit has passed, and the watchdog waits for what the others say
    dog.beat(8, "training")
    time.sleep(0.3)
    dog.close()
    assert not left


def test_no_watchdog_with_0(tmp_path):
    dog = Watchdog(tmp_path, 0, 1, 0)
    dog.last_beat -= 1e6
    time.sleep(0.2)
    dog.close()
    beat = json.loads((tmp_path / "heartbeats" / "rank_0.json").read_text())
    assert beat["doing"] == "ended" and (tmp_path / "heartbeats" / "rank_0.stacks").read_text() == ""
