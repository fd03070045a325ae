"""A shard: the tokens of some pieces of the input, made by one process, complete or not there."""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from card_megatron.config.errors import ConfigError
from card_megatron.data.indexed import token_dtype
from card_megatron.data.sources import Piece, Problem, documents_of, lines_begun
from card_megatron.data.tokenizers import Tokenizer

BATCH_CHARACTERS = 1 << 20
"""Text that is handed to the tokenizer at once: enough to keep it busy, little enough to hold."""

LENGTH = np.dtype(np.int32)


@dataclass(frozen=True)
class ReadOptions:
    """How documents are read; part of what a build is."""

    text_key: str = "text"
    append_eod: bool = True
    on_error: str = "skip"
    max_document_bytes: int = 1 << 28


def build_shard(
    number: int, pieces: list[Piece], folder: Path, tokenizer: Tokenizer, options: ReadOptions
) -> dict[str, Any]:
    """Tokenise pieces into FOLDER/NUMBER.bin and .lengths; returns, and writes last, what they hold."""
    done = finished(number, folder)
    if done is not None:
        return done
    base = folder / f"{number:06d}"
    found: list[dict[str, Any]] = []
    with Path(f"{base}.bin").open("wb", buffering=1 << 20) as file:
        good = _only_good(pieces, options, found)
        lengths, checksum = write_tokens(good, tokenizer, file, append_eod=options.append_eod)
        file.flush()
        os.fsync(file.fileno())
    with Path(f"{base}.lengths").open("wb") as file:
        file.write(lengths.tobytes())
        file.flush()
        os.fsync(file.fileno())
    stats = {
        "documents": len(lengths),
        "tokens": int(np.sum(lengths, dtype=np.int64)),
        "bytes": Path(f"{base}.bin").stat().st_size,
        "crc32": f"{checksum:08x}",
        "pieces": found,
    }
    unfinished = Path(f"{base}.unfinished")
    unfinished.write_text(json.dumps(stats))
    unfinished.replace(f"{base}.json")
    return stats


def finished(number: int, folder: Path) -> dict[str, Any] | None:
    """What a complete shard holds; None where it is missing or was not finished."""
    base = folder / f"{number:06d}"
    try:
        stats = json.loads(Path(f"{base}.json").read_text())
        sizes = [Path(f"{base}{suffix}").stat().st_size for suffix in (".bin", ".lengths")]
    except (OSError, ValueError):
        return None
    return stats if sizes == [stats["bytes"], LENGTH.itemsize * stats["documents"]] else None


def lengths_of(number: int, folder: Path) -> np.ndarray:
    """How many ids each document of a complete shard has."""
    return np.fromfile(folder / f"{number:06d}.lengths", dtype=LENGTH)


def write_tokens(
    documents: Iterable[str], tokenizer: Tokenizer, file: Any, *, append_eod: bool = True
) -> tuple[np.ndarray, int]:
    """Write the ids of documents; returns the length of each and the CRC-32 of what was written."""
    dtype, checksum = token_dtype(tokenizer.vocab_size), 0
    lengths: list[np.ndarray] = []
    end = np.array([tokenizer.eod], dtype=np.int32)
    for texts in _batches(documents):
        encoded = tokenizer.encode_batch(texts)
        parts = [part for ids in encoded for part in (ids, end)] if append_eod else encoded
        data = np.concatenate(parts).astype(dtype).tobytes()
        checksum = zlib.crc32(data, checksum)
        file.write(data)
        lengths.append(np.array([len(ids) + append_eod for ids in encoded], dtype=LENGTH))
    return (np.concatenate(lengths) if lengths else np.empty(0, LENGTH)), checksum


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    held = 0
    for text in documents:
        batch.append(text)
        held += len(text)
        if held >= BATCH_CHARACTERS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _only_good(pieces: list[Piece], options: ReadOptions, found: list[dict[str, Any]]) -> Iterator[str]:
    """Documents; what is none goes to `found`, piece by piece, or ends the build."""
    for piece in pieces:
        cut = piece.kind == "lines" and piece.stop >= 0
        problems: list[Problem] = []
        for document in documents_of(piece, options.text_key, options.max_document_bytes):
            if isinstance(document, str):
                yield document
            elif options.on_error == "stop":
                raise stopped_by(counted_on(document, lines_begun(piece.path, 0, piece.start) if cut else 0))
            else:
                problems.append(document)
        # counted whether needed here or not: later pieces of the file go on from it
        lines = lines_begun(piece.path, piece.start, piece.stop) if cut else 0
        found.append({"lines": lines, "problems": [vars(problem) for problem in problems]})


def problems_of(shards: Iterable[tuple[list[Piece], dict[str, Any]]]) -> Iterator[Problem]:
    """The problems of consecutive shards, (pieces, what they hold), with their lines counted from the file's first."""
    before = 0
    for pieces, stats in shards:
        for piece, found in zip(pieces, stats["pieces"], strict=True):
            if piece.start == 0:
                before = 0
            for problem in found["problems"]:
                yield counted_on(Problem(**problem), before)
            before += found["lines"]


def counted_on(problem: Problem, before: int) -> Problem:
    return problem if problem.line is None else replace(problem, line=before + problem.line)


def stopped_by(problem: Problem) -> ConfigError:
    return ConfigError(f"{where(problem)}: {problem.what}; repair it, or go on without it with --on-error skip")


def where(problem: Problem) -> str:
    return problem.path if problem.line is None else f"{problem.path}:{problem.line}"


def count_problems(problems: Iterable[Problem]) -> dict[str, int]:
    """How many there are of each kind, most frequent first; what stands in brackets is no kind of its own."""
    counts = Counter(problem.what.split(" (")[0] for problem in problems)
    return dict(counts.most_common())
