"""Run a function on several real ranks of this machine, with a hard time limit: for tests and experiments."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
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
    needed and plain pytest works. Past `timeout` seconds, or when a rank dies, all are killed; however it ends,
    nothing that a rank started is left behind.
    """
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        spawn = multiprocessing.get_context("spawn")
        processes = [
            spawn.Process(target=_rank_main, args=(function, args, rank, world_size, folder), daemon=False)
            for rank in range(world_size)
        ]
        try:
            _start(processes)
            timed_out = _wait(processes, timeout)
        finally:
            _end(processes)
        results = [_result(Path(folder) / f"rank{rank}", process) for rank, process in enumerate(processes)]
    if timed_out or any(not done for done, _ in results):
        stories = "\n".join(f"--- rank {rank}: {value}" for rank, (done, value) in enumerate(results) if not done)
        raise RanksFailed(f"{'timed out after ' + str(timeout) + ' s' if timed_out else 'ranks failed'}\n{stories}")
    return [value for _, value in results]


def _start(processes: list[Any]) -> None:
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


def _wait(processes: list[Any], timeout: float) -> bool:
    """Wait until all have ended, one has failed or time is up. True if time was up."""
    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in processes):
        if any(process.exitcode not in (None, 0) for process in processes):
            time.sleep(1.0)  # the others may be writing down the same fault
            return False
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return False


def _end(processes: list[Any]) -> None:
    """Kill what is left of each rank, and of the processes that it started: a checkpoint's helper never ends itself."""
    for process in processes:
        if process.pid is None:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # one that had not yet made its group
        process.join()


def _result(path: Path, process: Any) -> tuple[bool, Any]:
    if path.exists():
        return pickle.loads(path.read_bytes())
    return False, f"ended with exit code {process.exitcode} and no result"


def _rank_main(function: Callable[..., Any], args: tuple, rank: int, world_size: int, folder: str) -> None:
    os.setsid()  # a group of its own, so that all of it can be ended
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    path = Path(folder) / f"rank{rank}"
    try:
        import torch.distributed as dist

        from card_megatron.platform import Ranks, init_process_group, install

        install()
        store = dist.FileStore(str(Path(folder) / "store"), world_size)
        init_process_group(Ranks(rank, world_size, rank), store=store, timeout_minutes=5)
        outcome = pickle.dumps((True, function(*args)))
        if dist.is_initialized():  # a whole training run has already left
            dist.barrier()
            dist.destroy_process_group()
        exit_code = 0
    except BaseException:
        outcome, exit_code = pickle.dumps((False, traceback.format_exc())), 1
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(outcome)
    unfinished.replace(path)
    os._exit(exit_code)  # worker processes and gloo threads cannot keep a rank from ending
