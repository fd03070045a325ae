"""Inputs: every document once and in order however a file is cut; what is no document is named, and never dropped."""

from __future__ import annotations

import gzip
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from card_megatron.config import ConfigError
from card_megatron.data.shards import ReadOptions, build_shard, problems_of
from card_megatron.data.sources import Problem, cut, documents_of, expand, grouped, lines_begun, read_all
from card_megatron.data.tokenizers import BytesTokenizer

LONGEST = 300
RANDOM = random.Random(4)
ODD = ["plain", "Grüße, 世界! 🙂", 'quotes " and \\ and \u2028', "two\nlines\r\n", "▁ \t.", "x" * 200]


def found_in(*inputs, piece_bytes=1 << 30, longest=LONGEST, key="text") -> list[str | Problem]:
    pieces = cut(expand(map(str, inputs)), piece_bytes, key)
    return [document for piece in pieces for document in documents_of(piece, key, longest)]


def json_line(text) -> bytes:
    return json.dumps({"id": 7, "text": text}, ensure_ascii=False).encode() + b"\n"


def written(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(lines))
    return path


# ---------------------------------------------------------------- cutting


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
LINES_AND_WHAT_THEY_ARE = st.one_of(
    TEXTS.map(lambda text: (json_line(text), text if text.strip() else "! empty document")),
    st.integers(LONGEST, 900).map(lambda size: (b"x" * size + b"x\n", "! longer than the limit")),
    st.sampled_from(
        [
            (b"\n", None),
            (b" \r\n", None),
            (b'{"text": "cut \n', "! broken JSON"),
            (b'{"txt": 1}\n', "! no 'text' field"),
            (b'{"text": 5}\n', "! the text is a int"),
            (b'{"text": "\xff"}\n', "! invalid UTF-8"),
        ]
    ),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(LINES_AND_WHAT_THEY_ARE, max_size=12), st.integers(1, 700), st.booleans())
def test_pieces_of_any_size_hold_every_line_once_and_know_its_number(
    tmp_path_factory, lines, piece_bytes, last_newline
):
    data = b"".join(line for line, _ in lines)
    path = written(tmp_path_factory.getbasetemp() / "any.jsonl", data if last_newline else data.removesuffix(b"\n"))
    found: list = []
    before = 0
    for piece in cut([path], piece_bytes, "text"):
        assert lines_begun(piece.path, 0, piece.start) == before
        for document in documents_of(piece, "text", LONGEST):
            found.append(document if isinstance(document, str) else (before + document.line, document.what))
        before += lines_begun(piece.path, piece.start, piece.stop)
    expected = [(number, what) for number, (_, what) in enumerate(lines, start=1) if what is not None]
    for got, (number, what) in zip(found, expected, strict=True):
        if what.startswith("! ") and isinstance(got, tuple):
            assert got[0] == number and got[1].startswith(what[2:])
        else:
            assert got == what


def test_shards_name_lines_of_the_file_whatever_its_pieces(tmp_path):
    lines = [b"broken\n" if number % 7 == 3 else json_line(f"text {number}") for number in range(100)]
    path, other = written(tmp_path / "a.jsonl", *lines), written(tmp_path / "b.jsonl", b"\n", b"broken\n")
    shards = grouped(cut([path, other, path], 150, "text"), 400)
    assert len(shards) > 10
    stats = [
        build_shard(number, pieces, tmp_path, BytesTokenizer(), ReadOptions()) for number, pieces in enumerate(shards)
    ]
    named = [(Path(problem.path).name, problem.line) for problem in problems_of(zip(shards, stats, strict=True))]
    expected = [("a.jsonl", number + 1) for number in range(3, 100, 7)]
    assert named == [*expected, ("b.jsonl", 2), *expected]
    assert sum(shard["documents"] for shard in stats) + len(named) == 201, "each line is a document or a problem"
    stopped = set()
    for number, pieces in enumerate(shards, start=len(shards)):
        try:
            build_shard(number, pieces, tmp_path, BytesTokenizer(), ReadOptions(on_error="stop"))
        except ConfigError as error:
            stopped.add(re.search(r"(\w\.jsonl):(\d+): broken JSON .*--on-error skip", str(error)).groups())
    assert len(stopped) >= 10 and stopped <= {(name, str(line)) for name, line in named}


# ---------------------------------------------------------------- kinds of input


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory) -> Path:
    """The same texts in every form."""
    pa, zstandard = pytest.importorskip("pyarrow"), pytest.importorskip("zstandard")
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("kinds")
    lines = [json_line(text) for text in ODD]
    written(folder / "a.jsonl", *lines)
    # packed in two parts, as `cat a.gz b.gz` makes them
    written(folder / "a.jsonl.gz", gzip.compress(b"".join(lines[:3])), gzip.compress(b"".join(lines[3:])))
    pack = zstandard.ZstdCompressor().compress
    written(folder / "a.jsonl.zst", pack(b"".join(lines[:3])), pack(b"".join(lines[3:])))
    rows = {"text": ODD, "id": [f"<urn:uuid:{n}>" for n in range(6)], "language_score": [0.9] * 6}
    parquet.write_table(pa.table(rows), folder / "a.parquet", row_group_size=2)
    for number, text in enumerate(ODD):
        written(folder / f"{number}.txt", text.encode())
    return folder


@pytest.mark.parametrize("pattern", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "*.txt", "[0-9].t?t"])
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_every_form_gives_the_same_documents(every_kind, pattern, piece_bytes):
    assert found_in(every_kind / pattern, piece_bytes=piece_bytes) == ODD


def test_row_groups_are_pieces(every_kind):
    assert [(piece.start, piece.stop) for piece in cut([every_kind / "a.parquet"], 1, "text")] == [
        (0, 1),
        (1, 2),
        (2, 3),
    ]


def test_directories_are_read_in_the_order_of_names_with_what_they_hold(tmp_path):
    (tmp_path / "b" / "deep").mkdir(parents=True)
    written(tmp_path / "b" / "deep" / "2.jsonl", json_line("two"))
    written(tmp_path / "b" / "1.txt", b"one")
    written(tmp_path / "b" / "picture.png", b"\x89PNG")  # no text by its name
    written(tmp_path / "a.md", b"zero")
    assert found_in(tmp_path) == ["zero", "one", "two"]
    assert found_in(tmp_path / "b", tmp_path / "a.md") == ["one", "two", "zero"]
    assert found_in(tmp_path / "**" / "*.jsonl") == ["two"]
    assert list(read_all([str(tmp_path)], "text", LONGEST)) == ["zero", "one", "two"]


def test_inputs_that_are_not_there_are_refused(tmp_path):
    for entry in ("none.jsonl", "*.jsonl", "."):
        with pytest.raises(ConfigError, match=r"no such file, directory or pattern; give \.jsonl"):
            expand([str(tmp_path / entry)])


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"text": "open', r"broken JSON \(Invalid control character"),
        (b"{'text': 'python'}", r"broken JSON \(Expecting property name"),
        (b"[" * 100_000, r"broken JSON \(maximum recursion"),
        (b'{"text": "raw \x00 NUL"}', r"broken JSON \(Invalid control character"),
        (b"\x00\x00\x00\x00", "invalid UTF-8|broken JSON"),
        (b'{"body": "x"}', "no 'text' field"),
        (b'["text"]', "no 'text' field"),
        (b'{"text": null}', "the text is null, not a string"),
        (b'{"text": ["x"]}', "the text is a list, not a string"),
        (b'{"text": "\xff\xfe"}', "invalid UTF-8"),
        (b'{"text": ""}', "empty document"),
        (b'{"text": " \\n\\t"}', "empty document"),
        (b'{"text": "a\\u0000b"}', "a NUL in the text"),
        (b'{"text": "a\\ud800b"}', "a lone surrogate in the text"),
        (b'{"text": "a\xed\xa0\x80b"}', "invalid UTF-8|a lone surrogate in the text"),
        (b'{"text": "' + b"x" * 200_000 + b'"}', "longer than the limit of --max-document-bytes"),
    ],
)
def test_a_line_that_is_no_document_is_named_and_its_neighbours_are_kept(tmp_path, line, what):
    path = written(tmp_path / "a.jsonl", json_line("one"), b"\n", line + b"\n", json_line("two"))
    first, problem, last = found_in(path, longest=150_000)
    assert (first, last, problem.path, problem.line) == ("one", "two", str(path), 3)
    assert re.match(what, problem.what), problem.what


@pytest.mark.parametrize(
    ("data", "line", "what"),
    [
        (b"fine\nnot \xff fine", 2, "invalid UTF-8"),
        (b" \n", None, "empty document"),
        (b"a\0b", None, "a NUL in the text"),
        (b"x" * (LONGEST + 1), None, "longer than the limit of --max-document-bytes"),
    ],
)
def test_a_text_file_that_is_no_document_is_named(tmp_path, data, line, what):
    path = written(tmp_path / "a.txt", data)
    assert found_in(path) == [Problem(str(path), line, what)]


def packed(packing: str, data: bytes) -> bytes:
    if packing == "gz":
        return gzip.compress(data, 1)
    # with a checksum, as the zstd command writes it
    return pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(data)


@pytest.mark.parametrize("packing", ["gz", "zst"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.99999])
def test_a_truncated_packed_file_gives_what_it_can_and_says_where_it_ends(tmp_path, packing, keep):
    lines = [json_line(f"{number} {RANDOM.randbytes(60).hex()}") for number in range(6000)]
    data = packed(packing, b"".join(lines))
    path = written(tmp_path / f"a.jsonl.{packing}", data[: int(keep * len(data))])
    *documents, problem = found_in(path)
    assert [json_line(text) for text in documents] == lines[: len(documents)]
    assert len(documents) > 6000 * (keep - 0.2), "what comes before the damage is good"
    assert problem.line == len(documents) + 1 and problem.what.startswith("damaged ")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz", "a.jsonl.zst", "a.parquet"])
def test_damage_in_the_middle_is_a_problem_and_no_traceback(tmp_path, name):
    texts = [RANDOM.randbytes(60).hex() for _ in range(3000)]
    if name == "a.parquet":
        from pyarrow import parquet, table

        parquet.write_table(table({"text": texts}), tmp_path / name, write_page_checksum=True)
        data = (tmp_path / name).read_bytes()
    else:
        data = packed(name.rpartition(".")[2], b"".join(map(json_line, texts)))
    half = len(data) // 2
    for broken in (data[:3], data[:half], data[:half] + b"\xff" * 64 + data[half + 64 :]):
        path = written(tmp_path / name, broken)
        problems = [document for document in found_in(path, longest=1 << 20) if isinstance(document, Problem)]
        assert problems and problems[-1].what.startswith("damaged ") and problems[-1].path == str(path)


def test_rows_of_parquet_that_are_no_documents_are_named(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    values = [b"one", b"\xff\xfe", None, b"", b"a\0b", "é".encode() * 160, b"two"]
    invalid = pa.array(values, pa.binary()).view(pa.string())
    for name, column in (("strings", invalid), ("bytes", pa.array(values, pa.binary()))):
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pa.table({"text": column}), path, row_group_size=3)
        found = found_in(path, piece_bytes=1)
        assert [document for document in found if isinstance(document, str)] == ["one", "two"]
        problems = [(document.line, document.what[:12]) for document in found if isinstance(document, Problem)]
        whats = ["invalid UTF-", "the text is ", "empty docume", "a NUL in the", "longer than "]
        assert problems == list(enumerate(whats, start=2))
    with pytest.raises(ConfigError, match="no column 'body'; its columns are text: name one with --text-key"):
        found_in(path, key="body")


def test_a_file_that_goes_away_ends_the_build_and_is_no_problem_of_the_text(tmp_path):
    path = written(tmp_path / "a.jsonl", json_line("one"))
    (piece,) = cut([path], 1 << 20, "text")
    path.unlink()
    with pytest.raises(ConfigError, match=r"a\.jsonl cannot be read: No such file.*start again to go on"):
        list(documents_of(piece, "text", LONGEST))


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_a_line_of_200_megabytes_is_passed_over_in_little_memory(tmp_path, packing):
    path, small = tmp_path / f"long.jsonl{packing}", written(tmp_path / f"small.jsonl{packing}")
    data = b"".join([json_line("one"), b'{"text": "', b"x" * (200 << 20), b'"}\n', json_line("two")])
    written(path, packed(packing[1:], data) if packing else data)
    script = (
        "import resource, sys; from card_megatron.data.sources import *\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "list(read_all([sys.argv[2]], 'text', 9)); before = peak()\n"  # what the libraries need
        "found = list(read_all([sys.argv[1]], 'text', 1 << 16))\n"
        "print([getattr(document, 'line', document) for document in found], (peak() - before) >> 10)"
    )
    result = subprocess.run([sys.executable, "-c", script, path, small], capture_output=True, text=True, timeout=60)
    documents, _, megabytes = result.stdout.rpartition(" ")
    assert documents == "['one', 2, 'two']", result.stderr
    assert int(megabytes) < 24
