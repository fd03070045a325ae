"""One real SLURM for all tests of the session; skipped with a loud reason where there can be none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs import Lab
from tests.cluster.slurm import Cluster, running, why_not


@pytest.fixture(scope="session")
def possible() -> None:
    reason = why_not()
    if reason is not None:
        warnings.warn(f"NOTHING OF THE CLUSTER WAS TESTED: {reason}", stacklevel=1)
        pytest.skip(f"no SLURM: {reason}")


@pytest.fixture(scope="session")
def cluster(possible) -> Iterator[Cluster]:
    """Three nodes of two CPUs: two for a job, and a spare."""
    with running(3) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def folder(corpus, tmp_path_factory) -> Path:
    """Where jobs are submitted: a run's configuration and its data."""
    folder = tmp_path_factory.mktemp("submitted")
    (folder / "corpus").symlink_to(corpus)
    (folder / "run.yaml").write_text(RUN)
    return folder


@pytest.fixture(scope="session")
def lab(cluster, folder) -> Lab:
    return Lab(cluster, folder)


@pytest.fixture(autouse=True)
def nothing_stays(request) -> Iterator[None]:
    """No job of a test that failed is left to the next one."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").cancel_everything()


@pytest.fixture(scope="session")
def reference(lab) -> Path:
    """The run that nothing interrupts, on two nodes."""
    (job,) = lab.train("reference")
    assert lab.cluster.wait_for_end(job, 240) == "COMPLETED", lab.story("reference")
    return lab.run_dir("reference")


RUN = """\
model: {num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, num_query_groups: 2,
        max_position_embeddings: 64, hidden_dropout: 0.1}
data: {train: [corpus/first, corpus/second], tokenizer: corpus/tokenizer.model, sequence_length: 32, num_workers: 1}
train: {train_iters: 150, global_batch_size: 8, micro_batch_size: 2}
optimizer: {lr: 0.001, lr_warmup_iters: 2}
logging: {interval: 1, tensorboard: false}
eval: {interval: 0, at_start: false}
checkpoint: {interval: 25}
"""
"""A real GPTModel whose 150 steps take some seconds: long enough to be interrupted, dropout included."""
