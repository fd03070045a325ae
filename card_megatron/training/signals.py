"""Signals that end a run in good order. Imports nothing heavy: handlers stand before torch is imported.

The first SIGTERM, SIGUSR1 or SIGINT asks for an end at the next step; a second one leaves at once. A signal within
a second of the first is taken for the same request: a terminal and a launcher both pass Ctrl-C on.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_REQUEST_SECONDS = 1.0

_first: tuple[int, float] | None = None


def install() -> None:
    """Take the signals over; the entry point calls this before anything else."""
    for number in SIGNALS:
        signal.signal(number, _handle)


def reset() -> None:
    """Forget a signal that has been answered, and give the signals back."""
    global _first
    _first = None
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def received() -> int | None:
    """The signal that asked this rank to end, if one did."""
    return _first[0] if _first else None


def _handle(number: int, frame: FrameType | None) -> None:
    global _first
    now = time.monotonic()
    if _first is None:
        _first = (number, now)
    elif now - _first[1] > SAME_REQUEST_SECONDS:
        os.write(2, f"\n{signal.Signals(number).name} again: leaving at once, without a save\n".encode())
        os._exit(128 + number)
