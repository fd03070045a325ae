"""GPUs as `nvidia-smi` describes them, and how fast this rank multiplies matrices."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator

from card_megatron.planning.doctor.check import Check

FIELDS = (
    *(
        "index",
        "name",
        "driver_version",
        "memory.total",
        "memory.used",
        "temperature.gpu",
        "clocks.sm",
        "clocks.max.sm",
    ),
    *("ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "power.limit", "power.default_limit"),
    *("pcie.link.width.current", "pcie.link.width.max"),
)
THROTTLE = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The same bits: the name in newer drivers, and in older ones."""
SLOWED_DOWN = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits that mean trouble; idle, power cap and application clocks are no trouble."""


class DriverError(Exception):
    """An nvidia-smi that is there and fails: GPUs that were meant to be seen, and are not."""


def read_gpus() -> list[dict[str, str]] | None:
    """What nvidia-smi says of each GPU of this host; None where there is no driver; raises DriverError."""
    if shutil.which("nvidia-smi") is None:
        return None
    for throttle in THROTTLE:
        command = ["nvidia-smi", f"--query-gpu={','.join([*FIELDS, throttle])}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            raise DriverError(f"nvidia-smi: {error}") from error
        if done.returncode == 0:
            return parse_gpus(done.stdout)
    said = (done.stdout.strip() or done.stderr.strip() or "no word").splitlines()[0]
    raise DriverError(f"nvidia-smi: {said} (exit code {done.returncode})")


def parse_gpus(text: str) -> list[dict[str, str]]:
    """The lines of `nvidia-smi --query-gpu=… --format=csv,noheader,nounits`."""
    names = [*FIELDS, "throttle"]
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [dict(zip(names, row, strict=True)) for row in rows]


def driver_check(error: DriverError) -> Check:
    remedy = (
        "look at `nvidia-smi` and `dmesg | grep -i xid`; reload the driver, give the container its GPUs (--nv), or "
        "drain the host"
    )
    return Check("hardware", "GPUs", str(error), "an nvidia-smi that answers", "fail", remedy)


def gpu_checks(gpus: list[dict[str, str]] | None, expected: int | None) -> Iterator[Check]:
    """Every GPU of this host; `expected`: as many as there should be."""
    count = len(gpus or [])
    if expected is not None and count != expected:
        remedy = "look at `nvidia-smi -L` and `dmesg | grep -i xid`; give the job --gpus-per-node, or drain the host"
        yield Check("hardware", "GPUs", str(count), str(expected), "fail", remedy)
    elif not gpus:
        yield Check("hardware", "GPUs", "none: training runs on the CPU")
    if not gpus:
        return
    names = sorted({gpu["name"] for gpu in gpus})
    if count == expected or expected is None:
        verdict, remedy = ("warn", "the slowest kind sets the pace") if len(names) > 1 else ("ok", "")
        yield Check(
            "hardware", "GPUs", f"{count} x {', '.join(names)}", str(expected or ""), verdict, remedy, alike=True
        )
    for gpu in gpus:
        problems = list(gpu_problems(gpu))
        verdict = "fail" if any(grave for grave, _, _ in problems) else "warn" if problems else "ok"
        value = "; ".join(text for _, text, _ in problems) or (
            f"{gpu['clocks.max.sm']} MHz at most, {gpu['temperature.gpu']} °C, ECC {gpu['ecc.mode.current'].lower()}"
        )
        remedy = "; ".join(dict.fromkeys(remedy for _, _, remedy in problems))
        yield Check("hardware", f"GPU {gpu['index']}", value, "cool, whole, idle", verdict, remedy)


def gpu_problems(gpu: dict[str, str]) -> Iterator[tuple[bool, str, str]]:
    """(grave, what, remedy) of one GPU."""
    errors = _number(gpu["ecc.errors.uncorrected.volatile.total"])
    if errors:
        yield True, f"{errors:.0f} uncorrected ECC errors since the last reset", "reset the GPU or drain the host"
    if gpu["ecc.mode.current"] == "Disabled":
        yield False, "ECC is off: flipped bits go unnoticed", "nvidia-smi -e 1, then reset"
    bits = int(gpu["throttle"], 16) if gpu["throttle"].startswith("0x") else 0
    slowed = [name for bit, name in SLOWED_DOWN.items() if bits & bit]
    if slowed:
        yield True, f"slowed down now: {', '.join(slowed)}", "cooling or power supply: drain the host"
    used, total = _number(gpu["memory.used"]), _number(gpu["memory.total"])
    if used is not None and total and used > 0.05 * total:
        yield False, f"{used:.0f} of {total:.0f} MiB already used", "end what runs there (`nvidia-smi` lists it)"
    limit, default = _number(gpu["power.limit"]), _number(gpu["power.default_limit"])
    if limit is not None and default is not None and limit < 0.98 * default:
        yield False, f"power limited to {limit:.0f} of {default:.0f} W", "nvidia-smi -pl, unless it is meant"
    width, widest = _number(gpu["pcie.link.width.current"]), _number(gpu["pcie.link.width.max"])
    if width is not None and widest is not None and width < widest:
        yield False, f"PCIe x{width:.0f} of x{widest:.0f}", "reseat the card, or drain the host"


def _number(text: str) -> float | None:
    """A cell; None for [N/A] and its like."""
    try:
        return float(text)
    except ValueError:
        return None


# ---------------------------------------------------------------- speed of this rank

PEAK_SHARE = 0.55
"""Of a GPU's dense bf16 peak, what a large multiplication should reach at least."""


def matmul_tflops(seconds: float = 0.3) -> float:
    """Tera-operations a second of one large multiplication: bf16 on a GPU, fp32 on a CPU; the best of several."""
    import torch

    cuda = torch.cuda.is_available()
    size, dtype = (8192, torch.bfloat16) if cuda else (512, torch.float32)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    left @ right  # the first call sets things up
    while best == float("inf") or time.perf_counter() < end:
        if cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        left @ right
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best / 1e12


def matmul_check(tflops: float, peak: float | None) -> Check:
    """Against the data sheet, where the device is known."""
    name, value = "matrix multiplication", f"{tflops:.0f} TFLOP/s" if tflops >= 1 else f"{1e3 * tflops:.0f} GFLOP/s"
    if peak is None:
        return Check("hardware", name, value)
    floor = PEAK_SHARE * peak / 1e12
    if tflops < floor:
        remedy = "look at the clocks, the temperature and the power limit of this GPU; run nothing else on it"
        return Check("hardware", name, value, f"at least {floor:.0f} TFLOP/s", "warn", remedy)
    return Check("hardware", name, value, f"at least {floor:.0f} TFLOP/s")
