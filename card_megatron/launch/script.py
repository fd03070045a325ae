"""The sbatch script of a job: readable, commented, complete."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from card_megatron.launch.environment import variables_of
from card_megatron.launch.job import ARRAY_TASK, Job, quoted
from card_megatron.launchers import ASKED, GPUS

WIDTH = 110
REASONS = {
    "signal": "before the time limit the batch script, and it alone, is told",
    "requeue": "SLURM itself puts the job back after a lost node",
    "dependency": "one job of this name at a time: the next begins when this one has ended",
    "open-mode": "a job that starts again goes on in the same file",
}
"""Comments above options whose reason is not obvious."""


def render(job: Job) -> str:
    """The whole script."""
    parts = [_header(job), _software(job), _environment(job), _body(job)]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _header(job: Job) -> list[str]:
    lines = [
        "#!/bin/bash",
        f"# card {job.kind}: nodes x ranks on each = {job.nodes} x {job.ranks_per_node}",
        *_comment(f"Written by: {job.written_by}" if job.written_by else ""),
    ]
    for name, value in job.sbatch_options().items():
        if name in REASONS:
            lines.append(f"# {REASONS[name]}")
        lines.append(f"#SBATCH --{name}" + ("" if value is None else f"={shlex.quote(value)}"))
    return lines


def _software(job: Job) -> list[str]:
    lines = [
        "set -uo pipefail",
        'cd "$SLURM_SUBMIT_DIR" || exit 1  # paths below are relative to where it was submitted',
    ]
    if job.modules:
        lines.append(f"module load {' '.join(map(shlex.quote, job.modules))}")
    if job.venv is not None:
        lines.append(f"source {shlex.quote(job.venv)}/bin/activate || exit 1")
    return lines


def _environment(job: Job) -> list[str]:
    """User's and site's values come first; an option given to `card launch` counts before both."""
    found = variables_of(job.kind, gpus=job.gpus_per_node > 0, nodes=job.nodes, interface=job.interface)
    lines = ["# ---------------------------------------------------------------- environment"]
    for variable in found:
        if variable.name not in job.environment:
            lines += [f"# {variable.reason}", f"export {variable.name}=${{{variable.name}:-{variable.value}}}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    lines += [
        "# any other number of ranks is refused: a wrong --mpi would start as many lone processes",
        f"export {ASKED}={job.world_size}",
    ]
    if job.gpus_per_node:
        lines += ["# a rank that sees no GPU is refused", f"export {GPUS}={job.gpus_per_node}"]
    if job.cpus_per_rank is not None:
        lines += [
            "# since SLURM 22.05 srun does not take this from the job",
            f"export SRUN_CPUS_PER_TASK={job.cpus_per_rank}",
        ]
    return lines


def _body(job: Job) -> list[str]:
    command = _wrapped(["card", job.kind, *map(quoted, job.arguments)])
    if job.kind != "train":
        return [*_plain(job, command)]
    assert job.run_dir is not None, "a training run has a run_dir"
    restarts = (Path(__file__).parent / "restarts.sh").read_text(encoding="utf-8").rstrip("\n")
    return [
        "# ---------------------------------------------------------------- what runs",
        f"run_dir={quoted(job.run_dir)}",
        f"max_restarts={job.max_restarts}  # in a row, without a new checkpoint",
        f"requeue={'yes' if job.requeue else 'no'}",
        f"chain={'yes' if job.chain > 1 else 'no'}",
        f"command=({command})",
        "",
        restarts.replace("@SRUN@", _launcher(job, '"${command[@]}"', logs=True)),
    ]


def _plain(job: Job, command: str) -> Iterator[str]:
    """A job that SLURM may start again as it is: builds and evaluations go on where they were."""
    yield "# ---------------------------------------------------------------- what runs"
    yield f"command=({command})"
    if job.world_size == 1:
        yield _launcher(job, '"${command[@]}"', logs=False)
        return
    yield "logs=logs/$SLURM_JOB_NAME-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}  # a file a rank"
    yield 'mkdir -p "$logs"'
    yield _launcher(job, '"${command[@]}"', logs=True)
    yield "code=$?"
    yield 'cat "$logs/rank_0.log"  # the rank that speaks'
    if not (job.uses_mpi and job.mpi == "mpirun"):
        yield "# srun returns 0 also where a node could not open a log, and started nothing"
        yield f"[[ $(find \"$logs\" -type f -name 'rank_*.log' | wc -l) == {job.world_size} ]] || code=1"
    yield '(( code == 0 )) || echo "exit code $code: see $logs"'
    yield "exit $code"


def _launcher(job: Job, command: str, *, logs: bool) -> str:
    """One process a rank, ended together."""
    if job.uses_mpi and job.mpi == "mpirun":
        return _mpirun(job, command, logs)
    words = ["srun", "--kill-on-bad-exit=1", *(f"--mpi={job.mpi}" for _ in range(job.uses_mpi))]
    if logs:
        words.append('--output="${logs//%/%%}/rank_%t.log"')
    words += map(shlex.quote, job.srun)
    container = job.container
    if container is not None and container.runtime == "pyxis":
        mounts = ",".join(["$PWD:$PWD", *container.mounts])
        words += [f"--container-image={shlex.quote(container.image)}", f'--container-mounts="{mounts}"']
        words += ['--container-workdir="$PWD"']
    return _wrapped([*words, *_inside(job), command])


def _mpirun(job: Job, command: str, logs: bool) -> str:
    words = ["mpirun", "-n", str(job.world_size), "--map-by", f"ppr:{job.ranks_per_node}:node", *_inside(job), command]
    return _wrapped(words) + (
        ' > "$logs/rank_0.log" 2>&1  # of all ranks: mpirun has no files for each' if logs else ""
    )


def _inside(job: Job) -> list[str]:
    """What stands before the command in a container of Apptainer's."""
    container = job.container
    if container is None or container.runtime != "apptainer":
        return []
    mounts = ",".join(["$PWD", *container.mounts])
    gpus = ["--nv"] if job.gpus_per_node else []
    return ["apptainer", "exec", *gpus, f'--bind="{mounts}"', '--pwd="$PWD"', shlex.quote(container.image)]


def _wrapped(words: list[str]) -> str:
    """Words on lines that can be read, the later ones indented."""
    lines, line = [], ""
    for word in words:
        if line and len(line) + len(word) > WIDTH:
            lines.append(line)
            line = "  "
        line += word if line in ("", "  ") else f" {word}"
    return " \\\n".join([*lines, line])


def _comment(text: str) -> list[str]:
    if not text:
        return []
    return [f"# {line}" for line in _wrapped(text.split(" ")).split("\n")]


def fill_array_task(arguments: list[str], array: str | None) -> list[str]:
    """Arguments of an array's first task, for checks before submission."""
    first = (array or "0").replace(",", "-").split("-")[0].partition(":")[0].partition("%")[0]
    return [argument.replace(ARRAY_TASK, first) for argument in arguments]
