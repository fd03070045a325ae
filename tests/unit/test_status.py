"""`card status` on what real runs left behind: complete, stopped, dead, running, half-written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from card_megatron.cli import main
from card_megatron.commands import slurm_job
from card_megatron.commands.status import with_job
from card_megatron.config import RunConfig
from card_megatron.config.errors import CardError
from card_megatron.testing import run_distributed
from card_megatron.training.status import Status, read_status, restarts_of, stragglers_of
from tests.curves import tiny_config
from tests.runs import train


def stop_and_go_on(config: RunConfig, copy: str) -> None:
    """A run that is asked to end after step 4, kept as it then is, and started again."""
    train(config, stop_at=4)
    shutil.copytree(config.run_dir, copy)
    train(config)


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("status")
    validation = [f"--data.validation.second=[{corpus}/second]", "--eval.samples=8", "--eval.interval=6"]
    config = tiny_config(corpus, base / "complete", "--train.train_iters=6", "--logging.interval=2", *validation)
    run_distributed(stop_and_go_on, 1, config, str(base / "stopped"), timeout=200)
    return base


@pytest.fixture
def copied(runs, tmp_path) -> Path:
    """The stopped run, to be changed."""
    return Path(shutil.copytree(runs / "stopped", tmp_path / "copied"))


def test_a_complete_run(runs):
    status = read_status(runs / "complete")
    last = [json.loads(line) for line in (runs / "complete" / "metrics.jsonl").read_text().splitlines()]
    training = [record for record in last if "loss" in record][-1]
    assert (status.state, status.step, status.steps) == ("complete", 6, 6)
    assert status.tokens == 6 * 8 * 32
    assert (status.loss, status.tokens_per_second) == (training["loss"], training["tokens_per_second"])
    assert status.eta_seconds == 0.0
    assert status.validation == {"step": 6, "loss": {"second": last[-1]["validation"]["second"]["loss"]}}
    assert status.checkpoint is not None and status.checkpoint["step"] == 6
    assert [(restart["step"], restart["reason"]) for restart in status.restarts] == [(4, "asked to end by SIGTERM")]
    assert status.stragglers == [] and status.job is None


def test_a_stopped_run(runs):
    status = read_status(runs / "stopped")
    assert (status.state, status.step, status.restarts) == ("stopped", 4, [])
    assert status.why.startswith("by SIGTERM at step 4, ") and status.eta_seconds and status.eta_seconds > 0


def test_half_written_lines_change_nothing(copied):
    before = read_status(copied)
    for name in ("metrics.jsonl", "events.jsonl", "restarts.jsonl"):
        with (copied / name).open("a") as file:
            file.write('{"step": 5, "steps": 6, "lo')
    assert read_status(copied) == before


def test_a_run_that_left_no_word_is_dead(copied):
    (copied / "stopped.json").unlink()
    events = (copied / "events.jsonl").read_text().splitlines()
    (copied / "events.jsonl").write_text("".join(f"{line}\n" for line in events if '"stopped"' not in line))
    status = read_status(copied)
    assert status.state == "dead" and "no process has it" in status.why
    # killed rather than ended, on another machine, a minute ago; and some seconds ago: then it may well be alive
    path = copied / "heartbeats" / "rank_0.json"
    for age, state in ((3600, "dead"), (5, "running")):
        path.write_text(json.dumps({"rank": 0, "step": 4, "doing": "training", "time": time.time() - age, "pid": 1}))
        assert read_status(copied).state == state


HOLD = (
    "import sys; from card_megatron.training.run import hold; f = hold(sys.argv[1]); print('held', flush=True); input()"
)


def test_a_held_lock_means_running_and_a_left_one_does_not(copied):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(copied)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        status = read_status(copied)
        assert status.state == "running" and f"process {holder.pid} on " in status.why
    finally:
        holder.kill()
        holder.wait(30)
    assert read_status(copied).state == "stopped"


def test_the_launchers_reasons_come_before_the_runs_own():
    started = {"event": "started"}
    events = [
        {"time": 1.0, **started},
        {"time": 2.0, "event": "stopped", "reason": "SIGUSR1", "step": 4},
        {"time": 3.0, **started},
        {"time": 3.5, "event": "resumed", "step": 4},
        {"time": 5.0, **started},
    ]
    decisions = [{"time": 2.5, "job_id": "7", "restart": 1, "reason": "time limit", "step": 4, "requeued": True}]
    reasons = [(restart["step"], restart["reason"]) for restart in restarts_of(events, decisions)]
    assert reasons[0] == (4, "time limit") and reasons[1][1].startswith("ended without a word")


def decision(time: float, reason: str, requeued: bool, restart: int = 0) -> str:
    line = {"time": int(time), "job_id": 7, "restart": restart, "reason": reason, "step": 4, "requeued": requeued}
    return json.dumps(line) + "\n"


def test_starts_that_died_before_they_could_say_anything_are_restarts_too(tmp_path):
    died, now = "a rank died (node1: task 0: Killed)", time.time()
    lines = [decision(now - 9, died, True), decision(now - 6, died, True, 1)]
    (tmp_path / "restarts.jsonl").write_text("".join(lines))
    status = read_status(tmp_path)  # there is nothing else: no start got so far
    assert [restart["reason"] for restart in status.restarts] == [died, died] and status.job == {"id": "7"}
    assert status.state == "dead" and status.why.startswith(f"to be started again: {died}")
    (tmp_path / "restarts.jsonl").write_text("".join([*lines, decision(now, "refused: no data", False, 2)]))
    status = read_status(tmp_path)
    assert status.state == "stopped" and status.why.startswith("refused: no data (step 4, ")
    assert len(status.restarts) == 2


def test_the_jobs_last_word_is_the_state_until_the_next_start(copied):
    started = json.loads((copied / "events.jsonl").read_text().splitlines()[0])["time"]
    for when, why in ((time.time(), "time limit reached"), (started - 100, "by SIGTERM at step 4")):
        (copied / "restarts.jsonl").write_text(decision(when, "time limit reached", False))
        assert read_status(copied).why.startswith(why)


def test_only_those_are_slow_that_still_are():
    def slow(rank: int) -> dict:
        return {"event": "straggler", "ranks": [rank], "text": f"rank {rank}"}

    assert stragglers_of([slow(1), slow(2), {"event": "straggler_over", "ranks": [1]}]) == ["rank 2"]
    assert stragglers_of([slow(1), {"event": "started"}]) == []


# ---------------------------------------------------------------- the command

QUICK = "import sys; from card_megatron.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"


def test_the_command_prints_it_and_needs_no_torch(runs):
    done = subprocess.run(
        [sys.executable, "-c", QUICK, "status", str(runs / "complete")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for expected in ("state        complete: 6 steps", "step         6 of 6 (100.0%)", "asked to end by SIGTERM"):
        assert expected in done.stdout


def test_json_and_watching_until_the_end(runs, capsys):
    main(["status", str(runs / "complete"), "--json", "--watch", "0.1"])
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["state"] == "complete"


@pytest.mark.parametrize(("what", "message"), [("nothing", "is no folder"), ("", "is no run"), ("12345", "12345")])
def test_where_there_is_no_run_it_says_so(tmp_path, monkeypatch, what, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(SystemExit) as error:
        main(["status", what or str(tmp_path)])
    assert message in str(error.value) and "run" in str(error.value)


# ---------------------------------------------------------------- Slurm


def test_a_run_whose_job_waits_is_not_dead():
    dead, running = Status("run", "dead", "no word"), Status("run", "running", "here")
    assert with_job(dead, {"id": "7", "state": "PENDING"}).state == "queued"
    assert with_job(dead, {"id": "7", "state": "RUNNING"}).why == "was dead: no word"
    assert with_job(dead, {"id": "7", "state": "FAILED"}).state == with_job(dead, {"id": "7"}).state == "dead"
    assert with_job(running, {"id": "7", "state": "RUNNING"}).state == "running"


# with two blanks behind the comment, as Slurm 22.05 has them
SHOWN = (
    "JobId=7 JobName=card UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 "
    "RunTime=00:01:02 NodeList=node[1-2] Comment=card:/data/my runs/card  WorkDir=/tmp "
)


def test_the_fields_of_a_job(monkeypatch):
    monkeypatch.setattr(slurm_job, "_ask", lambda *command: SHOWN if command[0] == "scontrol" else "")
    monkeypatch.setattr(slurm_job.shutil, "which", lambda name: name)
    assert slurm_job.run_of_job("7") == Path("/data/my runs/card")
    facts = slurm_job.job_facts("7")
    assert facts == {
        **{"id": "7", "state": "RUNNING", "reason": "None", "restarts": "2"},
        **{"nodes": "node[1-2]", "run_time": "00:01:02"},
    }
    monkeypatch.setattr(slurm_job, "_ask", lambda *command: "JobId=7 Comment=mine" if command[0] == "scontrol" else "")
    with pytest.raises(CardError, match="'mine', which names no run"):
        slurm_job.run_of_job("7")
    monkeypatch.setattr(slurm_job, "_ask", lambda *command: "card:/data/run\n" if command[0] == "sacct" else "")
    assert slurm_job.run_of_job("7") == Path("/data/run")
    assert slurm_job.is_job_id("7_1") and not slurm_job.is_job_id("runs/7")
