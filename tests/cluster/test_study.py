"""A study on a real SLURM: each run is a job, its evaluations follow it, and one command collects them."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
STUDY = """\
title: One run
config: run.yaml
seeds: [1]
every: {train.train_iters: 8, checkpoint.interval: 8}
runs:
  card: {objective.name: card}
evaluate:
  denoising: denoising --data text=text.txt --window 16 --depth 4
"""


def study(lab, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "card_megatron", "study", "run", "study.yaml", *words],
        **dict(cwd=lab.folder, env=lab.cluster.environment, capture_output=True, text=True, timeout=240),
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


def test_runs_and_evaluations_are_jobs_that_the_study_collects(lab):
    (lab.folder / "study.yaml").write_text(STUDY)
    (lab.folder / "text.txt").write_text("The value of the name is a string, not a list of names. " * 20)
    on_slurm = ("--slurm", "--nodes=1", "--gpus-per-node=0", "--time=10")
    submitted = study(lab, *on_slurm)
    assert "card-s1: left alone, its jobs are in the queue" in study(lab, *on_slurm)
    trains, evaluates = (int(number) for number in re.findall(r"card-s1: job (\d+) ", submitted))
    for job in (trains, evaluates):
        assert lab.cluster.wait_for_end(job, 240) == "COMPLETED", lab.story("study/card-s1")

    collected = study(lab)
    assert "complete" in collected and "training" not in collected and "evaluating" not in collected, collected
    record = json.loads((lab.folder / "results" / "card-s1.json").read_text())
    assert record["steps"] == 8 and len([name for name in record["cells"] if " nll behind " in name]) == 4
