"""How fast text becomes tokens, and tokens become noised samples: each beside what it must keep up with.

    python benchmarks/preprocess.py [--corpus FILE.jsonl --tokenizer T] [--megatron-lm CHECKOUT] [--check]

Without --corpus the documentation that every Python ships is repeated, with a SentencePiece tokenizer trained on it.
With --megatron-lm (a checkout of Megatron-LM core_v0.16.1) its tools/preprocess_data.py runs on the same file with the
same tokenizer.json and the same number of workers, and the files are compared. Whole commands are timed on a small and
a larger part of the corpus, and the difference counts, so that the start of Python does not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from own_memory import own_peak_megabytes
from rich.console import Console
from rich.table import Table

from card_megatron.data import python_docs
from card_megatron.data.build import single_threaded
from card_megatron.data.indexed import Indexed, token_dtype, write_index
from card_megatron.data.preprocess import write_documents
from card_megatron.data.tokenizer_training import train_sentencepiece
from card_megatron.data.tokenizers import load_tokenizer
from card_megatron.platform import capabilities

H100_TOKENS = 58_000
"""Tokens a second that one H100 trains of the 1B model, about: what a loader must keep up with."""
MEGABYTE = 1_000_000

Row = tuple[str, str, float, str, bool]
"""What, detail, ratio, bar, whether it is met."""


def first_lines(corpus: Path, size: int, output: Path) -> Path:
    """The corpus, repeated or cut to about `size` bytes of whole lines."""
    lines = corpus.read_bytes().splitlines(keepends=True)
    with output.open("wb") as file:
        while file.tell() < size:
            for line in lines:
                file.write(line)
                if file.tell() >= size:
                    break
    return output


def seconds_of(command: list[str], environment: dict[str, str] | None = None, folder: Path | None = None) -> float:
    """How long a command takes that must succeed."""
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return time.perf_counter() - started


def our_command(source: Path, output: Path, tokenizer: str, workers: int) -> list[str]:
    command = [sys.executable, "-m", "card_megatron", "data", "build", str(source), "--output", str(output)]
    return [*command, "--tokenizer", tokenizer, "--workers", str(workers), "--shard-bytes", str(4 << 20)]


def rate(run: Callable[[Path, Path], float], folder: Path, small: Path, large: Path) -> float:
    """Bytes a second, from the difference of two runs: what both of them start with cancels out."""
    times = [run(source, folder / f"out_{source.stem}") for source in (small, large)]
    return (large.stat().st_size - small.stat().st_size) / (times[1] - times[0])


def tokens_a_byte(prefix: Path, source: Path) -> float:
    return Indexed(prefix).tokens / source.stat().st_size


def library_rate(tokenizer_name: str, source: Path) -> float:
    """Bytes a second of the tokenizer's own batch call on the same texts, in this process, on one thread."""
    tokenizer: Any = load_tokenizer(tokenizer_name)
    texts = [json.loads(line)["text"] for line in source.read_bytes().splitlines()]
    started = time.perf_counter()
    for start in range(0, len(texts), 64):
        if tokenizer.kind == "sentencepiece":
            tokenizer.processor.encode(texts[start : start + 64], num_threads=1)
        else:
            tokenizer.backend.encode_batch_fast(texts[start : start + 64], add_special_tokens=False)
    return source.stat().st_size / (time.perf_counter() - started)


def building(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Ours beside the library, beside two workers, beside Megatron-LM."""
    small = first_lines(options.corpus, 8 * MEGABYTE, folder / "small.jsonl")
    large = first_lines(options.corpus, (8 + options.megabytes) * MEGABYTE, folder / "large.jsonl")

    def ours(workers: int) -> Callable[[Path, Path], float]:
        return lambda source, output: seconds_of(our_command(source, output, options.tokenizer, workers))

    one, two, library, other = [], [], [], []
    for _ in range(options.turns):
        one.append(rate(ours(1), folder, small, large))
        library.append(library_rate(options.tokenizer, large))
        two.append(rate(ours(2), folder, small, large))
        if options.megatron_lm:
            other.append(rate(lambda source, output: megatron_lm(options, source, output), folder, small, large))
    density = tokens_a_byte(folder / "out_large", large)
    speeds = f"{density * statistics.median(one):,.0f} tokens/s"
    rows = [
        row("ours / the tokenizer's own batch call", f"{speeds}, one core", ratios(one, library), 0.90),
        row("2 workers / 1 worker", f"{density * statistics.median(two):,.0f} tokens/s", ratios(two, one), 1.8),
    ]
    if other:
        same = all(
            (folder / f"out_large{suffix}").read_bytes() == (folder / f"mlm_text_document{suffix}").read_bytes()
            for suffix in (".bin", ".idx")
        )
        detail = f"{density * statistics.median(other):,.0f} tokens/s; files {'identical' if same else 'DIFFER'}"
        rows.append(row("ours / Megatron-LM's preprocess_data.py", detail, ratios(one, other), 1.5))
    return rows


def megatron_lm(options: argparse.Namespace, source: Path, output: Path) -> float:
    prefix = output.with_name("mlm")
    tokenizer = Path(options.tokenizer)
    model = tokenizer.parent if tokenizer.is_file() else tokenizer
    command = [sys.executable, "tools/preprocess_data.py", "--input", str(source), "--output-prefix", str(prefix)]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model)]
    paths = f"{options.megatron_lm}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {"PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}
    return seconds_of([*command, "--workers", "1", "--append-eod"], environment, options.megatron_lm)


def ratios(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def row(what: str, detail: str, value: float, least: float) -> Row:
    return what, detail, value, f">= {least}", value >= least


def memory(options: argparse.Namespace, folder: Path) -> Row:
    """Peak memory of a build of a small and of a large input, each in a process of its own."""
    peaks = []
    for size in (10 * MEGABYTE, options.large_megabytes * MEGABYTE):
        source = first_lines(options.corpus, size, folder / "memory.jsonl")
        measured = [
            sys.executable,
            __file__,
            "--peak-of",
            *our_command(source, folder / "memory", options.tokenizer, 1)[3:],
        ]
        done = subprocess.run(measured, capture_output=True, text=True, check=True)
        peaks.append(float(done.stdout.split()[-1]))
    value = peaks[1] / peaks[0]
    detail = f"{peaks[0]:.0f} MB for 10 MB, {peaks[1]:.0f} MB for {options.large_megabytes} MB"
    return "peak memory, large / small input", detail, value, "<= 1.1", value <= 1.1


def print_peak(arguments: list[str]) -> None:
    from card_megatron.cli import main as card

    card(arguments)
    print(own_peak_megabytes())


def random_tokens(folder: Path, count: int, vocab_size: int = 50_000, length: int = 1000) -> Path:
    """A .bin/.idx of random documents."""
    prefix, dtype = folder / "random", token_dtype(vocab_size)
    rng = np.random.default_rng(0)
    with Path(f"{prefix}.bin").open("wb") as file:
        for _ in range(0, count, 10_000_000):
            file.write(rng.integers(0, vocab_size - 10, min(count, 10_000_000)).astype(dtype).tobytes())
    write_index(Path(f"{prefix}.idx"), [np.full(count // length, length, np.int32)], dtype)
    return prefix


def loading(folder: Path) -> list[Row]:
    """Samples from one worker process, and the start of a data set of 10^8 tokens."""
    from card_megatron.config import load_config
    from card_megatron.data.datasets import ObjectiveDataset, build_clean_datasets
    from card_megatron.data.loader import MicroBatchSampler, micro_batches
    from card_megatron.data.tokenizers import MockTokenizer
    from card_megatron.objectives import build_objective

    prefix, tokenizer = random_tokens(folder, 100_000_000), MockTokenizer(50_000)
    rows = []
    for length, least in ((128, 2.0), (2048, 10.0), (8192, 10.0)):
        batch = max(1, 16384 // length)
        config, _ = load_config(
            [
                *(f"--data.train=[{prefix}]", f"--data.sequence_length={length}", "--model.vocab_size=50000"),
                *("--model.max_position_embeddings=8192", f"--run_dir={folder}", "--train.global_batch_size=64"),
                f"--train.train_tokens={50_000_000}",
            ]
        )
        clean = build_clean_datasets(config, tokenizer).train
        started = time.perf_counter()
        build_clean_datasets(config, tokenizer)
        start_up = time.perf_counter() - started
        objective = build_objective(config.objective, mask_id=tokenizer.mask, eod_id=tokenizer.eod)
        dataset = ObjectiveDataset(clean, objective, 1, "train")
        batches = 400 if length == 128 else 600
        iterator = micro_batches(dataset, MicroBatchSampler(0, batch * batches, batch, 0, 1), num_workers=1)
        for _ in range(batches // 4):
            next(iterator)
        started = time.perf_counter()
        count = sum(read["tokens"].numel() for read in iterator)
        speed = count / (time.perf_counter() - started)
        detail = f"{speed:,.0f} tokens/s from one worker"
        rows.append(row(f"loader / an H100's appetite, L={length}", detail, speed / H100_TOKENS, least))
    rows.append(
        ("start of 10^8 tokens with its cache", f"{start_up:.2f} s", start_up / 3.0, "<= 1 (3 s)", start_up <= 3.0)
    )
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--peak-of"]:
        return print_peak(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="a .jsonl with a `text` field")
    parser.add_argument("--tokenizer", help="any tokenizer of `card data build`")
    parser.add_argument("--megatron-lm", type=Path, help="a checkout of Megatron-LM to measure beside")
    parser.add_argument("--megabytes", type=int, default=24, help="text that is timed (default: 24)")
    parser.add_argument(
        "--large-megabytes", type=int, default=1000, help="large input of the memory row (default: 1000)"
    )
    parser.add_argument("--turns", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure misses its bar")
    options = parser.parse_args()
    if bool(options.corpus) != bool(options.tokenizer):
        parser.error("--corpus and --tokenizer go together")
    single_threaded()
    machine, console = capabilities(), Console()
    from card_megatron.platform import install

    install()
    with tempfile.TemporaryDirectory(prefix="preprocess_") as name:
        folder = Path(name)
        if not options.corpus:
            train, _ = python_docs.train_and_validation(python_docs.python_documents())
            options.corpus = write_documents(folder / "docs.jsonl", train)
            options.tokenizer = str(train_sentencepiece(train, folder / "tokenizer.model", 4096))
        console.print("loading ...")
        rows = loading(folder)
        console.print("building ...")
        rows = [*building(options, folder), *rows]
        console.print("memory ...")
        rows.append(memory(options, folder))
    table = Table(title=f"{options.corpus.name}, {load_kind(options.tokenizer)}, {machine.cpu_cores} cores")
    for column in ("what", "detail", "ratio", "bar"):
        table.add_column(column, justify="left" if column in ("what", "detail") else "right")
    for what, detail, value, bar, _ in rows:
        table.add_row(what, detail, f"{value:.2f}", bar)
    console.print(table)
    if options.check and not all(met for *_, met in rows):
        sys.exit(1)


def load_kind(tokenizer: str) -> str:
    return "SentencePiece" if tokenizer.endswith(".model") else "tokenizer.json"


if __name__ == "__main__":
    main()
