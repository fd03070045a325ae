"""Python packages, CUDA, driver: what is there, and whether it fits together."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from card_megatron.config.remedies import INSTALL_ENGINE
from card_megatron.planning.doctor.check import Check

MEGATRON_CORE = "0.16.1"
ENGINE = ">=2.9,<2.12"
"""Transformer Engine versions that megatron-core 0.16.1 asks for; 2.11.0 is the one that this project pins."""
OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""CUDA major version -> the oldest Linux driver that runs it, from NVIDIA's CUDA compatibility tables."""
SLOWING = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel is waited for"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a host talk through its memory instead of NVLink"),
    "NCCL_IB_DISABLE": ("1", "hosts talk over TCP instead of InfiniBand"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by another one"),
}
"""Environment variable -> (the value that costs speed, why)."""


def software_checks(driver: str | None) -> Iterator[Check]:
    """`driver`: the version of the NVIDIA driver, where there is one."""
    yield _python()
    yield _own_dependencies()
    yield _torch()
    yield _cuda(driver)
    yield _nccl()
    yield _megatron()
    yield _psutil()
    yield _engine(driver is not None)
    yield _apex()
    yield from _environment()


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check(
    name: str, value: str | None, expected: str = "", verdict: str = "ok", remedy: str = "", alike: bool = True
) -> Check:
    return Check("software", name, value or "missing", expected, verdict, remedy, alike=alike)


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):
        return _check("python", found, "3.11 or newer", "fail", "make the environment with a newer Python")
    return _check("python", found, "3.11 or newer")


def _own_dependencies() -> Check:
    """Everything that card_megatron itself declares, without its extras."""
    unmet = []
    for line in importlib.metadata.requires("card_megatron") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = version_of(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            unmet.append(f"{requirement} (found: {found or 'none'})")
    if unmet:
        remedy = "pip install -c constraints.txt card_megatron, or `make env`"
        return _check("dependencies", ", ".join(unmet), "all that card_megatron declares", "fail", remedy, alike=False)
    return _check("dependencies", "all there", alike=False)


def _torch() -> Check:
    found = version_of("torch")
    if found is None:
        return _check("torch", None, "2.6 or newer", "fail", "pip install -c constraints.txt torch")
    try:
        import torch
    except Exception as error:  # a broken build can fail in any way
        return _check("torch", f"{found}, broken: {error}", "importable", "fail", "install torch again")
    return _check("torch", f"{torch.__version__}")


def _cuda(driver: str | None) -> Check:
    """The CUDA that torch was built for, against the driver."""
    try:
        import torch
    except Exception:
        return _check("CUDA", None, verdict="warn", remedy="torch comes first")
    built = torch.version.cuda
    return cuda_fits_driver(built, driver, torch.cuda.is_available())


def cuda_fits_driver(built: str | None, driver: str | None, available: bool) -> Check:
    """Pure: torch's CUDA version, the driver's version, and whether torch can use a GPU."""
    if driver is None:
        value = f"torch is built for CUDA {built}; no NVIDIA driver here" if built else "none (a CPU build of torch)"
        return _check("CUDA", value)
    if built is None:
        remedy = "install torch for CUDA (constraints.txt has the version); the CPU build cannot use these GPUs"
        return _check("CUDA", f"driver {driver}, but a CPU build of torch", "a CUDA build", "fail", remedy)
    oldest = OLDEST_DRIVER.get(int(built.partition(".")[0]))
    value = f"torch for CUDA {built}, driver {driver}"
    if oldest is not None and Version(driver) < Version(oldest):
        remedy = f"update the driver, or install a torch for an older CUDA than {built}"
        return _check("CUDA", value, f"driver {oldest} or newer", "fail", remedy)
    if not available:
        remedy = (
            "`nvidia-smi` works but torch sees no GPU: look at CUDA_VISIBLE_DEVICES and the container's GPU options"
        )
        return _check("CUDA", f"{value}; torch sees no GPU", "usable", "fail", remedy)
    return _check("CUDA", value, f"driver {oldest} or newer" if oldest else "")


def _nccl() -> Check:
    try:
        import torch

        if torch.version.cuda is not None:
            return _check("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    except Exception as error:
        return _check("NCCL", str(error), "importable", "fail", "install torch for CUDA again")
    return _check("NCCL", "none: ranks talk through gloo")


def _megatron() -> Check:
    found = version_of("megatron-core")
    if found != MEGATRON_CORE:
        remedy = (
            f"pip install megatron-core=={MEGATRON_CORE}: the fields and faults of other versions are not known here"
        )
        return _check("megatron-core", found, MEGATRON_CORE, "fail", remedy)
    return _check("megatron-core", found, MEGATRON_CORE)


def _psutil() -> Check:
    found = version_of("psutil")
    if found is None:
        remedy = "pip install psutil: without it megatron-core's checkpoint saves hang for ever"
        return _check("psutil", None, "any", "fail", remedy)
    return _check("psutil", found)


def _engine(gpu: bool) -> Check:
    name, found = "Transformer Engine", version_of("transformer_engine") or version_of("transformer-engine")
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        if not gpu:
            return _check(name, "none (used on GPUs only)")
        remedy = f"{INSTALL_ENGINE}: without it there is no FP8 and attention is slower"
        return _check(name, None, ENGINE, "warn", remedy)
    package = Path(spec.origin).parent
    extension = "transformer_engine_torch*.so"
    if not any(package.parent.glob(extension)) and not any(package.rglob(extension)):
        remedy = f"{INSTALL_ENGINE}, or pip uninstall transformer_engine"
        value = f"{found or 'found'}, without its torch extension"
        return _check(name, value, "whole: importing Megatron's layers crashes otherwise", "fail", remedy)
    if found is None or not Requirement(f"te{ENGINE}").specifier.contains(found, prereleases=True):
        return _check(
            name,
            found,
            ENGINE,
            "warn",
            f"megatron-core {MEGATRON_CORE} asks for {ENGINE}: install transformer-engine==2.11.0",
        )
    return _check(name, found, ENGINE)


def _apex() -> Check:
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return _check("apex", "none (optional)")
    if importlib.util.find_spec("amp_C") is None:
        where = Path(spec.origin).parent if spec.origin else "a namespace package"
        remedy = (
            "pip uninstall apex: PyPI's package of that name is not NVIDIA's, or the build lacks its CUDA extensions"
        )
        return _check("apex", f"not NVIDIA's build: {where}", "NVIDIA's, or none", "fail", remedy)
    return _check("apex", version_of("apex") or "found")


def _environment() -> Iterator[Check]:
    """Variables that someone set to find a fault and forgot."""
    slow = [f"{name}={value} ({why})" for name, (value, why) in SLOWING.items() if os.environ.get(name) == value]
    if slow:
        yield _check("environment", "; ".join(slow), "unset", "warn", "unset what is not needed any more", alike=False)
    if re.fullmatch(r"[\w.-]+", os.environ.get("MASTER_ADDR", "x")) is None:
        address = os.environ["MASTER_ADDR"]
        yield _check("MASTER_ADDR", address, "a host name", "fail", "give the first host's name", alike=False)
