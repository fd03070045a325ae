"""`card data`: from text to the files that training reads, and a look at both."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from card_megatron.commands.data_views import add_views
from card_megatron.config.errors import ConfigError
from card_megatron.data import python_docs
from card_megatron.data.build import SHARD_BYTES, Plan, build, single_threaded
from card_megatron.data.preprocess import write_documents
from card_megatron.data.shards import ReadOptions, where
from card_megatron.data.sources import Problem, read_all
from card_megatron.data.tokenizer_training import add_mask, train_sentencepiece
from card_megatron.data.tokenizers import load_tokenizer

TOKENIZER = "SentencePiece .model, tokenizer.json, a folder with one or with GPT-2's two files, or `bytes`"


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="card data", description="From text to the files that training reads.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    corpus = commands.add_parser("python-docs", help="write the small corpus that every Python carries")
    corpus.add_argument("folder", type=Path, help="gets train.jsonl and valid.jsonl")
    corpus.set_defaults(function=write_python_docs)

    tokenizer = commands.add_parser("tokenizer", help="train a tokenizer, or add [MASK] to one")
    actions = tokenizer.add_subparsers(required=True, metavar="ACTION")
    train = actions.add_parser("train", help="train a SentencePiece model with byte fallback, [MASK], <s>, </s>, <pad>")
    _add_inputs(train)
    train.add_argument("--output", type=Path, required=True, help="the .model file to write")
    train.add_argument("--vocab-size", type=int, default=8192, help="pieces, special ones included (default: 8192)")
    train.add_argument("--model-type", choices=["bpe", "unigram"], default="bpe", help="default: bpe")
    train.add_argument(
        "--sample-lines", type=int, default=5_000_000, help="lines drawn at random to train on (default: 5,000,000)"
    )
    train.set_defaults(function=train_tokenizer)
    mask = actions.add_parser("add-mask", help="copy a tokenizer that has no [MASK], with one as its last id")
    mask.add_argument("source", type=Path, help=TOKENIZER)
    mask.add_argument("output", type=Path, help="the .model or tokenizer.json to write")
    mask.set_defaults(function=add_mask_to)

    build_command = commands.add_parser("build", help="tokenise documents into Megatron's .bin/.idx")
    _add_inputs(build_command)
    build_command.add_argument("--output", type=Path, required=True, help="prefix of the .bin, .idx and .json to write")
    build_command.add_argument("--tokenizer", required=True, help=TOKENIZER)
    build_command.add_argument("--workers", type=int, default=1, help="processes on this machine (default: 1)")
    build_command.add_argument("--mpi", action="store_true", help="share the work among the ranks of an MPI job")
    build_command.add_argument(
        "--on-error",
        choices=["skip", "stop"],
        default="skip",
        help="what is no document: skip it, count it and list it in PREFIX.problems.jsonl, or stop (default: skip)",
    )
    build_command.add_argument(
        "--max-document-bytes", type=int, default=ReadOptions.max_document_bytes, help="longer ones are problems"
    )
    build_command.add_argument("--no-eod", action="store_true", help="do not close documents with end-of-document")
    build_command.add_argument("--restart", action="store_true", help="forget the shards of a build that was begun")
    build_command.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help=argparse.SUPPRESS)
    build_command.set_defaults(function=build_files)
    add_views(commands)

    options = parser.parse_args(list(arguments))
    try:
        options.function(options)
    except OSError as error:
        raise ConfigError(f"{error.filename or ''}: {error.strerror or error}".removeprefix(": ")) from error


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    about = ".jsonl (a document a line; also .gz, .zst), .parquet, text files, folders, patterns; - is stdin (.jsonl)"
    parser.add_argument("inputs", nargs="+", help=about)
    parser.add_argument("--text-key", default="text", help="field or column that holds the text (default: text)")


def write_python_docs(options: argparse.Namespace) -> None:
    train, held_out = python_docs.train_and_validation(python_docs.python_documents())
    for name, documents in (("train", train), ("valid", held_out)):
        path = write_documents(options.folder / f"{name}.jsonl", documents)
        print(f"{path}: {len(documents):,} documents, {sum(map(len, documents)):,} characters")


def train_tokenizer(options: argparse.Namespace) -> None:
    options.output.parent.mkdir(parents=True, exist_ok=True)
    spool = options.output.with_name(options.output.name + ".stdin.jsonl")
    inputs = [_spooled(spool) if entry == "-" else entry for entry in options.inputs]
    found = read_all(inputs, options.text_key, ReadOptions.max_document_bytes)
    documents = _with_progress(_good(found), "reading")
    path = train_sentencepiece(
        documents, options.output, options.vocab_size, options.model_type, most_lines=options.sample_lines
    )
    spool.unlink(missing_ok=True)
    tokenizer = load_tokenizer(path)
    print(f"{path}: {tokenizer.vocab_size:,} pieces, [MASK] is {tokenizer.mask}, end of document {tokenizer.eod}")


def add_mask_to(options: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(add_mask(options.source, options.output))
    print(
        f"{options.output}: {tokenizer.vocab_size:,} ids, [MASK] is {tokenizer.mask}, end of document {tokenizer.eod}"
    )


def build_files(options: argparse.Namespace) -> None:
    from tqdm import tqdm

    if options.workers < 1:
        raise ConfigError(f"--workers={options.workers} must be at least 1")
    if options.mpi and "-" in options.inputs:
        raise ConfigError("--mpi cannot share standard input out among ranks; write it to a file first")
    single_threaded()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    spool = options.output.with_name(options.output.name + ".stdin.jsonl")
    inputs = [_spooled(spool) if entry == "-" else entry for entry in options.inputs]
    read = ReadOptions(options.text_key, not options.no_eod, options.on_error, options.max_document_bytes)
    bar = tqdm(desc="tokenising", unit="B", unit_scale=True, disable=None)

    def announce(plan: Plan, done: int) -> None:
        bar.reset(plan.bytes)
        bar.update(done)
        if done:
            print(f"going on with a build of which {done / max(plan.bytes, 1):.0%} is done", file=sys.stderr)

    def report(manifest: dict[str, Any]) -> None:
        bar.close()
        print(f"{options.output}.bin/.idx: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens")
        if manifest["problems"]:
            counts = ", ".join(f"{count:,} x {what}" for what, count in manifest["problems"].items())
            print(f"skipped: {counts}; each is named in {options.output}.problems.jsonl")

    with bar:
        build(
            inputs,
            options.output,
            options.tokenizer,
            read,
            workers=options.workers,
            mpi=options.mpi,
            restart=options.restart,
            shard_bytes=options.shard_bytes,
            progress=bar.update,
            announce=announce,
            report=report,
        )
    spool.unlink(missing_ok=True)


def _spooled(path: Path) -> str:
    """Standard input as a file, so that it can be cut and shared out."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        while chunk := sys.stdin.buffer.read(1 << 20):
            file.write(chunk)
    unfinished.replace(path)
    return str(path)


def _good(found: Iterable[str | Problem]) -> Iterator[str]:
    """Documents; the first problems are named."""
    skipped = 0
    for document in found:
        if isinstance(document, str):
            yield document
            continue
        skipped += 1
        if skipped <= 5:
            print(f"skipped {where(document)}: {document.what}", file=sys.stderr)
    if skipped > 5:
        print(f"skipped {skipped - 5:,} more", file=sys.stderr)


def _with_progress(documents: Iterable[str], what: str) -> Iterator[str]:
    from tqdm import tqdm

    yield from tqdm(documents, desc=what, unit=" documents", disable=None)  # shown on a terminal only
