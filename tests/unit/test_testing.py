"""run_distributed: every rank's value, every rank's fault, and nothing left behind."""

from __future__ import annotations

import _thread
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from card_megatron.testing import RanksFailed, run_distributed


@pytest.fixture(autouse=True)
def leaves_no_process_behind():
    before = set(multiprocessing.active_children())
    yield
    assert not set(multiprocessing.active_children()) - before


def sum_of_ranks(extra):
    """What this rank is, what all of them are together, and a process that would outlive them."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(dist.get_rank() + extra)
    dist.all_reduce(total)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return dist.get_rank(), os.environ["OMP_NUM_THREADS"], int(total), child.pid


def one_raises():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("the second rank's own fault")
    dist.barrier()


def one_dies():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def a_value_that_cannot_travel():
    return lambda: None


def hang():
    time.sleep(600)


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_each_rank_returns_its_value_and_takes_its_children_along():
    (rank0, threads0, total0, child0), (rank1, threads1, total1, child1) = run_distributed(sum_of_ranks, 2, 10)
    assert (rank0, rank1) == (0, 1) and total0 == total1 == 21
    assert threads0 == threads1 == "1", "ranks share the cores"
    time.sleep(0.2)
    assert not runs(child0) and not runs(child1)


def test_an_exception_comes_back_with_its_traceback():
    with pytest.raises(
        RanksFailed, match=r"(?s)ranks failed.*rank 1: Traceback.*in one_raises.*second rank's own fault"
    ):
        run_distributed(one_raises, 2)


def test_a_rank_that_dies_is_named_and_ends_the_others():
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1: ended with exit code 7 and no result"):
        run_distributed(one_dies, 2)
    assert time.monotonic() - started < 60, "the other rank must not wait for its own time-out"


def test_a_result_that_cannot_be_pickled_is_said_to_be_one():
    with pytest.raises(RanksFailed, match=r"(?s)rank 0: Traceback.*pickle"):
        run_distributed(a_value_that_cannot_travel, 1)


def test_a_hang_ends_at_the_time_limit():
    with pytest.raises(RanksFailed, match=r"(?s)timed out after 2\.0 s.*rank 0: ended with exit code -9"):
        run_distributed(hang, 1, timeout=2.0)


def test_an_interrupt_ends_the_ranks_too():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    try:
        threading.Timer(1.0, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            run_distributed(hang, 1)
    finally:
        signal.signal(signal.SIGINT, before)
