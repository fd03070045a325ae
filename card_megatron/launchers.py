"""Which rank this process is, by whatever started it: torchrun, srun, mpirun (Open MPI, MPICH) or any MPI with mpi4py.

Imports nothing heavy: preprocessing asks this too, without torch. The names below were read from the real launchers.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from card_megatron.config.errors import ConfigError, TemporaryRefusal

ASKED = "CARD_WORLD_SIZE"
"""How many ranks a job was meant to have; `card launch` sets it, and any other number is refused."""
GPUS = "CARD_GPUS_PER_NODE"
"""How many GPUs of a node a job has; `card launch` sets it, and a rank that sees none of them is refused."""
CHOSEN = "CARD_LAUNCHER"
"""Names a launcher of LAUNCHERS where what is found by itself is not meant."""
PORTS = range(12_000, 32_000)
"""Below what the kernel gives to outgoing connections (32768 and above), above what services use."""
STEPS_OF_A_JOB = 8
"""Steps of one job that get ports of their own; jobs clash if their numbers are 2,500 apart."""


@dataclass(frozen=True)
class Ranks:
    """This process among all (`rank` of `world_size`) and on its machine (`local_rank`)."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launcher: str | None = None
    """What started it; None for a process that was started alone."""


def ranks_from_environment(environment: Mapping[str, str] = os.environ) -> Ranks:
    """The one place that knows launchers; a lone process where there is none. Refuses another number than was asked."""
    chosen = environment.get(CHOSEN)
    if chosen is not None and chosen not in LAUNCHERS:
        raise ConfigError(f"{CHOSEN}={chosen} is unknown; choose from {', '.join(LAUNCHERS)}")
    for name in [chosen] if chosen else LAUNCHERS:
        found = LAUNCHERS[name](environment)
        if found is not None:
            refuse_other_world(found.world_size, environment, name)
            return found
    if chosen is not None:
        raise ConfigError(f"{CHOSEN}={chosen}, but this process was not started by it; unset {CHOSEN}")
    refuse_other_world(1, environment, "nothing")
    return Ranks()


def refuse_other_world(found: int, environment: Mapping[str, str], launcher: str) -> None:
    """N processes that each believe to be alone would do everything N times, and write to the same files."""
    asked = environment.get(ASKED)
    if asked is not None and int(asked) != found:
        raise ConfigError(
            f"{ASKED}={asked} ranks were asked for, and {launcher} started {found}; start them with srun or mpirun as "
            f"the job's script does (`srun --mpi` must fit the MPI), or unset {ASKED}"
        )


def refuse_missing_gpus(cuda: bool, environment: Mapping[str, str] = os.environ) -> None:
    """A rank that sees no GPU would train on the CPU, a thousand times slower, without a word."""
    asked = environment.get(GPUS, "0")
    if int(asked) > 0 and not cuda:
        raise ConfigError(
            f"{GPUS}={asked}, but CUDA finds no GPU on {socket.gethostname()}; a container needs --nv (Apptainer) or "
            "NVIDIA's hook (Enroot), and torch a build with CUDA; where `nvidia-smi` fails too, drain the node "
            f"(--exclude {socket.gethostname()})"
        )


def processes_started(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many processes the launcher started, whatever became of them; None without one that says so."""
    sizes = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
    return next((int(environment[name]) for name in sizes if name in environment), None)


# ---------------------------------------------------------------- launchers


def _torchrun(environment: Mapping[str, str]) -> Ranks | None:
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    local = int(environment.get("LOCAL_RANK", 0))
    return Ranks(int(environment["RANK"]), int(environment["WORLD_SIZE"]), local, "torchrun")


def _open_mpi(environment: Mapping[str, str]) -> Ranks | None:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK")]
    if not all(name in environment for name in names):
        return None
    rank, world_size, local_rank = (int(environment[name]) for name in names)
    return Ranks(rank, world_size, local_rank, "openmpi")


def _mpich(environment: Mapping[str, str]) -> Ranks | None:
    """Hydra's mpiexec, Intel MPI's, and `srun --mpi=pmi2`, which leaves the local rank to SLURM's own variable."""
    if "PMI_RANK" not in environment or "PMI_SIZE" not in environment:
        return None
    local = int(environment.get("MPI_LOCALRANKID", environment.get("SLURM_LOCALID", 0)))
    return Ranks(int(environment["PMI_RANK"]), int(environment["PMI_SIZE"]), local, "mpich")


def _slurm(environment: Mapping[str, str]) -> Ranks | None:
    """A step of srun. A batch script has SLURM_PROCID and SLURM_NTASKS too, and is one process all the same."""
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PROCID" not in environment:
        return None
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    rank, world_size, local_rank = (int(environment[name]) for name in names)
    return Ranks(rank, world_size, local_rank, "srun")


def _mpi4py(environment: Mapping[str, str]) -> Ranks | None:
    """Any other MPI: PMIx tells a process its rank, and only MPI itself how many there are."""
    if "PMIX_RANK" not in environment and environment.get(CHOSEN) != "mpi4py":
        return None
    return _ask_mpi(lambda comm, shared: Ranks(comm.Get_rank(), comm.Get_size(), shared.Get_rank(), "mpi4py"))


LAUNCHERS: dict[str, Callable[[Mapping[str, str]], Ranks | None]] = {
    "torchrun": _torchrun,
    "openmpi": _open_mpi,  # before srun: inside a job mpirun starts its own daemons with srun
    "mpich": _mpich,
    "srun": _slurm,
    "mpi4py": _mpi4py,
}
"""In the order in which they are asked: what was started last, and stands nearest to the process, comes first."""


def _ask_mpi(question: Callable[[Any, Any], Any]) -> Any:
    """An answer of MPI's communicators (all ranks, those of this machine)."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"ranks of an MPI are told by mpi4py, which cannot be used here ({error}): pip install "
            "-e '.[mpi]' in the checkout, or start the ranks with torchrun or srun"
        ) from error
    return question(MPI.COMM_WORLD, MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED))


# ---------------------------------------------------------------- where ranks meet


def meeting_point(ranks: Ranks, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT: as given; from the job's node list and number; or agreed upon through MPI."""
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    nodes = environment.get("SLURM_STEP_NODELIST" if ranks.launcher == "srun" else "SLURM_JOB_NODELIST")
    if nodes is not None and "SLURM_JOB_ID" in environment:
        address = address or next(hosts_of(nodes))
        # a job that is started again tries another port of its own: the last one may have been taken
        step = int(environment.get("SLURM_STEP_ID", 0)) + int(environment.get("SLURM_RESTART_COUNT", 0))
        port = port or str(port_of_job(int(environment["SLURM_JOB_ID"]), step))
    if address is None or port is None:
        if ranks.launcher == "torchrun":
            raise ConfigError(
                "RANK and WORLD_SIZE are set without MASTER_ADDR and MASTER_PORT; set them, or use torchrun"
            )
        address, port = _agree_through_mpi(address, port)
    return address, int(port)


def _agree_through_mpi(address: str | None, port: str | None) -> tuple[str, str]:
    """Rank 0's host and a port that is free there. MPI is left again: its end would wait for ranks that are stuck."""
    from mpi4py import MPI  # ranks_from_environment() or the next line has refused without it

    def agree(comm: Any, shared: Any) -> tuple[str, str]:
        return comm.bcast((address or socket.gethostname(), port or str(free_port())) if comm.Get_rank() == 0 else None)

    found = _ask_mpi(agree)
    MPI.Finalize()
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def port_of_job(job: int, step: int = 0) -> int:
    """Every rank finds the same one without asking; jobs and steps that share a node have different ones."""
    return PORTS.start + (job * STEPS_OF_A_JOB + step % STEPS_OF_A_JOB) % len(PORTS)


def refuse_taken_port(port: int) -> None:
    """Asked by rank 0, which is going to listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise TemporaryRefusal(
                f"port {port} of {socket.gethostname()}, where the ranks meet, is taken ({error.strerror}); "
                "set MASTER_PORT to a free one"
            ) from error


# ---------------------------------------------------------------- jobs of SLURM


def hosts_of(nodes: str) -> Iterator[str]:
    """The names of a node list such as gpu[01-03,07],login1: what `scontrol show hostnames` prints, without it."""
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", nodes):
        yield from _expanded(part)


def _expanded(part: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, after = rest.partition("]")
    for piece in inside.split(","):
        first, _, last = piece.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield from (f"{before}{number:0{len(first)}d}{end}" for end in _expanded(after))


SUMMARY, REFUSED, FINISHED = "CARD_SUMMARY", "CARD_REFUSED", "CARD_FINISHED"
"""Files that a job's script names: its readable summary, and where a refusal and the end of a run are to be told."""


def summarise(text: str, environment: Mapping[str, str] = os.environ) -> None:
    """A line of the job's summary, in the form of those that its script writes; nothing without a job that has one."""
    if SUMMARY in environment:
        restart = environment.get("SLURM_RESTART_COUNT", 0)
        with contextlib.suppress(OSError), Path(environment[SUMMARY]).open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%F %T')} job {environment.get('SLURM_JOB_ID')}.{restart}: {text}\n")


def tell_refusal(error: Exception, environment: Mapping[str, str] = os.environ) -> None:
    """What was refused once is refused again: the job's script must know that it need not start it another time."""
    if REFUSED in environment:
        with contextlib.suppress(OSError):
            Path(environment[REFUSED]).write_text(f"{error}\n", encoding="utf-8")


def tell_end(environment: Mapping[str, str] = os.environ) -> None:
    """A run got to its end: the job's script takes nobody else's word for it, srun's exit code least of all."""
    if FINISHED in environment:
        Path(environment[FINISHED]).touch()


def job_facts(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The job of SLURM that this process belongs to, for records: number, restarts so far, nodes."""
    if "SLURM_JOB_ID" not in environment:
        return {}
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    return {
        "job_id": int(environment["SLURM_JOB_ID"]),
        "restart": int(environment.get("SLURM_RESTART_COUNT", 0)),  # not set in a first run
        "node_list": nodes,
        "hosts": list(hosts_of(nodes)),
    }
