"""A small corpus that every Python carries: the language reference's topics and the standard library's docstrings."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "__pycache__"}
"""Folders below the standard library's that are no part of it, or hold tests."""
HELD_OUT_EVERY = 20
"""Of each this many documents, the last is for validation."""


def python_documents() -> list[str]:
    """Distinct documents in an order that depends on their text alone, long enough to be worth reading."""
    texts = {text.strip() for text in (*_topics(), *_docstrings())}
    return sorted(text for text in texts if len(text) >= 200)


def train_and_validation(documents: list[str]) -> tuple[list[str], list[str]]:
    """Every HELD_OUT_EVERY-th document is held out."""
    held_out = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    kept = [text for number, text in enumerate(documents) if (number + 1) % HELD_OUT_EVERY]
    return kept, held_out


def _topics() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from topics.values()


def _docstrings() -> Iterator[str]:
    """One document for each module: its docstring and those of its classes and functions, read, not imported."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not NOT_THE_LIBRARY & set(path.relative_to(library).parts):
            yield "\n\n".join(_docstrings_of(path))


def _docstrings_of(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text
