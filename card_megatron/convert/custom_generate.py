"""custom_generate/generate.py of an exported folder, put together from the files of decoding/: nothing twice."""

from __future__ import annotations

import ast
from importlib import resources
from pathlib import Path

from card_megatron.version import __version__

MODULES = (
    *("sampling", "draft_length", "cache", "packed_linear", "block", "verify", "engine", "hf_backend"),
    "generate_function",
)
"""Files of card_megatron/decoding in the order in which they need each other."""


def standalone_source() -> str:
    """One file that needs torch, numpy and transformers alone: imports between the parts are left out."""
    parts = [
        f'"""CARD decoding for plain transformers, made by card_megatron {__version__} from card_megatron/decoding."""',
        "from __future__ import annotations",
    ]
    for module in MODULES:
        source = (resources.files("card_megatron") / "decoding" / f"{module}.py").read_text(encoding="utf-8")
        parts.append(f"# {'-' * 60} decoding/{module}.py\n\n{without_own_imports(source)}")
    return "\n\n".join(parts) + "\n"


def without_own_imports(source: str) -> str:
    """The source less its imports of card_megatron and of __future__."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in (
            "card_megatron",
            "__future__",
        ):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = ""
    return "\n".join(lines).strip()


def write_custom_generate(folder: Path) -> None:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(standalone_source(), encoding="utf-8")
    (folder / "custom_generate" / "requirements.txt").write_text("transformers>=5.0\n")
