"""Hands scripts to sbatch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
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
        raise ConfigError("sbatch is not here; submit on a login node of the cluster, or take the script: --print")
    script, options = render(job), submission_options(job)
    return [_sbatch(script, options) for _ in range(job.chain)]


def _sbatch(script: str, options: Sequence[str]) -> int:
    done = subprocess.run(["sbatch", "--parsable", *options], input=script, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"sbatch refused the job: {done.stderr.strip()}; `--print` shows the script")
    return int(done.stdout.strip().split(";")[0])
