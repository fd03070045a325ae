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
        *("--tokenizer-type", "SentencePieceTokenizer", "--workers", 2, "--log-interval", 100),
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


def test_preprocess_data_without_append_eod_and_with_every_kind_of_tokenizer(tmp_path, corpus):
    """Several files by a pattern; documents that do not end; GPT-2's files and the tokenizer.json that they make."""
    tokenizers = pytest.importorskip("tokenizers")
    from card_megatron.data.indexed import Indexed

    folder, arguments = tmp_path / "gpt2", flags(tmp_path, corpus)
    folder.mkdir()
    bpe = tokenizers.ByteLevelBPETokenizer()
    texts = [document["text"] for document in DOCUMENTS]
    bpe.train_from_iterator(texts, 300, special_tokens=["<|endoftext|>", "[MASK]"], show_progress=False)
    bpe.save_model(str(folder))
    json_file = tmp_path / "hf" / "tokenizer.json"
    json_file.parent.mkdir()
    bpe.save(str(json_file))
    (tmp_path / "more.jsonl").write_text(json.dumps(DOCUMENTS[0]) + "\n")
    of_gpt2 = ["--vocab-file", folder / "vocab.json", "--merge-file", folder / "merges.txt"]
    for kind, options, loaded in (
        ("HuggingFaceTokenizer", ["--tokenizer-model", json_file.parent], json_file),
        ("GPT2BPETokenizer", of_gpt2, folder),
    ):
        result = preprocess(*arguments, "--input", tmp_path / "*.jsonl", "--tokenizer-type", kind, *options)
        assert result.returncode == 0 and "3 documents" in result.stdout, result.stderr
        tokenizer, data = load_tokenizer(loaded), Indexed(tmp_path / "out_text_document")
        assert [tokenizer.decode(data[number]) for number in range(3)] == [*texts, texts[0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", 0], "--workers 0 must be at least 1"),
        (["--split-sentences"], "--split-sentences: CARD learns from whole documents; leave it out"),
        (["--keep-newlines"], "--keep-newlines: newlines are always kept; leave it out"),
        (["--partitions", 4], "--partitions: --workers shares out the work within files too; leave it out"),
        (["--input", __file__], "test_tools.py is not .jsonl or .json; rename it if each line is a JSON object"),
        (["--input", "none/*.jsonl"], "none/.*: no such file, directory or pattern"),
        (["--tokenizer-type", "NullTokenizer"], "NullTokenizer: choose from SentencePieceTokenizer, Hugging"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "needs --vocab-file FOLDER/vocab.json --merge-file FOLDER/merges"),
        (["--json-keys", "body"], "no document in the input: 2 x no 'body' field"),
        (["--tokenizer-model", "none.model"], "none.model: no such file"),
    ],
)
def test_preprocess_data_refuses_with_the_remedy(tmp_path, corpus, arguments, message):
    result = preprocess(*flags(tmp_path, corpus), *arguments)
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert re.search(message, result.stderr), result.stderr
    assert not list(tmp_path.glob("out*.idx"))
