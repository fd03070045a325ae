"""`card data`: a corpus, a tokenizer, .bin/.idx files."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from card_megatron.config.errors import ConfigError
from card_megatron.data import python_docs
from card_megatron.data.preprocess import build_indexed, read_documents, write_documents
from card_megatron.data.tokenizers import load_tokenizer, train_sentencepiece
from card_megatron.platform import install


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="card data", description="From text to the files that training reads.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    corpus = commands.add_parser("python-docs", help="write the small corpus that every Python carries")
    corpus.add_argument("folder", type=Path, help="gets train.jsonl and valid.jsonl")
    corpus.set_defaults(function=write_python_docs)

    tokenizer = commands.add_parser("tokenizer", help="train a SentencePiece tokenizer with a [MASK] piece")
    actions = tokenizer.add_subparsers(required=True, metavar="ACTION")
    train = actions.add_parser("train", help="train a BPE with byte fallback, [MASK], <s>, </s> and <pad>")
    _add_inputs(train)
    train.add_argument("--output", type=Path, required=True, help="the .model file to write")
    train.add_argument("--vocab-size", type=int, default=8192, help="pieces, special ones included (default: 8192)")
    train.set_defaults(function=train_tokenizer)

    build = commands.add_parser("build", help="tokenise documents into Megatron's .bin/.idx")
    _add_inputs(build)
    build.add_argument("--output", type=Path, required=True, help="prefix of the .bin and .idx files to write")
    build.add_argument("--tokenizer", type=Path, required=True, help="SentencePiece .model with a [MASK] piece")
    build.set_defaults(function=build_files)

    options = parser.parse_args(list(arguments))
    try:
        options.function(options)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", type=Path, help=".jsonl files (a document a line), or text files")
    parser.add_argument("--text-key", default="text", help="field of a .jsonl line that holds the text (default: text)")


def write_python_docs(options: argparse.Namespace) -> None:
    train, held_out = python_docs.train_and_validation(python_docs.python_documents())
    for name, documents in (("train", train), ("valid", held_out)):
        path = write_documents(options.folder / f"{name}.jsonl", documents)
        print(f"{path}: {len(documents):,} documents, {sum(map(len, documents)):,} characters")


def train_tokenizer(options: argparse.Namespace) -> None:
    documents = _with_progress(read_documents(options.inputs, options.text_key), "reading")
    path = train_sentencepiece(documents, options.output, options.vocab_size)
    tokenizer = load_tokenizer(path)
    print(f"{path}: {tokenizer.vocab_size:,} pieces, [MASK] is {tokenizer.mask}, end of document {tokenizer.eod}")


def build_files(options: argparse.Namespace) -> None:
    install()
    documents = _with_progress(read_documents(options.inputs, options.text_key), "tokenising")
    built = build_indexed(documents, load_tokenizer(options.tokenizer), options.output)
    print(f"{built.prefix}.bin/.idx: {built.documents:,} documents, {built.tokens:,} tokens")


def _with_progress(documents: Iterable[str], what: str) -> Iterator[str]:
    from tqdm import tqdm

    yield from tqdm(documents, desc=what, unit=" documents", disable=None)  # shown on a terminal only
