"""Megatron-LM's tools/preprocess_data.py, for this project's tokenizers: JSON lines to PREFIX_KEY_document.bin/.idx.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model --workers 8

The flags are Megatron-LM's; what it would do and this cannot is refused. `card data build` writes the same bytes, and
can do more. The tokenizer must have the [MASK] that CARD's noise needs (`card data tokenizer add-mask` adds it). Lines
that hold no document are skipped, counted and listed in PREFIX_KEY_document.problems.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from card_megatron.config.errors import ConfigError

REFUSED = {
    "split_sentences": "CARD learns from whole documents; leave it out",
    "keep_newlines": "newlines are always kept; leave it out",
    "partitions": "--workers shares out the work within files too; leave it out",
    "find_optimal_num_workers": "give --workers one for each core",
}
"""Flags that change what Megatron-LM's tool does in a way that cannot be had here, and what to do instead."""

TRANSLATED = {
    "--text-key": "--json-keys",
    "--restart deletes them": "delete it",
    "--output": "--output-prefix",
}
"""What the package's messages call an option, and its name here."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, help="JSON lines (.jsonl or .json, also .gz), or a quoted pattern")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="fields to tokenise, a file pair for each")
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx")
    parser.add_argument("--tokenizer-type", default="SentencePieceTokenizer", help=", ".join(TOKENIZERS))
    parser.add_argument("--tokenizer-model", help="SentencePiece .model, or tokenizer.json or a folder with one")
    parser.add_argument("--vocab-file", type=Path, help="GPT-2's vocab.json")
    parser.add_argument("--merge-file", type=Path, help="GPT-2's merges.txt, in the same folder")
    parser.add_argument("--append-eod", action="store_true", help="end each document with end-of-document")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--log-interval", type=int, help="accepted, and without effect")
    parser.add_argument("--keep-sequential-samples", action="store_true", help="accepted: the order is always kept")
    parser.add_argument("--partitions", type=more_than_one, default=False, help="only 1: --workers is enough")
    for name in ("split_sentences", "keep_newlines", "find_optimal_num_workers"):
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        preprocess(options, tokenizer_of(options))
    except (ConfigError, OSError) as error:
        message = str(error)
        for ours, megatron in TRANSLATED.items():
            message = message.replace(ours, megatron)
        sys.exit(f"preprocess_data.py: {message}")


def more_than_one(number: str) -> bool:
    return int(number) > 1


def sentencepiece_or_huggingface(options: argparse.Namespace) -> str:
    if not options.tokenizer_model:
        raise ConfigError(f"--tokenizer-type {options.tokenizer_type} needs --tokenizer-model")
    return options.tokenizer_model


def gpt2(options: argparse.Namespace) -> str:
    """GPT-2's two files are known by their names inside of a folder."""
    from card_megatron.data.tokenizers import gpt2_files

    given = [options.vocab_file, options.merge_file]
    if None in given or gpt2_files(given[0].parent) != given:
        raise ConfigError(
            "--tokenizer-type GPT2BPETokenizer needs --vocab-file FOLDER/vocab.json --merge-file FOLDER/merges.txt: "
            "put the files into one folder under these names"
        )
    return str(given[0].parent)


TOKENIZERS = {
    "SentencePieceTokenizer": sentencepiece_or_huggingface,
    "HuggingFaceTokenizer": sentencepiece_or_huggingface,
    "GPT2BPETokenizer": gpt2,
}
"""Megatron's name for a tokenizer -> how its files are given."""


def tokenizer_of(options: argparse.Namespace) -> str:
    """What `card data build --tokenizer` would be given; raises for what cannot be done."""
    for name, remedy in REFUSED.items():
        if getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')}: {remedy}")
    if options.workers < 1:
        raise ConfigError(f"--workers {options.workers} must be at least 1")
    if options.tokenizer_type not in TOKENIZERS:
        raise ConfigError(f"--tokenizer-type {options.tokenizer_type}: choose from {', '.join(TOKENIZERS)}")
    return TOKENIZERS[options.tokenizer_type](options)


def preprocess(options: argparse.Namespace, tokenizer: str) -> None:
    from card_megatron.data.build import build, single_threaded
    from card_megatron.data.shards import ReadOptions
    from card_megatron.data.sources import expand, kind_of

    for path in expand([options.input]):
        if kind_of(path) != "lines":
            raise ConfigError(f"--input {path} is not .jsonl or .json; rename it if each line is a JSON object")
    single_threaded()
    for key in options.json_keys:
        prefix = Path(f"{options.output_prefix}_{key}_document")
        read = ReadOptions(text_key=key, append_eod=options.append_eod)
        manifest = build([options.input], prefix, tokenizer, read, workers=options.workers)
        print(f"{prefix}.bin/.idx: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens")
        if manifest["problems"]:
            print(f"skipped: {manifest['problems']}; each is named in {prefix}.problems.jsonl")


if __name__ == "__main__":
    main()
