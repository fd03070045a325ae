"""`card launch train` on a real SLURM: whatever interrupts a run, its curve is that of the uninterrupted one."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.cluster.jobs import resumed_steps, same_curve
from tests.cluster.slurm import running, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_two_nodes_train_one_run(lab, reference):
    started = json.loads((reference / "events.jsonl").read_text().splitlines()[0])
    assert started["ranks"] == 2 and started["restart"] == 0 and len(started["hosts"]) == 2
    (logs,) = (reference / "logs").glob(f"{started['job_id']}.0")
    assert sorted(path.name for path in logs.iterdir()) == ["rank_0.log", "rank_1.log", "srun.log"]
    assert "step 150/150" in (logs / "rank_0.log").read_text()
    assert "finished at step 150" in lab.summary("reference")
    assert lab.cluster.job(started["job_id"])["Comment"] == f"card:{reference}"
    assert [(line["reason"], line["requeued"]) for line in lab.decisions("reference")] == [("finished", False)]


def test_usr1_before_the_time_limit_saves_requeues_and_goes_on_at_the_very_step(lab, reference):
    (job,) = lab.train("usr1")
    lab.wait_for_step("usr1", 5)
    lab.cluster.call(
        "scancel", "--batch", "--signal=USR1", str(job)
    )  # as SLURM does, --signal seconds before the limit
    (decision,) = lab.wait_for_decisions("usr1", 1)
    assert decision["reason"] == "SIGUSR1: time limit" and decision["requeued"] and decision["restart"] == 0
    lab.finish("usr1", job)
    assert resumed_steps(lab.run_dir("usr1")) == [decision["step"]] and decision["step"] >= 5
    assert lab.cluster.job(job)["Restarts"] == "1"
    same_curve(lab.run_dir("usr1"), reference)


def test_scancel_saves_and_is_not_requeued(lab, reference):
    (job,) = lab.train("cancelled")
    lab.wait_for_step("cancelled", 5)
    lab.cluster.call("scancel", str(job))
    assert lab.cluster.wait_for_end(job) == "CANCELLED"
    (decision,) = lab.wait_for_decisions("cancelled", 1)
    stopped = json.loads((lab.run_dir("cancelled") / "stopped.json").read_text())
    assert stopped["reason"] == "SIGTERM" and stopped["step"] == decision["step"] >= 5
    assert decision["reason"] == "cancelled (SIGTERM)" and not decision["requeued"]
    (job,) = lab.train("cancelled")  # the same command again goes on
    lab.finish("cancelled", job)
    assert resumed_steps(lab.run_dir("cancelled")) == [stopped["step"]]
    same_curve(lab.run_dir("cancelled"), reference)


def test_preempted_by_a_higher_partition(lab, reference):
    (job,) = lab.train("preempted", "--partition=low", "--sbatch=exclusive")
    lab.wait_for_step("preempted", 5)
    wrap = ["--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    lab.cluster.call("sbatch", *wrap)
    (decision,) = lab.wait_for_decisions("preempted", 1)
    assert decision["reason"] == "preempted" and decision["requeued"]
    lab.finish("preempted", job)
    assert resumed_steps(lab.run_dir("preempted")) == [decision["step"]] and decision["step"] >= 5
    same_curve(lab.run_dir("preempted"), reference)


def test_a_killed_rank_ends_the_job_at_once_which_goes_on_from_its_last_checkpoint(lab, reference):
    (job,) = lab.train("killed")
    lab.wait_for_step("killed", 30)
    (pid,) = lab.ranks("killed", "node2")
    os.kill(pid, signal.SIGKILL)
    (decision,) = lab.wait_for_decisions("killed", 1)
    assert decision["reason"] == "a rank died (node2: task 1: Killed)" and decision["requeued"]
    assert decision["step"] >= 25 and decision["step"] % 25 == 0
    lab.finish("killed", job)
    assert resumed_steps(lab.run_dir("killed")) == [decision["step"]]
    same_curve(lab.run_dir("killed"), reference)


@pytest.mark.parametrize(
    ("node", "left"),
    [
        ("node2", ["node1", "node3"]),
        # the batch script and the ranks' meeting point are lost with it: SLURM alone can put the job back
        pytest.param("node1", ["node2", "node3"], marks=pytest.mark.cluster_rest),
    ],
)
def test_a_lost_node_is_replaced_by_the_spare(lab, reference, node, left):
    name = f"lost_{node}"
    (job,) = lab.train(name)
    lab.wait_for_step(name, 30)
    try:
        lab.cluster.crash(node)
        decision = lab.wait_for_decisions(name, 1)[0]
        ends = ("ended by SLURM: NODE FAILURE", "a rank died") if node == "node2" else ("ended by SLURM: no word",)
        assert decision["reason"].startswith(ends) and decision["requeued"]  # whoever notices first
        lab.finish(name, job)
        starts = [line for line in events(lab.run_dir(name)) if line["event"] == "started"]
        assert starts[0]["hosts"] == ["node1", "node2"] and starts[-1]["hosts"] == left
        assert resumed_steps(lab.run_dir(name))[-1] >= 25
        same_curve(lab.run_dir(name), reference)
    finally:
        lab.cluster.start_node(node)
        wait_for(f"{node} again", lambda: node in lab.cluster.idle(), context=lab.cluster.logs)


@pytest.mark.cluster_rest
def test_a_chain_of_jobs_goes_on_over_time_limits(lab, reference):
    """A minute is SLURM's shortest limit; the ranks of the first job are held, so that it does not get to the end."""
    jobs = lab.train("chain", "--time=1", "--signal=10", "--chain=5")
    lab.wait_for_step("chain", 5)
    pids = lab.ranks("chain")
    assert len(pids) == 2 and lab.cluster.state_of(jobs[1]) == "PENDING"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_for("USR1 of SLURM's own", lambda: "USR1: time is nearly up" in lab.summary("chain"), 120)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    wait_for("end", lambda: "finished at step 150" in lab.summary("chain"), 300, lambda: lab.story("chain"))
    *limits, end = lab.decisions("chain")
    assert limits and (end["reason"], end["requeued"]) == ("finished", False)
    assert {(line["reason"], line["requeued"]) for line in limits} == {("SIGUSR1: time limit", False)}
    assert [line["job_id"] for line in (*limits, end)] == jobs[: len(limits) + 1]
    assert resumed_steps(lab.run_dir("chain")) == [line["step"] for line in limits]
    same_curve(lab.run_dir("chain"), reference)
    rest = jobs[len(limits) + 1 :]
    assert {lab.cluster.wait_for_end(job) for job in rest} == {"CANCELLED"}, (
        "what is left of the chain has nothing to do"
    )


# ---------------------------------------------------------------- ends that are ends


def test_a_run_that_dies_without_progress_is_given_up(lab):
    """`card` is a program that dies at once, as with a broken driver; once after a save, from which is counted anew."""
    venv = lab.folder / "broken" / "bin"
    venv.mkdir(parents=True)
    (venv / "activate").write_text(f"PATH={venv}:$PATH\n")
    save = "mkdir -p runs/broken/checkpoints/step_000010 runs/broken/checkpoints/step_000020.unfinished-1"
    (venv / "card").write_text(f'#!/bin/bash\n[ "${{SLURM_RESTART_COUNT:-0}}" != 1 ] || {save}\nkill -SEGV $$\n')
    (venv / "card").chmod(0o755)
    (job,) = lab.train("broken", "--venv=broken", "--max-restarts=1")
    assert lab.cluster.wait_for_end(job) == "FAILED"
    decisions = [(line["restart"], line["step"], line["requeued"]) for line in lab.decisions("broken")]
    assert decisions == [(0, 0, True), (1, 10, True), (2, 10, False)]
    assert "1 restarts in a row brought no checkpoint beyond step 10" in lab.decisions("broken")[-1]["reason"]
    assert "STOPPED, not requeued: a rank died" in lab.summary("broken")


def test_what_the_ranks_refuse_is_not_started_again(lab):
    (job,) = lab.train("refused", "--data.train=[corpus/missing]")
    assert lab.cluster.wait_for_end(job) == "FAILED"
    (decision,) = lab.decisions("refused")
    assert decision["reason"].startswith("refused: ") and "corpus/missing" in decision["reason"]
    assert not decision["requeued"] and decision["restart"] == 0


# ---------------------------------------------------------------- nodes that share nothing but files


def test_nodes_with_networks_of_their_own_train_the_same_run(possible, folder, reference):
    from tests.cluster.jobs import Lab

    with running(2, network=True) as cluster:
        lab = Lab(cluster, folder)
        (job,) = lab.train("network")
        lab.finish("network", job)
    same_curve(lab.run_dir("network"), reference)


def events(run_dir):
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
