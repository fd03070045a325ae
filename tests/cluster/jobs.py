"""Jobs as users submit them, by `card launch` alone, and what they leave behind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cluster.slurm import Cluster, wait_for
from tests.runs import records

NODES = ["--nodes=2", "--gpus-per-node=0", "--time=20"]


class Lab:
    """A cluster, and the folder that jobs are submitted from."""

    def __init__(self, cluster: Cluster, folder: Path):
        self.cluster, self.folder = cluster, folder

    def run_dir(self, name: str) -> Path:
        return self.folder / "runs" / name

    def launch(self, *arguments: str) -> list[int]:
        """Submit what `card launch` renders, and only that; returns the numbers of the jobs."""
        done = subprocess.run(
            [sys.executable, "-m", "card_megatron", "launch", *arguments],
            **dict(cwd=self.folder, env=self.cluster.environment, capture_output=True, text=True, timeout=120),
        )
        assert done.returncode == 0, done.stderr
        submitted = re.search(r"submitted jobs? ([\d, ]+):", done.stdout)
        assert submitted is not None, done.stdout
        return [int(number) for number in submitted[1].split(", ")]

    def train(self, name: str, *options: str) -> list[int]:
        return self.launch("train", "--config=run.yaml", f"--run_dir=runs/{name}", *NODES, *options)

    # ------------------------------------------------------------ a run in progress

    def wait_for_step(self, name: str, step: int) -> None:
        def reached() -> bool:
            path = self.run_dir(name) / "metrics.jsonl"
            return path.exists() and f'"step": {step},' in path.read_text()

        wait_for(f"step {step} of {name}", reached, 180, lambda: self.story(name))

    def wait_for_checkpoint(self, name: str) -> None:
        """Training goes on while it is written: a step says nothing of the checkpoint before it."""

        def saved() -> bool:
            path = self.run_dir(name) / "events.jsonl"
            return path.exists() and '"event": "save_finished"' in path.read_text()

        wait_for(f"a checkpoint of {name}", saved, 180, lambda: self.story(name))

    def ranks(self, name: str, *nodes: str) -> list[int]:
        """Processes of a run's ranks on some nodes, their data workers not among them."""
        found = []
        for node in nodes or self.cluster.names:
            pids = self.cluster.pids_of(node, "card train", f"--run_dir=runs/{name}")
            parents = {pid: parent_of(pid) for pid in pids}
            found += [pid for pid, parent in parents.items() if parent not in parents and is_python(pid)]
        return found

    def wait_for_decisions(self, name: str, count: int) -> list[dict[str, Any]]:
        wait_for(
            f"{count} decisions on {name}", lambda: len(self.decisions(name)) >= count, 180, lambda: self.story(name)
        )
        return self.decisions(name)

    def finish(self, name: str, job: int) -> None:
        assert self.cluster.wait_for_end(job, 300) == "COMPLETED", self.story(name)

    # ------------------------------------------------------------ what it left behind

    def decisions(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir(name) / "restarts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def summary(self, name: str) -> str:
        path = self.run_dir(name) / "logs" / "summary.log"
        return path.read_text() if path.exists() else ""

    def story(self, name: str) -> str:
        """All that helps to understand a failure."""
        parts = [self.summary(name), self.cluster.logs()]
        for path in sorted([*self.folder.glob(f"{name}-*.out"), *(self.run_dir(name) / "logs").glob("*/*")]):
            parts.append(f"--- {path.relative_to(self.folder)}\n" + "\n".join(path.read_text().splitlines()[-20:]))
        return "\n".join(parts)


def same_curve(run_dir: Path, reference: Path) -> None:
    """Every record of every step, once and in order, equal bit for bit."""
    ours, theirs = records(run_dir), records(reference)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    assert ours == theirs


def resumed_steps(run_dir: Path) -> list[int]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["event"] == "resumed"]


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def is_python(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("python")
    except OSError:
        return False
