"""Our pinned versions, but for what is installed already: python tools/image_constraints.py > constraints-image.txt

An image such as NVIDIA's brings a torch, Transformer Engine and apex that were built for each other. With these
constraints pip may add to them and cannot replace them.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path


def constraints(pinned: str, installed: Mapping[str, str]) -> list[str]:
    """Lines of a constraints file: everything installed at its own version, the rest as pinned."""
    here = {_canonical(name): f"{name}=={version}" for name, version in installed.items()}
    ours = [line for line in pinned.splitlines() if line and not line.startswith("#")]
    return [*sorted(here.values()), *(line for line in ours if _canonical(line.partition("==")[0]) not in here)]


def _canonical(name: str) -> str:
    """As pip compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    found = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    path = Path(__file__).parent.parent / "constraints.txt"
    print("\n".join(constraints(path.read_text(encoding="utf-8"), found)))
