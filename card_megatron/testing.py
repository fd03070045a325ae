"""Run a function on several real ranks of this machine, with a hard time limit: for tests and experiments."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class RanksFailed(AssertionError):
    """Some rank raised, died or hung; the message has every rank's story."""


def run_distributed(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300.0) -> list[Any]:
    """Call function(*args) on `world_size` new processes joined by gloo; returns what each rank returned.

    The function must be importable (defined at the top level of a module). Ranks meet over a file, so no port is
    needed and plain pytest works. Past `timeout` seconds, or when a rank dies, all are killed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        spawn = multiprocessing.get_context("spawn")
        processes = [
            spawn.Process(target=_rank_main, args=(function, args, rank, world_size, folder), daemon=False)
            for rank in range(world_size)
        ]
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the cores; read when a rank imports torch
        try:
            for process in processes:
                process.start()
        finally:
            if threads is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = threads
        timed_out = _wait(processes, timeout)
        results = [_result(Path(folder) / f"rank{rank}", process) for rank, process in enumerate(processes)]
    if timed_out or any(not done for done, _ in results):
        stories = "\n".join(f"--- rank {rank}: {value}" for rank, (done, value) in enumerate(results) if not done)
        raise RanksFailed(f"{'timed out after ' + str(timeout) + ' s' if timed_out else 'ranks failed'}\n{stories}")
    return [value for _, value in results]


def _wait(processes: list[Any], timeout: float) -> bool:
    """Wait until all have ended; kill the rest when one has failed or time is up. True if time was up."""
    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in processes):
        failed = any(process.exitcode not in (None, 0) for process in processes)
        if failed or time.monotonic() > deadline:
            time.sleep(1.0 if failed else 0.0)  # the others may be writing down the same fault
            for process in processes:
                process.kill()
                process.join()
            return not failed
        time.sleep(0.05)
    return False


def _result(path: Path, process: Any) -> tuple[bool, Any]:
    if path.exists():
        return pickle.loads(path.read_bytes())
    return False, f"ended with exit code {process.exitcode} and no result"


def _rank_main(function: Callable[..., Any], args: tuple, rank: int, world_size: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    path = Path(folder) / f"rank{rank}"
    try:
        import torch.distributed as dist

        from card_megatron.platform import Ranks, init_process_group, install

        install()
        store = dist.FileStore(str(Path(folder) / "store"), world_size)
        init_process_group(Ranks(rank, world_size, rank), store=store, timeout_minutes=5)
        outcome = (True, function(*args))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        outcome = (False, traceback.format_exc())
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(outcome))
    unfinished.replace(path)
    os._exit(0 if outcome[0] else 1)  # worker processes and gloo threads cannot keep a rank from ending
