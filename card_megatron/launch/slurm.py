"""Hands scripts to sbatch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from card_megatron.config.errors import ConfigError
from card_megatron.launch.job import ARRAY_TASK, Job
from card_megatron.launch.script import render


def submission_options(job: Job) -> list[str]:
    """What sbatch is given beside the script: `card status` finds a run's folder by the job's comment."""
    if job.run_dir is None or "comment" in job.options or ARRAY_TASK in job.run_dir:
        return []
    return [f"--comment=card:{Path(job.run_dir).absolute()}"]


def submit(job: Job) -> list[int]:
    """Job numbers: one, or as many as the chain has links."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "sbatch is not here; submit on a login node of the cluster, or take the script: `card launch … --print`"
        )
    script, options = render(job), submission_options(job)
    numbers: list[int] = []
    for link in range(1, job.chain + 1):
        try:
            numbers.append(_sbatch(script, options))
        except ConfigError as error:
            if not numbers:
                raise
            queued = " ".join(map(str, numbers))
            raise ConfigError(
                f"link {link} of --chain {job.chain}: {error}. Queued already: {queued}; let them run, or: "
                f"scancel {queued}"
            ) from error
    return numbers


def outside_of_jobs(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what a job or a rank has in its environment: a job that was submitted in it would take it for its own."""
    foreign = ("SLURM_", "CARD_")
    return {
        name: value
        for name, value in environment.items()
        if name == "SLURM_CONF" or not (name.startswith(foreign) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    }


def _sbatch(script: str, options: Sequence[str]) -> int:
    done = subprocess.run(
        ["sbatch", "--parsable", *options],
        input=script,
        env=outside_of_jobs(os.environ),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ConfigError(f"sbatch refused the job: {done.stderr.strip()}; `card launch … --print` shows the script")
    return int(done.stdout.strip().split(";")[0])
