"""Sets of documents to measure perplexity on, by their file's ending; the paper's eight, by their place in a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from card_megatron.config.errors import ConfigError
from card_megatron.data.sources import Problem, cut, documents_of, kind_of

PAPER = {
    "wikitext": "wikitext/wiki.test.raw",
    "openwebtext": "openwebtext/validation.jsonl",
    "ag_news": "ag_news/test.jsonl",
    "lm1b": "lm1b/1b_benchmark.test.tokens",
    "ptb": "ptb/ptb.test.txt",
    "arxiv": "arxiv/test.jsonl",
    "pubmed": "pubmed/test.jsonl",
    "lambada": "lambada/lambada_test.jsonl",
}
"""The paper's eight domains -> their file below --data-dir. A .jsonl has a {"text": ...} a line, other fields are
ignored; the others are as their publishers have them."""
PRESETS = {"paper": PAPER}
SENTENCES = ".tokens"
LARGEST_DOCUMENT = 1 << 28
EMPTY = "empty document"
"""What data.sources calls a blank one."""


@dataclass(frozen=True)
class TextSet:
    """Documents that are scored one by one: none sees another."""

    name: str
    path: Path
    documents: Sequence[str]

    def fingerprint(self) -> str:
        """Names the texts, wherever they stand."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(document.encode())
            digest.update(b"\0")
        return digest.hexdigest()[:16]


def read_set(name: str, path: Path, limit: int | None = None) -> TextSet:
    """The documents of a file: a line of .jsonl, a sentence (line) of .tokens, a row of .parquet; else the whole file.

    Blank ones are left out. Anything that is no document is refused: a number of a part is no number of the set.
    """
    if not path.is_file():
        raise ConfigError(f"--data {name}={path}: no such file; give a .jsonl, .tokens, .txt or .raw file")
    if path.suffix == SENTENCES and kind_of(path) is None:
        found: list[str | Problem] = list(path.read_text("utf-8").split("\n"))
    else:
        found = [
            document
            for piece in cut([path], LARGEST_DOCUMENT, "text")
            for document in documents_of(piece, "text", LARGEST_DOCUMENT)
        ]
    for document in found:
        if isinstance(document, Problem) and document.what != EMPTY:
            place = "" if document.line is None else f", line {document.line}"
            raise ConfigError(f"--data {name}={path}{place}: {document.what}; mend or remove it")
    documents = [document for document in found if isinstance(document, str) and document.strip()]
    if not documents:
        raise ConfigError(f"--data {name}={path} has no text; give a file with at least one document")
    return TextSet(name, path, documents[:limit])


def preset_paths(preset: str, folder: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """The files of a preset that are there, and those that are not."""
    if preset not in PRESETS:
        raise ConfigError(f"--preset {preset} is not known; choose from {', '.join(PRESETS)}")
    paths = {name: folder / place for name, place in PRESETS[preset].items()}
    there = {name: path for name, path in paths.items() if path.is_file()}
    missing = {name: path for name, path in paths.items() if name not in there}
    if not there:
        raise ConfigError(
            f"--preset {preset}: none of its files is below --data-dir {folder}; put there what you have of "
            + ", ".join(PRESETS[preset].values())
        )
    return there, missing
