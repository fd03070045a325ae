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
    left = ["finished", "rank_0.log", "rank_1.log", "srun.log"]
    assert sorted(path.name for path in logs.iterdir()) == left
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
    lab.wait_for_checkpoint("killed")
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
    lab.wait_for_checkpoint(name)
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


def instead_of_card(lab, name: str, script: str) -> str:
    """The option that makes a job run this script as its `card`: what a run does, without the run."""
    venv = lab.folder / f"{name}.venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "activate").write_text(f"PATH={venv}:$PATH\n")
    (venv / "card").write_text(f"#!/bin/bash\n{script}\n")
    (venv / "card").chmod(0o755)
    return f"--venv={name}.venv"


def test_a_run_that_dies_without_progress_is_given_up(lab):
    """`card` is a program that dies at once, as with a broken driver; once after a save, from which is counted anew."""
    save = "mkdir -p runs/broken/checkpoints/step_000010 runs/broken/checkpoints/step_000020.unfinished-1"
    card = instead_of_card(lab, "broken", f'[ "${{SLURM_RESTART_COUNT:-0}}" != 1 ] || {save}\nkill -SEGV $$')
    (job,) = lab.train("broken", card, "--max-restarts=1")
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


def test_a_run_that_could_not_start_is_not_finished_though_srun_says_so(lab):
    """A node that cannot open a rank's log starts nothing, and srun returns 0. Also: a % in the name of a run."""
    card = instead_of_card(lab, "unlogged", 'echo here; [[ $SLURM_PROCID != 0 ]] || touch "$CARD_FINISHED"')
    for name, reason in (("good%t", "finished"), ("bad%t", "a rank died")):
        (job,) = lab.train(name, card, "--max-restarts=0", "--sbatch=hold")
        logs = lab.run_dir(name) / "logs" / f"{job}.0"
        if name == "bad%t":
            for rank in (0, 1):
                (logs / f"rank_{rank}.log").mkdir(parents=True)
        lab.cluster.call("scontrol", "release", str(job))
        state = lab.cluster.wait_for_end(job)
        (decision,) = lab.decisions(name)
        assert decision["reason"].startswith(reason) and not decision["requeued"], lab.story(name)
        assert state == ("COMPLETED" if name == "good%t" else "FAILED")
    assert (lab.run_dir("good%t") / "logs").is_dir()
    (log,) = (lab.run_dir("good%t") / "logs").glob("*.0/rank_0.log")
    assert log.read_text() == "here\n"


def test_the_death_of_one_task_of_an_array_is_its_own(lab):
    """SLURM gives the last task the number of the whole array."""
    card = instead_of_card(
        lab,
        "array",
        """(( SLURM_ARRAY_TASK_ID == 1 || ${SLURM_RESTART_COUNT:-0} )) || kill -SEGV $$
        for _ in {1..300}; do [[ ! -e array.go ]] || break; sleep 0.2; done; touch "$CARD_FINISHED\"""",
    )
    where = ["--nodes=1", "--gpus-per-node=0", "--time=20", "--array=1-2", "--run_dir=runs/array_{array}"]
    lab.launch("train", "--config=run.yaml", *where, card)
    decisions = lab.wait_for_decisions("array_2", 1)
    assert decisions[0]["requeued"]
    wait_for("its second start", lambda: lab.summary("array_2").count("starts at") == 2, 120)
    (lab.folder / "array.go").touch()
    for task, starts in (("array_1", 1), ("array_2", 2)):
        wait_for("end", lambda task=task: "finished" in lab.summary(task), 120, lambda task=task: lab.story(task))
        assert lab.summary(task).count("starts at") == starts, lab.summary(task)


@pytest.mark.cluster_rest
def test_a_save_that_takes_longer_than_the_signal_leaves_is_a_time_limit_and_no_cancellation(lab):
    """The last link of a chain that has no other: one that ends in time says that the chain is over."""
    wait, word = "for _ in {1..1000}; do sleep 1; done", r"""'{\n "reason": "SIGUSR1"\n}\n'"""
    slow = instead_of_card(lab, "slow", f"trap '' USR1 TERM; {wait}")
    save = f"save() {{ printf {word} > runs/quick/stopped.json; exit; }}"
    quick = instead_of_card(lab, "quick", f"{save}\ntrap save USR1\n{wait}")
    (job,) = lab.train("slow", slow, "--nodes=1", "--time=1", "--signal=10")
    chain = lab.train("quick", quick, "--nodes=1", "--time=1", "--signal=10", "--chain=2")
    other = lab.launch(
        *("train", "--config=run.yaml", "--run_dir=other/quick", "--nodes=1", "--gpus-per-node=0", "--time=1"),
        *("--signal=10", "--sbatch=hold", f"--job-name={lab.cluster.job(chain[0])['JobName']}"),
    )
    assert lab.cluster.wait_for_end(job, 240) == "TIMEOUT"
    (decision,) = lab.decisions("slow")
    assert decision["reason"] == "time limit reached before the save was done: raise --signal", lab.story("slow")
    assert lab.cluster.wait_for_end(chain[1], 360) == "COMPLETED", lab.story("quick")
    first, last = (line for line in lab.summary("quick").splitlines() if "before the time limit;" in line)
    assert first.endswith(f"job {chain[1]} of the chain goes on")
    assert last.endswith("the chain is over, not finished: submit it again")
    assert lab.cluster.state_of(other[0]) == "PENDING", "another run's, of the same name"


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
