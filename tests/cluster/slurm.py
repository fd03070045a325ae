"""A real SLURM with several nodes on one machine: slurmctld, munged and a slurmd a node, started and stopped here.

A node is a mount and a UTS namespace: its own hostname, its own /etc/hosts, its own slurmd on its own port; with
`network=True` also a network namespace on a private bridge, so that 127.0.0.1 is not shared. Keys, sockets, ports and
state are this cluster's own: nothing of a SLURM that the machine may have is touched. Everything is ended by its
process id.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PACKAGES = ["slurmctld", "slurmd", "slurm-client", "munge", "iproute2", "util-linux", "libpmix-dev"]
"""libpmix-dev: mpi/pmix opens the unversioned libpmix.so, which stands in that package alone."""
PROGRAMS = ["slurmctld", "slurmd", "sbatch", "srun", "munged", "unshare", "ip"]
PATIENCE = 120.0
"""Seconds that anything here is waited for: a loaded machine is slow."""

CONFIGURATION = """\
ClusterName=card
SlurmctldHost={host}({controller})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits before it may start again (120 s by default)
AuthInfo=socket={state}/munge/socket,cred_expire=5
# no cgroups, no systemd, no accounting
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={state}/jobcomp.txt
SwitchType=switch/none
MpiDefault=none
PropagateResourceLimits=NONE
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2,bf_resolution=10
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
# short timers, so that faults show in seconds; OverTimeLimit 0: a time limit is one
SlurmctldTimeout=10
SlurmdTimeout=15
KillWait=20
InactiveLimit=0
MinJobAge=600
UnkillableStepTimeout=60
MessageTimeout=20
StateSaveLocation={state}/controller
SlurmctldPidFile={state}/slurmctld.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdSpoolDir={state}/%n
# one a node: mpi/pmix makes a folder in it, which clashes where nodes share it
TmpFS={state}/tmp/%n
SlurmdPidFile={state}/%n.pid
SlurmdLogFile={state}/%n.log
SlurmdParameters=config_overrides
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 PreemptMode=REQUEUE DefaultTime=30 MaxTime=60
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF DefaultTime=30 MaxTime=60
"""
IN_A_NODE = 'hostname "$1"; mount --bind "$2/hosts" /etc/hosts; exec slurmd -D -N "$1" -f "$2/slurm.conf"'


def why_not() -> str | None:
    """Why there can be no SLURM here; installs it where that is allowed."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a SLURM of several nodes needs Linux and root (namespaces, munge); run the tests as root in a container"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    missing += (
        [] if [*Path("/usr").glob("lib*/libpmix.so"), *Path("/usr").glob("lib*/*/libpmix.so")] else ["libpmix.so"]
    )
    if missing:
        if shutil.which("apt-get") is None:
            return f"no {', '.join(missing)}, and no apt-get to install them with; install SLURM, munge and PMIx"
        problem = install(PACKAGES)
        if problem is not None:
            return f"no {', '.join(missing)}: {problem}"
    probe = subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True, text=True)
    return f"no namespaces here: {probe.stderr.strip()}" if probe.returncode else None


def install(packages: list[str]) -> str | None:
    """apt-get install; returns what went wrong."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        try:
            done = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            return f"apt-get {command[0]} did not end in 300 s"
        if done.returncode:
            return f"apt-get {command[0]}: {' '.join(done.stderr.split())[-300:]}"
    return None


def wait_for(
    what: str, condition: Callable[[], Any], patience: float = PATIENCE, context: Callable[[], str] = str
) -> Any:
    """The first true answer; an error with `context` when there is none in time."""
    deadline = time.monotonic() + patience
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {patience:.0f} s: {what}\n{context()}")
        time.sleep(0.1)
    return answer


class Cluster:
    """Nodes node1 … nodeN, each with `cpus` CPUs, in the partitions low (preempted) and high."""

    def __init__(self, nodes: int, cpus: int = 2, *, network: bool = False):
        self.state = Path(tempfile.mkdtemp(prefix="slurm_", dir="/tmp"))  # short: a socket's path has 107 characters
        self.names = [f"node{number}" for number in range(1, nodes + 1)]
        self.cpus, self.network = cpus, network
        self.port = free_ports(nodes + 1)
        self.subnet = f"10.{random.randint(64, 191)}.{random.randint(1, 254)}"
        self.tag = f"{random.randrange(16**4):04x}"
        self.processes: dict[str, subprocess.Popen] = {}
        # a job of somebody else's SLURM may have started these tests
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))
        }
        self.environment["SLURM_CONF"] = str(self.state / "slurm.conf")

    # ------------------------------------------------------------ up and down

    def start(self) -> None:
        for folder in ("munge", "controller", *self.names, *(f"tmp/{name}" for name in self.names)):
            (self.state / folder).mkdir(parents=True)
        (self.state / "controller").chmod(0o700)
        (self.state / "munge").chmod(0o755)
        (self.state / "munge" / "key").touch(0o600)
        (self.state / "munge" / "key").write_bytes(os.urandom(128))
        (self.state / "slurm.conf").write_text(self.configuration())
        addresses = "".join(f"{self.address(number)} {name}\n" for number, name in enumerate(self.names, start=1))
        (self.state / "hosts").write_text(Path("/etc/hosts").read_text() + addresses)
        munge = [f"--{kind}={self.state}/munge/{name}" for kind, name in MUNGE_FILES.items()]
        self.run_daemon("munged", ["munged", "--foreground", "--force", *munge])
        wait_for("munge's socket", (self.state / "munge" / "socket").exists, context=self.logs)
        if self.network:
            self.make_network()
        self.run_daemon("slurmctld", ["slurmctld", "-D", "-i", "-f", self.environment["SLURM_CONF"]])
        for name in self.names:
            self.start_node(name)
        wait_for("idle nodes", lambda: self.idle() == self.names, context=self.logs)

    def configuration(self) -> str:
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr={self.address(number)} Port={self.port + number} "
            f"CPUs={self.cpus} RealMemory=4000 State=UNKNOWN"
            for number, name in enumerate(self.names, start=1)
        )
        controller = f"{self.subnet}.254" if self.network else "127.0.0.1"
        host = socket.gethostname().partition(".")[0]
        return CONFIGURATION.format(host=host, controller=controller, port=self.port, state=self.state, nodes=nodes)

    def address(self, number: int) -> str:
        return f"{self.subnet}.{number}" if self.network else "127.0.0.1"

    def run_daemon(self, name: str, command: list[str]) -> None:
        """In the foreground, so that it is a child of ours, and gone when we are."""
        with (self.state / f"{name}.out").open("a") as output:
            self.processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def start_node(self, name: str) -> None:
        inside = ["nsenter", f"--net=/run/netns/{self.namespace(name)}"] if self.network else []
        own = [
            "unshare",
            "--mount",
            "--uts",
            "--propagation",
            "private",
            "bash",
            "-c",
            IN_A_NODE,
            "_",
            name,
            str(self.state),
        ]
        self.run_daemon(name, [*inside, *own])

    def namespace(self, name: str) -> str:
        return f"card{self.tag}{name}"

    def make_network(self) -> None:
        bridge = f"cardbr{self.tag}"
        commands = [
            f"link add {bridge} type bridge",
            f"addr add {self.subnet}.254/24 dev {bridge}",
            f"link set {bridge} up",
        ]
        for number, name in enumerate(self.names, start=1):
            there, end = self.namespace(name), f"cv{self.tag}{number}"
            commands += [
                f"netns add {there}",
                f"link add {end} type veth peer name eth0 netns {there}",
                f"link set {end} master {bridge} up",
                f"-n {there} addr add {self.address(number)}/24 dev eth0",
                f"-n {there} link set eth0 up",
                f"-n {there} link set lo up",
            ]
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)

    def stop(self) -> None:
        """End jobs, what is left of them, and the daemons; however far start() came."""
        try:
            self.cancel_everything()
        finally:
            for name in self.names:
                self.kill_node(name)
            for name in ("slurmctld", "munged"):
                if (process := self.processes.pop(name, None)) is not None:
                    end(process)
            if self.network:
                for name in self.names:
                    subprocess.run(["ip", "netns", "del", self.namespace(name)], capture_output=True)
                subprocess.run(["ip", "link", "del", f"cardbr{self.tag}"], capture_output=True)
            shutil.rmtree(self.state, ignore_errors=True)

    def cancel_everything(self) -> None:
        """KILL first: a script that answers TERM with a requeue would bring its job back."""
        if "slurmctld" not in self.processes or self.processes["slurmctld"].poll() is not None:
            return
        for _ in range(20):
            jobs = self.call("squeue", "--noheader", "--format=%A").split()
            if not jobs:
                return
            for job in jobs:
                self.call("scancel", "--full", "--signal=KILL", job, check=False)
                self.call("scancel", job, check=False)
            time.sleep(0.5)

    # ------------------------------------------------------------ nodes

    def idle(self) -> list[str]:
        found = self.call(
            "sinfo", "--noheader", "--Node", "--partition=low", "--states=idle", "--format=%N %t", check=False
        )
        return sorted({line.split()[0] for line in found.splitlines() if line.split()[1] == "idle"})

    def crash(self, name: str) -> None:
        """SIGKILL to every process of a node, as a power cut would; SLURM finds out by itself."""
        self.kill_node(name)

    def kill_node(self, name: str) -> None:
        if name not in self.processes:
            return
        while left := [pid for pid in self.pids_in(name) if pid != self.processes[name].pid]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)  # what they had just started
        self.processes[name].kill()
        self.processes.pop(name).wait()

    def pids_in(self, name: str) -> list[int]:
        """Every process of a node, found by its UTS namespace."""
        namespace = uts_of(self.processes[name].pid) if name in self.processes else None
        if namespace in (None, uts_of(os.getpid())):
            return []
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if uts_of(int(path.name)) == namespace]

    def pids_of(self, name: str, *words: str) -> list[int]:
        """Processes of a node whose command line has these words."""
        return [pid for pid in self.pids_in(name) if all(word in command_line(pid) for word in words)]

    # ------------------------------------------------------------ jobs

    def call(self, *command: str, check: bool = True, **environment: str) -> str:
        done = subprocess.run(
            command, env={**self.environment, **environment}, capture_output=True, text=True, timeout=PATIENCE
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def job(self, number: int) -> dict[str, str]:
        """What scontrol knows of a job."""
        shown = self.call("scontrol", "show", "job", str(number), "--oneliner", check=False)
        return dict(word.partition("=")[::2] for word in shown.split() if "=" in word)

    def state_of(self, number: int) -> str:
        return self.job(number).get("JobState", "")

    def wait_for_end(self, number: int, patience: float = PATIENCE) -> str:
        """The last state of a job: COMPLETED, FAILED, CANCELLED, TIMEOUT …"""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY")
        wait_for(f"end of job {number}", lambda: self.state_of(number) in ends, patience, self.logs)
        return self.state_of(number)

    def logs(self) -> str:
        parts = [self.call("squeue", check=False), self.call("sinfo", "--Node", "--long", check=False)]
        for path in sorted([*self.state.glob("*.log"), *self.state.glob("*.out")]):
            parts.append(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:]))
        return "\n".join(parts)


MUNGE_FILES = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


def free_ports(count: int) -> int:
    """The first of some consecutive ports that nothing listens on, below those that the kernel gives out itself."""
    for _ in range(200):
        first = random.randint(15_000, 31_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(contextlib.closing(socket.socket())).bind(("0.0.0.0", port))
            return first
    raise RuntimeError("no free ports")


def uts_of(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/uts").readlink())
    except OSError:
        return None


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running(nodes: int, cpus: int = 2, *, network: bool = False) -> Iterator[Cluster]:
    """A cluster that is gone when the context ends, however it ends."""
    cluster = Cluster(nodes, cpus, network=network)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
