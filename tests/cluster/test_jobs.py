"""Preprocessing, evaluation and conversion as jobs of a real SLURM: what they write is what one process writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from card_megatron.cli import main as card
from card_megatron.data.python_docs import python_documents
from card_megatron.launchers import port_of_job
from tests.evaluation import scores_of, write_documents

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
AS_ROOT = ["--env=OMPI_ALLOW_RUN_AS_ROOT=1", "--env=OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"]


@pytest.fixture(scope="module")
def texts(folder) -> Path:
    """Documents in many shards, so that every rank has some, and what one process makes of them."""
    lines = [json.dumps({"text": text[:2000]}) + "\n" for text in python_documents()[:300]]
    (folder / "texts.jsonl").write_text("".join(lines))
    tokenizer = folder / "corpus" / "tokenizer.model"
    card(["data", "build", str(folder / "texts.jsonl"), f"--output={folder}/alone", f"--tokenizer={tokenizer}"])
    return folder / "alone"


def build(lab, name: str, *options: str) -> int:
    arguments = [
        "build",
        "texts.jsonl",
        f"--output={name}",
        "--tokenizer=corpus/tokenizer.model",
        "--shard-bytes=20000",
    ]
    where = ["--nodes=2", "--ranks-per-node=2", "--time=10", f"--job-name={name}"]
    (job,) = lab.launch("data", *arguments, *where, *AS_ROOT, *options)
    return job


def output(lab, name: str, job: int) -> str:
    logs = [lab.folder / f"{name}-{job}.out", *sorted((lab.folder / "logs").glob(f"{name}-{job}.*/*"))]
    return "\n".join(f"--- {path}\n{path.read_text()}" for path in logs if path.exists())


@pytest.mark.parametrize("launcher", ["pmix", "mpirun"])
def test_preprocessing_under_mpi(lab, texts, launcher):
    job = build(lab, launcher, f"--mpi={launcher}")
    assert lab.cluster.wait_for_end(job) == "COMPLETED", output(lab, launcher, job)
    for suffix in (".bin", ".idx"):
        assert Path(f"{lab.folder}/{launcher}{suffix}").read_bytes() == Path(f"{texts}{suffix}").read_bytes()


def test_an_srun_that_does_not_fit_the_mpi_is_refused_rather_than_run_by_four_lone_processes(lab, texts):
    job = build(lab, "misfit", "--mpi=pmi2")
    assert lab.cluster.wait_for_end(job) == "FAILED"
    assert "CARD_WORLD_SIZE=4 ranks were asked for, and MPI started 1" in output(lab, "misfit", job)
    assert not list(lab.folder.glob("misfit.*"))


def test_distributed_evaluation(lab, reference, tmp_path, monkeypatch):
    """Two ranks on two nodes share the requests; the scores are one process's."""
    monkeypatch.chdir(lab.folder)
    documents = write_documents(tmp_path)
    arguments = [str(reference), "--tasks=hellaswag", f"--data={documents}", "--output=scores.json"]
    (job,) = lab.launch("eval", *arguments, "--nodes=2", "--gpus-per-node=0", "--time=10", "--job-name=scores")
    assert lab.cluster.wait_for_end(job) == "COMPLETED", output(lab, "scores", job)
    scores = json.loads((lab.folder / "scores.json").read_text())
    assert scores["results"] == scores_of(reference, documents)
    assert len(scores["requests_per_rank"]) == 2 and all(scores["requests_per_rank"])
    assert "| hellaswag" in (lab.folder / f"scores-{job}.out").read_text()


@pytest.mark.cluster_rest
def test_conversion(lab, reference):
    (job,) = lab.launch("convert", "to-hf", str(reference), "exported", "--time=10", "--job-name=exported")
    assert lab.cluster.wait_for_end(job) == "COMPLETED", output(lab, "exported", job)
    assert (lab.folder / "exported" / "model.safetensors").exists()


# ---------------------------------------------------------------- ranks, as the real launchers make them

ASK = "from card_megatron.launchers import *; import os; r = ranks_from_environment(); print(r, *meeting_point(r))"


def submit(lab, tmp_path, script: str) -> tuple[int, str]:
    """A script on two nodes with two tasks each; returns its number and its output."""
    command = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=2", f"--output={tmp_path}/out"]
    text = f"#!/bin/bash\nexport PYTHONPATH={Path(__file__).parents[2]}\n{script}\n"
    done = subprocess.run(command, env=lab.cluster.environment, input=text, capture_output=True, text=True, timeout=60)
    state = lab.cluster.wait_for_end(int(done.stdout))
    assert state == "COMPLETED", (tmp_path / "out").read_text()
    return int(done.stdout), (tmp_path / "out").read_text()


def ask(lab, tmp_path, *launcher: str) -> list[str]:
    """What ranks_from_environment() and meeting_point() say in every process of a job, in order."""
    job, out = submit(lab, tmp_path, f"{' '.join(launcher)} {sys.executable} -c '{ASK}'")
    ports = [str(port_of_job(job, step)) for step in (0, 1)]  # mpirun's processes belong to the step of its daemons
    lines = [line for line in out.splitlines() if line.startswith("Ranks(")]
    assert len({line.split()[-1] for line in lines}) == 1
    return sorted(line.replace(ports[0], "PORT").replace(ports[1], "PORT") for line in lines)


def expected(launcher: str) -> list[str]:
    """Four ranks on two nodes, which meet on the first."""
    return [
        f"Ranks(rank={rank}, world_size=4, local_rank={rank % 2}, launcher='{launcher}') node1 PORT"
        for rank in range(4)
    ]


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("srun", ["srun"]),
        ("srun", ["srun", "--mpi=pmix"]),
        ("mpich", ["srun", "--mpi=pmi2"]),
        ("openmpi", ["mpirun", "--allow-run-as-root", "-n", "4", "--map-by", "ppr:2:node"]),
    ],
)
def test_ranks_and_where_they_meet(lab, tmp_path, launcher, words):
    if words[0] == "mpirun":
        words = [str(Path(sys.executable).parent / "mpirun"), *words[1:]]
    assert ask(lab, tmp_path, *words) == expected(launcher)


def test_ranks_of_mpi4py_under_srun(lab, tmp_path):
    assert ask(lab, tmp_path, "CARD_LAUNCHER=mpi4py", "srun", "--mpi=pmix") == expected("mpi4py")


def test_a_batch_script_is_one_process(lab, tmp_path):
    """It has SLURM_PROCID and SLURM_NTASKS=4 in its environment, and would wait for three ranks that never come."""
    question = ASK.replace(", *meeting_point(r)", "")
    _, out = submit(lab, tmp_path, f"{sys.executable} -c '{question}'")
    assert "Ranks(rank=0, world_size=1, local_rank=0, launcher=None)" in out
