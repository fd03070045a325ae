"""Peak memory of this process. getrusage would also count the process that started it, so it is not asked."""

from __future__ import annotations

from pathlib import Path


def own_peak_megabytes() -> float:
    """The high-water mark of resident memory since this program was started, from the kernel."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024
