"""Environment variables of a job, each with its reason. What the user or the site has set already stays."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("train", "data", "convert", "eval")


@dataclass(frozen=True)
class Variable:
    """A variable that a job sets unless it is set already."""

    name: str
    value: str
    reason: str
    kinds: tuple[str, ...] = KINDS
    gpus: bool = False
    """Only where there are GPUs."""
    nodes: bool = False
    """Only on several nodes."""


VARIABLES = [
    Variable("PYTHONUNBUFFERED", "1", "a rank that is killed leaves its last words in its log"),
    Variable("PYTHONFAULTHANDLER", "1", "a rank that crashes in C leaves its stack there"),
    Variable(
        "OMP_NUM_THREADS",
        "1",
        "ranks and data workers share the cores; more threads slow each other down",
        ("train", "data", "eval"),
    ),
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "1",
        "kernels start in the order of their launch: Megatron overlaps communication with the GEMMs around it",
        ("train",),
        gpus=True,
    ),
    Variable("NCCL_DEBUG", "WARN", "names the transport that failed; INFO floods the logs of large jobs", gpus=True),
    Variable(
        "NCCL_IB_TIMEOUT",
        "22",
        "4.096 us * 2^22 = 17 s a try: a link that flaps or is routed anew does not end the job",
        ("train", "eval"),
        gpus=True,
        nodes=True,
    ),
    Variable(
        "UCX_TLS",
        "tcp,sm,self",
        "MPI carries a few numbers here: no need to register memory with InfiniBand, or to look for GPUs",
        ("data",),
        nodes=True,
    ),
    Variable("UCX_WARN_UNUSED_ENV_VARS", "n", "an MPI without UCX is no reason for a warning", ("data",), nodes=True),
]


def variables_of(kind: str, *, gpus: bool, nodes: int, interface: str | None = None) -> list[Variable]:
    """Those that a job needs; `interface` is the network interface by which its ranks find each other."""
    found = [
        variable
        for variable in VARIABLES
        if kind in variable.kinds and (gpus or not variable.gpus) and (nodes > 1 or not variable.nodes)
    ]
    if interface is not None:
        found.append(Variable("GLOO_SOCKET_IFNAME", interface, "Megatron's groups on the CPU talk over this interface"))
        if gpus:
            found.append(Variable("NCCL_SOCKET_IFNAME", interface, "NCCL's ranks find each other over this interface"))
    return found
