"""`card convert`: checkpoints to and from the inference format, a plain Hugging Face folder."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from card_megatron.config.errors import ConfigError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="card convert", description="Convert checkpoints to and from a Hugging Face folder, without a GPU."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    export = commands.add_parser("to-hf", help="a checkpoint of any layout -> a Hugging Face folder")
    export.add_argument("checkpoint", type=Path, help="a checkpoint, or a run directory for its newest one")
    export.add_argument("output", type=Path, help="the folder to write")
    export.add_argument("--ema", action="store_true", help="the averaged weights instead of the trained ones")
    export.add_argument("--shard-size", type=size, default="4GB", help="largest .safetensors file (default: 4GB)")
    export.add_argument("--vocab-size", type=int, help="true vocabulary of a Megatron-LM checkpoint")
    export.set_defaults(function=to_hf)
    back = commands.add_parser("from-hf", help="a Llama-family folder -> a checkpoint for `card train --init-from`")
    back.add_argument("source", type=Path, help="a Hugging Face folder (Llama, Mistral, Qwen2, Qwen3)")
    back.add_argument("output", type=Path, help="the checkpoint to write")
    back.set_defaults(function=from_hf)
    for command in (export, back):
        command.add_argument("--tokenizer", help="where the tokenizer is, if not where the run or the folder has it")
        command.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="default: as it is stored")
        command.add_argument(
            "--verify",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="compare log-probabilities of Megatron and transformers; takes the model's memory (default: yes)",
        )
        command.add_argument("--force", action="store_true", help="replace an output that exists")
    options = parser.parse_args(list(arguments))
    options.function(options)


def to_hf(options: argparse.Namespace) -> None:
    from card_megatron.checkpoint.source import open_source
    from card_megatron.convert import to_hf as conversion
    from card_megatron.convert.output import refuse_existing
    from card_megatron.data.tokenizers import load_tokenizer, tokenizer_of

    refuse_existing(options.output, options.checkpoint, force=options.force, may_replace=conversion.EXPORT)
    vocab_size = options.vocab_size
    if vocab_size is None and options.tokenizer is not None:
        vocab_size = load_tokenizer(options.tokenizer).vocab_size
    source = open_source(options.checkpoint, vocab_size)
    if options.vocab_size is not None and source.config.model.vocab_size != options.vocab_size:
        raise ConfigError(
            f"--vocab-size {options.vocab_size}: {source.path} says {source.config.model.vocab_size}; leave it out"
        )
    tokenizer = tokenizer_of(source.config, options.tokenizer, source.tokenizer)
    with progress_bar("writing") as progress:
        exported = conversion.to_hf(
            source,
            options.output,
            tokenizer,
            ema=options.ema,
            dtype=options.dtype,
            shard_bytes=options.shard_size,
            verify=options.verify,
            force=options.force,
            progress=progress,
            say=progress.say,
        )
    if tokenizer is None:
        print("no tokenizer is known, so none was exported; --tokenizer names one")
    if exported.comparison is not None:
        print(exported.comparison)
    print(f"{source.path} -> {options.output}: {exported.bytes:,} bytes of weights")


def from_hf(options: argparse.Namespace) -> None:
    from card_megatron.convert import from_hf as conversion
    from card_megatron.convert.output import refuse_existing

    refuse_existing(options.output, options.source, force=options.force, may_replace=conversion.START)
    with progress_bar("writing") as progress:
        imported = conversion.from_hf(
            options.source,
            options.output,
            tokenizer=options.tokenizer,
            dtype=options.dtype,
            verify=options.verify,
            force=options.force,
            progress=progress,
            say=progress.say,
        )
    if imported.mask is None:
        print("no tokenizer was found, so no [MASK] was added; --tokenizer names one")
    elif imported.mask_is_new:
        print(
            f"[MASK] is new: id {imported.mask}, its row the mean of the others ({imported.new_rows} rows were added)"
        )
    if imported.comparison is not None:
        print(imported.comparison)
    print(f"{options.source} -> {options.output}")
    print(f"train from it: card train --config {options.output / conversion.RUN_FILE} --init-from {options.output} ...")


def size(text: str) -> int:
    """Bytes of '4GB', '500MB' or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2].upper() not in UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4GB or 500MB")
    return int(float(match[1]) * UNITS[match[2].upper()])


class progress_bar:
    """A bar in bytes that closes itself; say() writes a line above it."""

    def __init__(self, what: str):
        from tqdm import tqdm

        self.bar = tqdm(desc=what, unit="B", unit_scale=True, disable=None)

    def __enter__(self) -> progress_bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def __call__(self, done: int, total: int) -> None:
        self.bar.total = total
        self.bar.update(done - self.bar.n)

    def say(self, text: str) -> None:
        self.bar.write(text)
