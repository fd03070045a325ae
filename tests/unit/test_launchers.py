"""Ranks of every launcher: environments as the real ones make them, and the real mpirun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from card_megatron.cli import main
from card_megatron.config import ConfigError
from card_megatron.config.errors import TemporaryRefusal
from card_megatron.launchers import (
    PORTS,
    Ranks,
    hosts_of,
    job_facts,
    meeting_point,
    port_of_job,
    processes_started,
    ranks_from_environment,
    refuse_missing_gpus,
    refuse_taken_port,
)

# read from the processes of torchrun 2.13, SLURM 22.05's srun (plain, --mpi=pmi2), Open MPI 5.0 and MPICH 5.0
BATCH = {
    **{"SLURM_JOB_ID": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4"},
    **{"SLURM_JOB_NODELIST": "node[2-3]", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODELIST": "node[2-3]"},
}
STEP = {
    **BATCH,
    **{"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0"},
    **{"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node[2-3]", "SLURM_STEP_NUM_NODES": "2"},
}
PMI2 = {"PMI_FD": "13", "PMI_JOBID": "8.1", "PMI_RANK": "3", "PMI_SIZE": "4"}
PMIX = {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.8.2", "PMIX_HOSTNAME": "node3"}
OPEN_MPI = {
    **{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
    **{"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-vm-9113@1"},
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
DAEMONS = {**STEP, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
"""mpirun and mpiexec start their own daemons with srun: one a node."""
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("launcher", "environment"),
    [
        ("torchrun", TORCHRUN),
        ("torchrun", {**DAEMONS, **TORCHRUN}),
        ("srun", STEP),
        ("srun", {**STEP, **PMIX}),
        ("mpich", {**STEP, **PMI2}),
        ("mpich", MPICH),
        ("mpich", {**DAEMONS, **MPICH}),
        ("openmpi", OPEN_MPI),
        ("openmpi", {**DAEMONS, **OPEN_MPI}),
    ],
)
def test_ranks_of_every_launcher(launcher, environment):
    assert ranks_from_environment(environment) == Ranks(3, 4, 1, launcher)
    assert ranks_from_environment({**environment, "CARD_WORLD_SIZE": "4"}) == Ranks(3, 4, 1, launcher)
    with pytest.raises(ConfigError, match=rf"CARD_WORLD_SIZE=8 ranks were asked for, and {launcher} started 4; start"):
        ranks_from_environment({**environment, "CARD_WORLD_SIZE": "8"})


def test_a_process_without_a_launcher_is_alone_and_so_is_a_batch_script():
    assert ranks_from_environment({}) == Ranks(0, 1, 0, None)
    assert ranks_from_environment(BATCH) == Ranks(0, 1, 0, None)
    with pytest.raises(ConfigError, match="CARD_WORLD_SIZE=4 ranks were asked for, and nothing started 1"):
        ranks_from_environment({**BATCH, "CARD_WORLD_SIZE": "4"})


def test_a_launcher_can_be_named():
    both = {**STEP, **TORCHRUN, "CARD_LAUNCHER": "srun"}
    assert ranks_from_environment(both).launcher == "srun"
    with pytest.raises(ConfigError, match="CARD_LAUNCHER=openmpi, but this process was not started by it"):
        ranks_from_environment({**STEP, "CARD_LAUNCHER": "openmpi"})
    with pytest.raises(ConfigError, match="CARD_LAUNCHER=pbs is unknown; choose from torchrun, openmpi, mpich, srun"):
        ranks_from_environment({"CARD_LAUNCHER": "pbs"})


def test_a_rank_of_a_gpu_job_that_sees_no_gpu_is_refused():
    asked = {"CARD_GPUS_PER_NODE": "8"}
    with pytest.raises(ConfigError, match=r"CARD_GPUS_PER_NODE=8, but CUDA finds no GPU on .*--nv .*drain the node"):
        refuse_missing_gpus(False, asked)
    refuse_missing_gpus(True, asked)
    refuse_missing_gpus(False, {})


def test_what_may_be_gone_at_the_next_start_is_not_told_as_a_refusal(tmp_path, monkeypatch):
    """Such as a port that is taken: a job's script must start the run again, later."""
    monkeypatch.setenv("CARD_REFUSED", str(tmp_path / "refused.txt"))
    for error, told in ((TemporaryRefusal("in use"), False), (ConfigError("wrong"), True)):

        def refuse(arguments, error=error):
            raise error

        monkeypatch.setattr("card_megatron.commands.status.run", refuse)
        with pytest.raises(SystemExit, match=str(error)):
            main(["status"])
        assert (tmp_path / "refused.txt").exists() == told


def test_how_many_processes_were_started():
    assert processes_started(STEP) == 4 and processes_started({**DAEMONS, **OPEN_MPI}) == 4
    assert processes_started(BATCH) is None


# ---------------------------------------------------------------- where they meet


def test_ranks_of_a_job_meet_on_its_first_node_at_a_port_of_its_own():
    assert meeting_point(Ranks(3, 4, 1, "srun"), STEP) == ("node2", port_of_job(8, 0))
    assert meeting_point(Ranks(3, 4, 1, "openmpi"), {**DAEMONS, **OPEN_MPI})[0] == "node2"
    again = meeting_point(Ranks(3, 4, 1, "srun"), {**STEP, "SLURM_RESTART_COUNT": "1"})
    assert again == ("node2", port_of_job(8, 1)), "the first may have been taken"
    given = {**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
    assert meeting_point(Ranks(3, 4, 1, "srun"), given) == ("10.0.0.1", 4000)
    with pytest.raises(ConfigError, match="without MASTER_ADDR and MASTER_PORT"):
        meeting_point(Ranks(0, 2, 0, "torchrun"), {"RANK": "0", "WORLD_SIZE": "2"})


def test_jobs_and_steps_that_share_a_node_do_not_clash():
    ports = [port_of_job(job, step) for job in range(1000, 3500) for step in range(8)]
    assert len(set(ports)) == len(ports) and all(port in PORTS for port in ports)


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TemporaryRefusal, match=f"port {port} of .* is taken .* set MASTER_PORT to a free one"):
            refuse_taken_port(port)
    refuse_taken_port(port)


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("gpu[008-010,012],login1", ["gpu008", "gpu009", "gpu010", "gpu012", "login1"]),
        ("a1,b[1,3]", ["a1", "b1", "b3"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("rack[1-2]-x", ["rack1-x", "rack2-x"]),
    ],
)
def test_node_lists_are_read_as_scontrol_reads_them(nodes, hosts):
    assert list(hosts_of(nodes)) == hosts


def test_facts_of_a_job():
    assert job_facts({}) == {}
    facts = {"job_id": 8, "restart": 0, "node_list": "node[2-3]", "hosts": ["node2", "node3"]}
    assert job_facts(STEP) == facts and job_facts({**STEP, "SLURM_RESTART_COUNT": "2"}) == {**facts, "restart": 2}


# ---------------------------------------------------------------- the real mpirun

JOINED = """
from card_megatron.platform import init_process_group, install, ranks_from_environment
import os, torch, torch.distributed as dist
install()
ranks = ranks_from_environment()
init_process_group(ranks, timeout_minutes=1)
total = torch.ones(1) * ranks.rank
dist.all_reduce(total)
assert dist.get_world_size() == 3 and dist.get_rank() == ranks.rank and total.item() == 3
assert int(os.environ["RANK"]) == ranks.rank and os.environ["WORLD_SIZE"] == "3", "for libraries that look there"
os.write(1, f"{ranks.rank} of {ranks.world_size} by {ranks.launcher}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("launcher", ["openmpi", "mpi4py"])
def test_ranks_of_a_real_mpirun_find_each_other(launcher):
    """Outside of SLURM they agree through MPI on where to meet."""
    mpirun = Path(sys.executable).parent / "mpirun"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))}
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    chosen = {"CARD_LAUNCHER": "mpi4py"} if launcher == "mpi4py" else {}
    done = subprocess.run(
        [str(mpirun), "-n", "3", "--oversubscribe", sys.executable, "-c", JOINED],
        **dict(env={**kept, **as_root, **chosen, "CARD_WORLD_SIZE": "3"}, capture_output=True, text=True, timeout=150),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:-1]) == [f"{rank} of 3 by {launcher}" for rank in range(3)]
