"""A data worker ends when its parent says so, and not when SLURM tells every process of a job to end.

scancel, preemption and node loss send TERM to all processes of a task. The rank saves then, and needs samples until its
step is done; torch's handler in a worker, which ends it for anybody's TERM, would take the rank down with it.
"""

from __future__ import annotations

import os
import signal
import threading


def heed_parent_only(worker: int) -> None:
    """A DataLoader's worker_init_fn, called in the worker after torch has installed its handlers."""
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # threads that follow inherit it
        threading.Thread(target=_listen, args=(os.getppid(),), name="terminate", daemon=True).start()


def _listen(parent: int) -> None:
    while True:
        if signal.sigwaitinfo({signal.SIGTERM}).si_pid == parent:
            os._exit(0)
