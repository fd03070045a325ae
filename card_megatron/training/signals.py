"""Signals that end a run in good order. Imports nothing heavy: handlers stand before torch is imported.

The first SIGTERM, SIGUSR1 or SIGINT asks for an end at the next step; a second one leaves at once. A signal within
a second of the first is taken for the same request: a terminal and a launcher both pass Ctrl-C on. In a job of SLURM
only a second SIGINT leaves at once.

Python runs handlers in the main thread only, and not while that waits in C for a rank that never comes. So signals
go through a pipe, which the handler in C writes to at once, and a thread reads.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_REQUEST_SECONDS = 1.0

_first: tuple[int, float] | None = None
_pipe: tuple[int, int] | None = None
_lock = threading.Lock()


def install() -> None:
    """Take the signals over; the entry point calls this before anything else."""
    global _pipe
    if _pipe is None:
        _pipe = os.pipe()
        for end in _pipe:
            os.set_blocking(end, False)
        threading.Thread(target=_listen, args=(_pipe[0],), name="signals", daemon=True).start()
        os.register_at_fork(after_in_child=_in_a_child)
    signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, _leave_it_to_the_pipe)


def reset() -> None:
    """Forget a signal that has been answered, and give the signals back."""
    global _first, _pipe
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    if _pipe is not None:
        _read(_pipe[0])
        os.close(_pipe[1])  # the thread comes to the end of the pipe
    _first = _pipe = None


def ignore() -> None:
    """All is done and saved: a signal that comes while the interpreter ends must not look like a failure."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def received() -> int | None:
    """The signal that asked this rank to end, if one did."""
    if _pipe is not None:
        _read(_pipe[0])  # one that came a moment ago may not have reached the thread yet
    return _first[0] if _first else None


def _leave_it_to_the_pipe(number: int, frame: FrameType | None) -> None:
    """A handler in Python must be there for the one in C to be there."""


def _listen(reader: int) -> None:
    while _read(reader):
        select.select([reader], [], [])
    os.close(reader)


def _read(reader: int) -> bool:
    """Judge what is in the pipe; False at its end."""
    with _lock:
        try:
            numbers = os.read(reader, 64)
        except BlockingIOError:
            return True
        for number in numbers:
            if number in SIGNALS:  # others have handlers too: torch's data loader has one for its workers
                _judge(number)
        return bool(numbers)


def _judge(number: int) -> None:
    global _first
    now = time.monotonic()
    if _first is None:
        _first = (number, now)
    elif now - _first[1] > SAME_REQUEST_SECONDS and not _is_of_slurm(number):
        os.write(2, f"\n{signal.Signals(number).name} again: leaving at once, without a save\n".encode())
        os._exit(128 + number)


def _is_of_slurm(number: int) -> bool:
    """SLURM sends TERM again when the grace time of a preempted job or a time limit is over, and KILL when it means it:
    what is left until then belongs to the save."""
    return "SLURM_JOB_ID" in os.environ and number != signal.SIGINT


def _in_a_child() -> None:
    """A forked process shares the pipe: what it is told must not be heard as told to the run."""
    if _pipe is not None:
        signal.set_wakeup_fd(-1)
