"""What a run changes in its whole process, and puts back: garbage collection, determinism, the flight recorder."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from card_megatron.config.errors import ConfigError
from card_megatron.config.schema import RunConfig

DETERMINISTIC = {
    # cuBLAS may use several streams and then adds in the order in which they end
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    # Transformer Engine's attention kernels; Megatron refuses deterministic_mode without it
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    # one fixed order of sums over ranks, whatever NCCL's tuner thinks of a message size
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
}
"""Environment variable -> values that give the same bits in every run; the first is set where there is none."""


@contextlib.contextmanager
def process_settings(config: RunConfig) -> Iterator[None]:
    """Entered before the process group and before anything is on a GPU: both read the environment once."""
    if config.guard.flight_recorder:
        record_collectives(config.run_dir, config.guard.flight_recorder)
    if config.train.deterministic:
        set_deterministic_environment()
    deterministic, collecting = torch.are_deterministic_algorithms_enabled(), gc.isenabled()
    torch.use_deterministic_algorithms(config.train.deterministic or deterministic)
    if config.train.manual_gc_interval is not None:
        gc.disable()  # Instruments collects, at the same step on all ranks
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        if collecting:
            gc.enable()


def set_deterministic_environment() -> None:
    """Raise ConfigError where the environment asks for the opposite."""
    for name, values in DETERMINISTIC.items():
        given = os.environ.setdefault(name, values[0])
        if given not in values:
            raise ConfigError(
                f"train.deterministic=true does not go with {name}={given} in the environment; "
                f"unset it, or set it to {' or '.join(values)}"
            )


# ---------------------------------------------------------------- flight recorder


def flight_recorder_folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "flight_recorder"


def record_collectives(run_dir: str | Path, count: int) -> None:
    """Let torch remember each rank's last collectives, and write them when a collective times out."""
    folder = flight_recorder_folder(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    prefix = str((folder / "rank_").absolute())  # torch adds the rank
    # torch 2.8 renamed it, and warns of the old name
    new = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE" if new else "TORCH_NCCL_TRACE_BUFFER_SIZE", str(count))
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        os.environ.setdefault(name, prefix)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def dump_collectives(run_dir: str | Path, rank: int) -> Path | None:
    """Write what this rank's recorder holds, as torch itself would, for its `torchfrtrace`; None if there is none.

    Called from the watchdog's thread while the main thread hangs in a collective.
    """
    import torch._C._distributed_c10d as c10d

    # NCCL's collectives are in a recorder of their own
    names = ["_dump_nccl_trace", "_dump_fr_trace"] if torch.cuda.is_available() else ["_dump_fr_trace"]
    dump = next((getattr(c10d, name) for name in names if hasattr(c10d, name)), None)
    if dump is None or not torch.distributed.is_initialized():
        return None
    path = flight_recorder_folder(run_dir) / f"rank_{rank}"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(dump())
    unfinished.replace(path)
    return path
