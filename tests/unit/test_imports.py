"""Imports point down only: the direction that DESIGN.md gives the rooms of the house."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import card_megatron

FLOORS = [
    {"__main__"},
    {"cli"},
    {"commands"},
    {"study"},
    {"evaluation"},
    {"training", "convert", "decoding", "launch", "planning", "testing"},
    {"inference"},
    {"data", "model", "checkpoint"},
    {"objectives", "platform"},
    {"launchers"},
    {"config", "version"},
]
"""From the top down. A room imports itself and what stands below it; never its neighbours or what stands above."""

PURE = (
    "config",
    "objectives",
    "version",
    "convert.mapping",
    "planning.gpus",
    "planning.sizes",
    "planning.memory",
    "planning.speed",
    "planning.layouts",
    "planning.calibration",
    "planning.goodput",
    "planning.report",
    "planning.write",
    "decoding.sampling",
    "decoding.draft_length",
    "decoding.block",
    "decoding.cache",
    "decoding.packed_linear",
    "decoding.engine",
    "decoding.hf_backend",
)
"""Modules (with all inside them) that never import Megatron, nor anything of ours that might."""


def violations(module: str, source: str) -> list[str]:
    """What a module of ours, such as "training.loop", imports and should not."""
    room, found = module.partition(".")[0], []
    for line, imported in imports_of(source):
        if imported.partition(".")[0] == "megatron" and is_pure(module):
            found.append(f"{module}:{line} imports {imported}, and must not know Megatron")
        ours = imported.removeprefix("card_megatron.")
        if ours == imported:
            continue
        if ours.partition(".")[0] != room and floor_of(ours) <= floor_of(module):
            found.append(f"{module}:{line} imports {imported}, which does not stand below it")
        if is_pure(module) and not is_pure(ours):
            found.append(f"{module}:{line} imports {imported}, which may know Megatron")
    return found


def imports_of(source: str) -> list[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands; `from a import b` is a.b, which may be a module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import; name the whole path, as everywhere"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def floor_of(module: str) -> int:
    room = module.partition(".")[0]
    floors = [number for number, rooms in enumerate(FLOORS) if room in rooms]
    assert floors, f"card_megatron.{room} has no floor yet: give it one here and in DESIGN.md"
    return floors[0]


def is_pure(module: str) -> bool:
    return any(f"{module}.".startswith(f"{pure}.") for pure in PURE)


def test_every_import_of_the_package_points_down():
    package = Path(card_megatron.__file__).parent
    found, seen = [], 0
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
        if module != "__init__":  # the package itself: test_platform shows that importing it does nothing
            found += violations(module, path.read_text(encoding="utf-8"))
            seen += 1
    assert seen > 30
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("config.load", "import megatron.core", "must not know Megatron"),
        (
            "objectives.card",
            "def f():\n    from megatron.core import mpu",
            "objectives.card:2 imports megatron.core.mpu",
        ),
        ("convert.mapping", "from card_megatron.model import build_model", "which may know Megatron"),
        ("decoding.block", "from card_megatron.decoding.megatron_backend import Stages", "which may know Megatron"),
        ("data.loader", "from card_megatron.training.step import train_step", "does not stand below"),
        ("model.build", "from card_megatron.data import loader", "does not stand below"),
        ("training.loop", "from card_megatron import evaluation", "does not stand below"),
        ("training.loop", "import card_megatron.commands.train", "does not stand below"),
        ("decoding.model", "from card_megatron.evaluation.scorer import Scorer", "does not stand below"),
        ("platform.cpu", "from card_megatron.objectives import Card", "does not stand below"),
        ("config.checks", "from card_megatron.platform import capabilities", "does not stand below"),
        ("planning.memory", "from card_megatron.training.state import build_state", "does not stand below"),
        ("planning.speed", "import megatron.core", "must not know Megatron"),
    ],
)
def test_a_planted_violation_is_caught(module, source, fault):
    assert fault in "\n".join(violations(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("commands.train", "from card_megatron.training.run import train_run"),
        ("training.loop", "from card_megatron.config.schema import RunConfig\nimport megatron.core, torch"),
        ("training.loop", "from card_megatron.training import step"),
        ("evaluation.scorer", "from card_megatron.decoding.model import OpenModel"),
        ("platform.adam", "from card_megatron.config.errors import ConfigError"),
        ("convert.mapping", "import re\nfrom card_megatron.config.schema import ModelConfig"),
        ("convert.hf", "from megatron.core import mpu\nfrom card_megatron.convert.mapping import TABLE"),
    ],
)
def test_what_points_down_is_allowed(module, source):
    assert not violations(module, source)


def test_a_room_without_a_floor_is_noticed():
    with pytest.raises(AssertionError, match="garage has no floor"):
        violations("garage.car", "from card_megatron.config import load_config")
