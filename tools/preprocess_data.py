"""Megatron-LM's tools/preprocess_data.py, for this project's tokenizers: JSON lines to PREFIX_KEY_document.bin/.idx.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model --workers 1

The flags are Megatron-LM's; what it would do and this cannot is refused. `card data build` writes the same bytes. A
document ends with the tokenizer's </s>, and the tokenizer must have the [MASK] piece that CARD's noise needs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from card_megatron.config.errors import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="a .jsonl file: one JSON object a line")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="fields to tokenise, a file pair for each")
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx")
    parser.add_argument("--tokenizer-type", choices=["SentencePieceTokenizer"], default="SentencePieceTokenizer")
    parser.add_argument("--tokenizer-model", type=Path, required=True, help="SentencePiece .model with a [MASK] piece")
    parser.add_argument("--append-eod", action="store_true", help="end each document with </s>; must be given")
    parser.add_argument("--workers", type=int, default=1, help="must be 1")
    options = parser.parse_args()
    try:
        refuse_what_cannot_be_done(options)
        preprocess(options)
    except ConfigError as error:
        # the package names the option of `card data build`
        sys.exit(f"preprocess_data.py: {str(error).replace('--text-key', '--json-keys')}")


def refuse_what_cannot_be_done(options: argparse.Namespace) -> None:
    if not options.append_eod:
        raise ConfigError("documents always end with </s> here, so that training can tell them apart; add --append-eod")
    if options.workers != 1:
        raise ConfigError(
            f"--workers {options.workers}: one process tokenises; use --workers 1, or run once for each part of the "
            "corpus (data.train takes several prefixes)"
        )
    if options.input.suffix != ".jsonl":
        raise ConfigError(f"--input {options.input} does not end in .jsonl; rename it if each line is a JSON object")


def preprocess(options: argparse.Namespace) -> None:
    from card_megatron.data.preprocess import build_indexed, read_documents
    from card_megatron.data.tokenizers import load_tokenizer
    from card_megatron.platform import install

    tokenizer = load_tokenizer(options.tokenizer_model)
    install()
    for key in options.json_keys:
        documents = read_documents([options.input], text_key=key)
        built = build_indexed(documents, tokenizer, f"{options.output_prefix}_{key}_document")
        print(f"{built.prefix}.bin/.idx: {built.documents:,} documents, {built.tokens:,} tokens")


if __name__ == "__main__":
    main()
