"""What Slurm knows of a job: its state, and the run directory that `card launch` wrote into its comment."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from card_megatron.config.errors import CardError

MARK = "card:"
"""A job's comment is this, then the run directory."""
FIELDS = {"JobState": "state", "Reason": "reason", "Restarts": "restarts", "NodeList": "nodes", "RunTime": "run_time"}


def is_job_id(text: str) -> bool:
    """123, or 123_4 of an array."""
    return re.fullmatch(r"\d+(_\d+)?", text) is not None


def run_of_job(job_id: str) -> Path:
    """The run directory of a job; raises CardError where Slurm has no such job, or the job no run."""
    if shutil.which("scontrol") is None and shutil.which("sacct") is None:
        raise CardError(f"{job_id} is no folder, and there is no Slurm here to ask for a job; give the run directory")
    comment = _fields(_ask("scontrol", "show", "job", "-o", job_id)).get("Comment")
    if comment is None:  # jobs that ended some minutes ago are only in the accounting, where there is one
        accounted = _ask("sacct", "-n", "-X", "-P", "-o", "Comment", "-j", job_id).strip()
        comment = accounted.splitlines()[-1] if accounted else None
    if comment is None:
        raise CardError(f"Slurm knows no job {job_id} any more; give the run directory instead")
    if not comment.startswith(MARK):
        raise CardError(
            f"job {job_id} has the comment {comment!r}, which names no run (`card launch` writes {MARK}RUN_DIR); "
            "give the run directory instead"
        )
    return Path(comment.removeprefix(MARK))


def job_facts(job_id: str) -> dict[str, Any]:
    """{"id", "state", …}; only the id where Slurm cannot be asked or has forgotten the job."""
    found = _fields(_ask("scontrol", "show", "job", "-o", job_id))
    return {"id": job_id} | {ours: found[name] for name, ours in FIELDS.items() if name in found}


def _ask(*command: str) -> str:
    """What a Slurm command prints; nothing where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _fields(line: str) -> dict[str, str]:
    """`Key=value Key=value` as `scontrol show job -o` prints it; values may have spaces in them."""
    return dict(re.findall(r"(?:^|\s)([A-Z][\w:/]*)=(.*?)(?=\s+[A-Z][\w:/]*=|\s*$)", line.strip()))
