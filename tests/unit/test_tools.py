"""Scripts with Megatron's names do what Megatron's do, or say why not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from card_megatron.cli import main as card
from card_megatron.data.tokenizers import load_tokenizer

TOOLS = Path(__file__).parents[2] / "tools"
DOCUMENTS = [
    {"title": "one", "text": "A first document.\nIt has two lines."},
    {"title": "two", "text": "A second one; it knows [MASK] as text alone."},
]


def preprocess(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, TOOLS / "preprocess_data.py", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)


def flags(folder: Path, corpus: Path) -> list:
    """The flags of a Megatron-LM user, for documents that this writes."""
    source = folder / "corpus.jsonl"
    source.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    return [
        *("--input", source, "--output-prefix", folder / "out", "--tokenizer-model", corpus / "tokenizer.model"),
        *("--tokenizer-type", "SentencePieceTokenizer", "--workers", 1),
    ]


def test_preprocess_data_writes_what_megatron_reads_and_card_data_build_writes(tmp_path, corpus):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    result = preprocess(*flags(tmp_path, corpus), "--append-eod", "--json-keys", "text", "title")
    assert result.returncode == 0, result.stderr
    tokenizer = load_tokenizer(corpus / "tokenizer.model")
    for key in ("text", "title"):
        dataset = IndexedDataset(str(tmp_path / f"out_{key}_document"))
        assert dataset.document_indices.tolist() == [0, 1, 2]
        for row, document in zip(dataset, DOCUMENTS, strict=True):
            assert row[-1] == tokenizer.eod and tokenizer.mask not in row
            assert tokenizer.decode(row[:-1].tolist()) == document[key]
        ours = tmp_path / f"ours_{key}"
        options = ["--text-key", key, "--tokenizer", str(corpus / "tokenizer.model"), "--output", str(ours)]
        card(["data", "build", str(tmp_path / "corpus.jsonl"), *options])
        for suffix in (".bin", ".idx"):
            theirs = tmp_path / f"out_{key}_document{suffix}"
            assert Path(f"{ours}{suffix}").read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "add --append-eod"),
        (["--append-eod", "--workers", 4], "--workers 4: one process tokenises; use --workers 1"),
        (["--append-eod", "--input", "corpus.json"], "corpus.json does not end in .jsonl; rename it"),
        (["--append-eod", "--tokenizer-type", "GPT2BPETokenizer"], "choose from '?SentencePieceTokenizer"),
        (["--append-eod", "--json-keys", "body"], "has no 'body' field; name the field with --json-keys"),
        (["--append-eod", "--tokenizer-model", "none.model"], "none.model: no such file"),
    ],
)
def test_preprocess_data_refuses_with_the_remedy(tmp_path, corpus, arguments, message):
    result = preprocess(*flags(tmp_path, corpus), *arguments)
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert re.search(message, result.stderr), result.stderr
    assert not list(tmp_path.glob("out*.idx"))
