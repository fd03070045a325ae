"""Inputs of a build: which files there are, how they are cut into pieces, and the documents of a piece.

A piece is read alone, by whichever process gets it: a byte range of a .jsonl, row groups of a Parquet file, or a whole
file that cannot be entered in the middle. Cutting depends on the inputs alone, so the order of documents does too.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from card_megatron.config.errors import ConfigError

LINES = (".jsonl", ".ndjson", ".json")
TEXTS = (".txt", ".text", ".md")
PACKED = (".gz", ".zst")
READ = 1 << 20


@dataclass(frozen=True)
class Piece:
    """A part of one input: bytes [start, stop) of lines, or row groups [start, stop); stop -1 is the whole file."""

    path: str
    kind: str
    start: int
    stop: int
    bytes: int


@dataclass(frozen=True)
class Problem:
    """Something in the input that is no document."""

    path: str
    line: int | None
    what: str


def kind_of(path: Path) -> str | None:
    """lines, parquet or text; None for a file that is none of them by its name."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes = suffixes[:-1]
    last = suffixes[-1] if suffixes else ""
    return "lines" if last in LINES else "parquet" if last == ".parquet" else "text" if last in TEXTS else None


def expand(inputs: Iterable[str]) -> list[Path]:
    """The files that files, directories and glob patterns name: each input in turn, what is below it sorted."""
    found: list[Path] = []
    for entry in inputs:
        path = Path(entry)
        if path.is_file():
            matches = [path]
        elif path.is_dir():
            matches = sorted(below for below in path.rglob("*") if below.is_file() and kind_of(below))
        else:
            anchor = Path(path.anchor) if path.is_absolute() else Path()
            pattern = str(path.relative_to(path.anchor)) if path.is_absolute() else entry
            matches = sorted(match for match in anchor.glob(pattern) if match.is_file()) if "*" in entry else []
        if not matches:
            raise ConfigError(
                f"{entry}: no such file, directory or pattern; give .jsonl(.gz/.zst), .parquet or .txt files"
            )
        found += matches
    return found


def cut(paths: Iterable[Path], piece_bytes: int, text_key: str) -> Iterator[Piece]:
    """All pieces of some files, in order."""
    for path in paths:
        size, kind = path.stat().st_size, kind_of(path) or "text"
        if kind == "parquet":
            yield from _row_groups(path, piece_bytes, text_key)
        elif kind == "lines" and path.suffix.lower() not in PACKED:
            for start in range(0, max(size, 1), piece_bytes):
                stop = min(start + piece_bytes, size)
                yield Piece(str(path), kind, start, stop, stop - start)
        else:
            yield Piece(str(path), kind, 0, -1, size)


def documents_of(piece: Piece, text_key: str, longest: int) -> Iterator[str | Problem]:
    """The documents of a piece, and what stood in the place of one; nothing is dropped without a word."""
    path = Path(piece.path)
    try:
        if piece.kind == "parquet":
            yield from _parquet_documents(path, piece, text_key, longest)
        elif piece.kind == "text":
            yield _whole_text(path, longest)
        else:
            yield from _line_documents(path, piece, text_key, longest)
    except (EOFError, gzip.BadGzipFile) as error:
        yield Problem(piece.path, None, f"damaged gzip ({error})")
    except OSError as error:
        yield Problem(piece.path, None, f"cannot be read ({error.strerror or error})")


# ---------------------------------------------------------------- lines


def _line_documents(path: Path, piece: Piece, text_key: str, longest: int) -> Iterator[str | Problem]:
    before: int | None = None  # lines before this piece: counted only if one of its lines must be named
    for number, line in enumerate(_lines(path, piece, longest)):
        found = "longer than the limit of --max-document-bytes" if line is None else _text_of(line, text_key)
        if found is None:
            continue  # a blank line between documents
        if isinstance(found, Document):
            yield found.text
            continue
        if before is None:
            before = _newlines_before(path, piece.start)
        yield Problem(piece.path, before + number + 1, found)


@dataclass(frozen=True)
class Document:
    text: str


def _text_of(line: bytes, text_key: str) -> Document | str | None:
    """The document of a line, what is wrong with it, or None for a blank one."""
    if not line.strip():
        return None
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        return "invalid UTF-8"
    except (ValueError, RecursionError) as error:
        return f"broken JSON ({getattr(error, 'msg', error)})"
    if not isinstance(record, dict) or text_key not in record:
        return f"no {text_key!r} field"
    return check_text(record[text_key])


def check_text(text: Any) -> Document | str:
    """A text that can be tokenised, or what is wrong with it."""
    if not isinstance(text, str):
        return f"the text is {'null' if text is None else 'a ' + type(text).__name__}, not a string"
    if not text.strip():
        return "empty document"
    if "\0" in text:
        return "a NUL in the text"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "a lone surrogate in the text"
    return Document(text)


def _lines(path: Path, piece: Piece, longest: int) -> Iterator[bytes | None]:
    """Lines that begin in a piece; None for one that is too long, which is passed over without being held."""
    with _open(path) as file:
        position = piece.start
        if position:
            # the line that began before this piece belongs to the one before
            file.seek(position - 1)
            position += _skip_line(file) - 1
        while piece.stop < 0 or position < piece.stop:
            line = file.readline(longest + 1)
            if not line:
                return
            position += len(line)
            if len(line) > longest and not line.endswith(b"\n"):
                position += _skip_line(file)
                yield None
            else:
                yield line


def _skip_line(file: Any) -> int:
    """Read to the end of the line without holding it; returns how many bytes that were."""
    length = 0
    while part := file.readline(READ):
        length += len(part)
        if part.endswith(b"\n"):
            break
    return length


def _newlines_before(path: Path, position: int) -> int:
    count = 0
    with path.open("rb") as file:
        while position > 0 and (chunk := file.read(min(READ, position))):
            count += chunk.count(b"\n")
            position -= len(chunk)
    return count


def _open(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return io.BufferedReader(gzip.open(path, "rb"), READ)  # type: ignore[arg-type]
    if suffix == ".zst":
        return _open_zstandard(path)
    return path.open("rb", buffering=READ)


def _open_zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(f"{path} needs the zstandard library: pip install 'card_megatron[data]'") from error

    class Stream(io.RawIOBase):
        """zstandard's reader, with its own kind of error turned into everybody's."""

        def __init__(self) -> None:
            self.file = path.open("rb")
            self.reader = zstandard.ZstdDecompressor().stream_reader(self.file, read_across_frames=True)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            try:
                return self.reader.readinto(buffer)
            except zstandard.ZstdError as error:
                raise OSError(0, f"damaged zstd: {error}") from error

        def close(self) -> None:
            self.file.close()
            super().close()

    return io.BufferedReader(Stream(), READ)


# ---------------------------------------------------------------- whole texts


def _whole_text(path: Path, longest: int) -> str | Problem:
    """A text file is one document."""
    with _open(path) as file:
        data = file.read(longest + 1)
    if len(data) > longest:
        return Problem(str(path), None, "longer than the limit of --max-document-bytes")
    try:
        found = check_text(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Problem(str(path), data[: error.start].count(b"\n") + 1, "invalid UTF-8")
    return found.text if isinstance(found, Document) else Problem(str(path), None, found)


# ---------------------------------------------------------------- Parquet


def _parquet(path: Path, text_key: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs the pyarrow library: pip install 'card_megatron[data]'") from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except Exception as error:  # pyarrow raises several kinds for a damaged file
        raise OSError(0, f"damaged Parquet: {error}") from error
    if text_key not in file.schema_arrow.names:
        names = ", ".join(file.schema_arrow.names)
        raise ConfigError(f"{path} has no column {text_key!r}; its columns are {names}: name one with --text-key")
    return file


def _row_groups(path: Path, piece_bytes: int, text_key: str) -> Iterator[Piece]:
    """Row groups side by side until they hold enough."""
    try:
        metadata = _parquet(path, text_key).metadata
    except OSError:
        yield Piece(str(path), "parquet", 0, -1, path.stat().st_size)  # named as a problem when it is read
        return
    start, held = 0, 0
    for group in range(metadata.num_row_groups):
        held += metadata.row_group(group).total_byte_size
        if held >= piece_bytes or group == metadata.num_row_groups - 1:
            yield Piece(str(path), "parquet", start, group + 1, held)
            start, held = group + 1, 0


def _parquet_documents(path: Path, piece: Piece, text_key: str, longest: int) -> Iterator[str | Problem]:
    file = _parquet(path, text_key)
    groups = range(piece.start, piece.stop if piece.stop >= 0 else file.num_row_groups)
    row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
    try:
        for batch in file.iter_batches(batch_size=256, row_groups=list(groups), columns=[text_key], use_threads=False):
            for text in batch.column(0).to_pylist():
                row += 1
                found = check_text(text)
                if isinstance(found, Document) and len(found.text) > longest:
                    found = "longer than the limit of --max-document-bytes"
                yield found.text if isinstance(found, Document) else Problem(piece.path, row, found)
    except UnicodeDecodeError:
        yield Problem(piece.path, row + 1, "invalid UTF-8; the rest of its row groups was not read")
    except Exception as error:
        yield Problem(piece.path, row + 1, f"damaged Parquet ({error}); the rest of its row groups was not read")


def grouped(pieces: Iterable[Piece], enough: int) -> list[list[Piece]]:
    """Consecutive pieces put together until they hold enough bytes: a million small files make no million shards."""
    shards: list[list[Piece]] = []
    held = enough
    for piece in pieces:
        if held >= enough:
            shards.append([])
            held = 0
        shards[-1].append(piece)
        held += piece.bytes
    return shards


def read_all(inputs: Iterable[str], text_key: str, longest: int) -> Iterator[str | Problem]:
    """Every document of some inputs, in one process."""
    pieces = cut(expand(inputs), 1 << 62, text_key)
    return itertools.chain.from_iterable(documents_of(piece, text_key, longest) for piece in pieces)
