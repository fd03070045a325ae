"""What a job asks for: where it runs, what it runs in, and what becomes of it when it is interrupted."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from card_megatron.config.errors import ConfigError

ARRAY = r"{tasks}(,{tasks})*(%\d+)?".format(tasks=r"\d+(-\d+(:\d+)?)?")
"""What sbatch takes for --array."""
ARRAY_TASK = "{array}"
"""In an argument: the number of the array's task."""
OWN_OPTIONS = {
    **{
        name: f"give it as --{name}, which the script must know of"
        for name in (
            *("nodes", "gpus-per-node", "partition", "time", "signal", "requeue", "no-requeue", "account", "qos"),
            *("constraint", "exclude", "reservation", "array", "dependency", "job-name", "comment"),
        )
    },
    "ntasks": "ranks are --nodes times --ranks-per-node",
    "ntasks-per-node": "give it as --ranks-per-node",
    "cpus-per-task": "give it as --cpus-per-rank",
    "gpus": "give it as --gpus-per-node",
    "gpus-per-task": "give it as --gpus-per-node",
    "gres=gpu": "give it as --gpus-per-node, and a type of GPU as --constraint",
    "chdir": "paths are relative to the folder of submission: submit it from there",
    "open-mode": "it is append, so that a job that starts again does not lose its output",
}
"""Options of sbatch that have an option of their own, or are decided by one -> what to do instead."""


@dataclass
class Container:
    """An image that the ranks run in."""

    image: str
    runtime: str = "pyxis"
    """pyxis (Enroot, through srun's own options) or apptainer."""
    mounts: list[str] = field(default_factory=list)
    """SOURCE:TARGET beside the folder of submission."""


@dataclass
class Job:
    """One job of SLURM."""

    kind: str
    """train, data, convert or eval."""
    arguments: list[str]
    """Of `card KIND`."""
    name: str
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_rank: int | None = None
    time: str | None = None
    signal_seconds: int = 300
    """A training run is asked to save this long before its time limit."""
    requeue: bool = True
    max_restarts: int = 3
    """Restarts in a row without a new checkpoint before a run is given up."""
    chain: int = 1
    """This many jobs, each beginning when the one before it has ended."""
    array: str | None = None
    mpi: str = "pmix"
    """How ranks of MPI are started: pmix, pmi2 or mpirun."""
    run_dir: str | None = None
    """Of a training run."""
    options: dict[str, str | None] = field(default_factory=dict)
    """Any other option of sbatch -> its value, None for a flag."""
    srun: list[str] = field(default_factory=list)
    """Further options of srun."""
    venv: str | None = None
    modules: list[str] = field(default_factory=list)
    container: Container | None = None
    environment: dict[str, str] = field(default_factory=dict)
    interface: str | None = None
    written_by: str = ""
    """The command that rendered it, for the script's first lines."""

    def __post_init__(self) -> None:
        problems = [*self._problems()]
        if problems:
            raise ConfigError(problems[0] if len(problems) == 1 else "\n  - ".join(["this job cannot run:", *problems]))

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def uses_mpi(self) -> bool:
        return self.kind == "data" and "--mpi" in self.arguments

    def sbatch_options(self) -> dict[str, str | None]:
        """Every option of sbatch, by its long name."""
        found: dict[str, str | None] = {
            "job-name": self.name,
            "nodes": str(self.nodes),
            "ntasks-per-node": str(self.ranks_per_node),
        }
        if self.gpus_per_node:
            found["gpus-per-node"] = str(self.gpus_per_node)
        if self.cpus_per_rank is not None:
            found["cpus-per-task"] = str(self.cpus_per_rank)
        if self.time is not None:
            found["time"] = self.time
        if self.array is not None:
            found["array"] = self.array
        if self.kind == "train":
            found["signal"] = f"B:USR1@{self.signal_seconds}"
        found["requeue" if self.requeue else "no-requeue"] = None
        if self.chain > 1:
            found["dependency"] = "singleton"
        found |= {"open-mode": "append", "output": "%x-%A_%a.out" if self.array else "%x-%j.out"}
        return found | self.options

    def _problems(self):
        for name, value, least in (
            ("--nodes", self.nodes, 1),
            ("--ranks-per-node", self.ranks_per_node, 1),
            ("--gpus-per-node", self.gpus_per_node, 0),
            ("--signal", self.signal_seconds, 1),
            ("--max-restarts", self.max_restarts, 0),
            ("--chain", self.chain, 1),
        ):
            if value < least:
                yield f"{name} {value} must be at least {least}"
        if 0 < self.gpus_per_node < self.ranks_per_node:
            yield (
                f"--ranks-per-node {self.ranks_per_node} would share {self.gpus_per_node} GPUs; every rank needs one "
                f"of its own: --ranks-per-node {self.gpus_per_node}"
            )
        if self.time is not None:
            seconds = seconds_of(self.time)
            if self.kind == "train" and seconds is not None and seconds <= self.signal_seconds:
                yield (
                    f"--time {self.time} leaves nothing before the save, which begins {self.signal_seconds} s before "
                    "its end; give more time, or a smaller --signal"
                )
        elif self.chain > 1:
            yield f"--chain {self.chain} needs --time: a job of a chain ends at its time limit"
        if self.chain > 1 and self.kind != "train" and self.arguments[:1] != ["watch"]:
            yield f"--chain {self.chain}: its jobs would do {self.kind} again and again; train and `eval watch` go on"
        if self.array is not None and not re.fullmatch(ARRAY, self.array):
            yield f"--array {self.array} is not a list of tasks such as 0-7, 1,3,5, 0-15:4 or 0-99%4"
        if self.chain > 1 and self.array is not None:
            yield f"--chain {self.chain} goes by the job's name, which tasks of --array {self.array} share; give one"
        if self.chain > 1 and "dependency" in self.options:
            yield f"--chain {self.chain} is --dependency=singleton; leave --dependency {self.options['dependency']} out"
        if self.array is not None and self.run_dir is not None and ARRAY_TASK not in self.run_dir:
            yield (
                f"--array {self.array}: all its tasks would train in run_dir={self.run_dir}; give each its own, such "
                f"as --run_dir {self.run_dir}_{ARRAY_TASK}"
            )
        if self.array is None and any(ARRAY_TASK in argument for argument in self.arguments):
            yield f"{ARRAY_TASK} stands for a task of --array, which is not given"
        if self.kind == "convert" and self.world_size > 1:
            yield f"convert is one process, not {self.world_size}: leave --nodes and --ranks-per-node out"
        if self.container is not None and self.venv is not None:
            yield f"--venv {self.venv} and --container {self.container.image}: give one of them"
        if self.container is not None and self.run_dir is not None and not self._is_mounted(self.run_dir):
            above = absolute(self.run_dir).parent
            yield (
                f"run_dir={self.run_dir} is not mounted in the container under the same name, and would be lost with "
                f"it; add --mount {above}:{above}"
            )

    def _is_mounted(self, path: str) -> bool:
        """Below the folder of submission, which is always mounted, or a mount under its own name: the script, which
        runs outside, must find there what the ranks write."""
        mounts = [mount.split(":") for mount in (self.container.mounts if self.container else [])]
        same = [str(Path.cwd()), *(parts[0] for parts in mounts if len(parts) == 1 or parts[0] == parts[1])]
        return any(absolute(path).is_relative_to(source) for source in same)


def absolute(path: str) -> Path:
    """Without `..`, and with the links that are in it: paths are mounted by their names."""
    return Path(os.path.normpath(Path(path).absolute()))


def seconds_of(time: str) -> int | None:
    """Seconds of one of SLURM's ways to write a time; None for UNLIMITED."""
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        raise ConfigError(
            f"--time {time} is no time of SLURM's: minutes, hours:minutes:seconds or days-hours[:minutes[:seconds]]"
        )
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:  # one number is minutes, two are minutes and seconds
        hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def parse_options(entries: Sequence[str], option: str = "--sbatch") -> dict[str, str | None]:
    """NAME=VALUE or NAME, with or without dashes, as sbatch spells them."""
    found: dict[str, str | None] = {}
    for entry in entries:
        name, equals, value = entry.removeprefix("--").partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
            raise ConfigError(
                f"{option} {entry!r} is not NAME or NAME=VALUE with a long name of sbatch, such as mail-type=END"
            )
        remedy = OWN_OPTIONS.get("gres=gpu" if name == "gres" and value.startswith("gpu") else name)
        if remedy is not None:
            raise ConfigError(f"{option} {entry!r}: {remedy}")
        found[name] = value if equals else None
    return found


def quoted(argument: str) -> str:
    """A word for bash; the array's task is filled in by the job."""
    parts = [shlex.quote(part) if part else "" for part in argument.split(ARRAY_TASK)]
    return '"$SLURM_ARRAY_TASK_ID"'.join(parts) or "''"
