"""Inputs of a build: which files there are, how they are cut into pieces, and the documents of a piece.

A piece is read alone, by whichever process gets it: a byte range of a .jsonl, row groups of a Parquet file, or a whole
file that cannot be entered in the middle. Cutting depends on the inputs alone, so the order of documents does too.
"""

from __future__ import annotations

import glob
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from card_megatron.config.errors import ConfigError

LINES = (".jsonl", ".ndjson", ".json")
TEXTS = (".txt", ".text", ".md")
PACKED = (".gz", ".zst")
READ = 1 << 20
TOO_LONG = "longer than the limit of --max-document-bytes"


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
    """A line, counted from the first that begins in the piece, or a row of Parquet; None is the whole file."""
    what: str


class Damaged(Exception):
    """A packed file that cannot be unpacked any further."""


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
            magic = glob.has_magic(entry)
            matches = sorted(match for match in anchor.glob(pattern) if match.is_file()) if magic else []
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
    except OSError as error:
        # no fault of the text: it may be there when the build is started again
        raise ConfigError(f"{piece.path} cannot be read: {error.strerror or error}; start again to go on") from error


# ---------------------------------------------------------------- lines


def _line_documents(path: Path, piece: Piece, text_key: str, longest: int) -> Iterator[str | Problem]:
    number = 0
    try:
        for number, line in enumerate(_lines(path, piece, longest), start=1):
            found = TOO_LONG if line is None else _text_of(line, text_key)
            if isinstance(found, Document):
                yield found.text
            elif found is not None:  # None is a blank line between documents
                yield Problem(piece.path, number, found)
    except Damaged as error:
        yield Problem(piece.path, number + 1, f"{error}; what follows was not read")


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
    if isinstance(text, bytes):  # of a binary column
        try:
            text = text.decode()
        except UnicodeDecodeError:
            return "invalid UTF-8"
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


def lines_begun(path: str, start: int, stop: int) -> int:
    """How many lines of a file begin in [start, stop): at its beginning, or after a newline."""
    count, position = int(start == 0 < stop), max(start - 1, 0)
    with Path(path).open("rb", buffering=0) as file:
        file.seek(position)
        while position < stop - 1 and (chunk := file.read(min(READ, stop - 1 - position))):
            count += chunk.count(b"\n")
            position += len(chunk)
    return count


def _open(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix in PACKED and not path.stat().st_size:
        raise Damaged(f"damaged {suffix[1:]} (0 bytes)")
    if suffix == ".gz":
        return io.BufferedReader(_Unpacked("gzip", gzip.open(path)), READ)
    if suffix == ".zst":
        # of pyarrow, not zstandard: that one takes a truncated file for a whole one
        return io.BufferedReader(_Unpacked("zstd", _pyarrow(path).input_stream(str(path), compression="zstd")), READ)
    return path.open("rb", buffering=READ)


class _Unpacked(io.RawIOBase):
    """What a packed file holds, with all that may be wrong with it turned into one kind of error."""

    def __init__(self, packing: str, file: Any):
        self.packing, self.file = packing, file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self.file.read1(min(len(buffer), 1 << 16))  # little at a time: what comes before the damage counts
        except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
            if getattr(error, "errno", None):
                raise  # the file system's fault
            raise Damaged(f"damaged {self.packing} ({error})") from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self.file.close()
        super().close()


# ---------------------------------------------------------------- whole texts


def _whole_text(path: Path, longest: int) -> str | Problem:
    """A text file is one document."""
    try:
        with _open(path) as file:
            data = file.read(longest + 1)
    except Damaged as error:
        return Problem(str(path), None, str(error))
    if len(data) > longest:
        return Problem(str(path), None, TOO_LONG)
    try:
        found = check_text(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Problem(str(path), data[: error.start].count(b"\n") + 1, "invalid UTF-8")
    return found.text if isinstance(found, Document) else Problem(str(path), None, found)


# ---------------------------------------------------------------- Parquet


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs the pyarrow library: pip install -e '.[data]' in the checkout") from error
    return pyarrow


def _parquet(path: Path, text_key: str) -> Any:
    path.open("rb").close()  # a file that cannot be read is not a damaged one
    try:
        file = _pyarrow(path).parquet.ParquetFile(path, page_checksum_verification=True)
    except ConfigError:
        raise
    except Exception as error:  # pyarrow raises several kinds for a damaged file
        raise Damaged(f"damaged Parquet ({error})") from error
    if text_key not in file.schema_arrow.names:
        names = ", ".join(file.schema_arrow.names)
        raise ConfigError(f"{path} has no column {text_key!r}; its columns are {names}: name one with --text-key")
    return file


def _row_groups(path: Path, piece_bytes: int, text_key: str) -> Iterator[Piece]:
    """Row groups side by side until they hold enough."""
    try:
        metadata = _parquet(path, text_key).metadata
    except Damaged:
        yield Piece(str(path), "parquet", 0, -1, path.stat().st_size)  # named as a problem when it is read
        return
    start, held = 0, 0
    for group in range(metadata.num_row_groups):
        held += metadata.row_group(group).total_byte_size
        if held >= piece_bytes or group == metadata.num_row_groups - 1:
            yield Piece(str(path), "parquet", start, group + 1, held)
            start, held = group + 1, 0


def _parquet_documents(path: Path, piece: Piece, text_key: str, longest: int) -> Iterator[str | Problem]:
    try:
        file = _parquet(path, text_key)
    except Damaged as error:
        yield Problem(piece.path, None, str(error))
        return
    groups = range(piece.start, piece.stop if piece.stop >= 0 else file.num_row_groups)
    row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
    try:
        for batch in file.iter_batches(batch_size=256, row_groups=list(groups), columns=[text_key], use_threads=False):
            for text in _texts(batch.column(0)):
                row += 1
                found = check_text(text)
                if isinstance(found, Document) and len(found.text.encode()) > longest:
                    found = TOO_LONG
                yield found.text if isinstance(found, Document) else Problem(piece.path, row, found)
    except Exception as error:  # pyarrow has several kinds for this too
        if getattr(error, "errno", None):
            raise
        yield Problem(piece.path, row + 1, f"damaged Parquet ({error}); what follows was not read")


def _texts(column: Any) -> list[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # one invalid text shall not hide its neighbours
        return column.cast("large_binary").to_pylist()


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
