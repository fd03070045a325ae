"""What a checkpoint costs: how long training stands still, and how fast it gets to disk, beside a raw write.

    python benchmarks/checkpoint_cost.py [--check]

One process, one run: a model with real optimizer state is trained; its saves, sync and async, take turns with a raw
write (write + fsync) of as many bytes to the same disk. Medians over the turns. The stall of an
async save is all time that the loop spends on it: beginning, polling, finishing; the steps beside it are timed too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from card_megatron.config import load_config
from card_megatron.platform import Ranks, capabilities, install

BARS = {"stall": 0.15, "throughput": 0.60}


def build(folder: str, layers: int, steps: int) -> Any:
    """A state and its loop; the model is wide rather than deep, so that steps are short and state is large."""
    from card_megatron.training.loop import Loop
    from card_megatron.training.preflight import preflight
    from card_megatron.training.state import build_state
    from card_megatron.training.watchdog import Watchdog

    config, _ = load_config(
        [
            *("--data.mock=true", "--model.vocab_size=32000", f"--model.num_layers={layers}"),
            *("--model.hidden_size=512", "--model.ffn_hidden_size=1536", "--model.num_attention_heads=8"),
            *("--data.sequence_length=32", "--train.global_batch_size=2", "--train.micro_batch_size=2"),
            *(f"--train.train_iters={steps}", "--data.num_workers=0", "--guard.hang_minutes=0", f"--run_dir={folder}"),
            "--checkpoint.keep_last=1",
        ]
    )
    state = build_state(preflight(config, Ranks()))
    loop = Loop(state, lambda name, **facts: None, Watchdog(folder, 0, 1, 0))
    return state, loop


def timed(work, *args) -> float:
    started = time.perf_counter()
    work(*args)
    return time.perf_counter() - started


def raw_write(folder: Path, chunk: bytes, size: int) -> None:
    """As many bytes, as fast as one process can write and sync them to a new file."""
    with (folder / "raw").open("wb", buffering=0) as file:
        while size > 0:
            size -= file.write(memoryview(chunk)[:size])
        os.fsync(file.fileno())


def save(loop, state, *, wait: bool) -> None:
    loop.saver.save(loop.contents(), loop.manifest(), wait=wait)


def measure(folder: Path, layers: int, turns: int) -> tuple[dict[str, list[float]], int]:
    from card_megatron.checkpoint import folder as checkpoints
    from card_megatron.checkpoint.manifest import read_manifest
    from card_megatron.training.step import train_step

    state, loop = build(str(folder), layers, steps=100_000)
    times: dict[str, list[float]] = {
        name: [] for name in ("raw", "sync", "stall", "begin", "async", "step", "busy step")
    }
    train_step(state)
    save(loop, state, wait=True)
    size = read_manifest(checkpoints.visible(folder)[0]).total_bytes
    chunk = np.random.default_rng(0).bytes(1 << 24)
    for turn in range(turns + 1):  # the first warms up: fresh memory and disk blocks are slow on some machines
        round_times = {"raw": timed(raw_write, folder, chunk, size)}
        (folder / "raw").unlink()
        round_times["step"] = timed(train_step, state)
        round_times["sync"] = timed(lambda: save(loop, state, wait=True))
        train_step(state)
        started = time.perf_counter()
        round_times["begin"] = timed(lambda: save(loop, state, wait=False))
        stall, busy = round_times["begin"], []
        while loop.saver.pending:
            busy.append(timed(train_step, state))
            stall += timed(loop.saver.poll)
        round_times |= {"stall": stall, "async": time.perf_counter() - started, "busy step": statistics.median(busy)}
        if turn:
            for name, seconds in round_times.items():
                times[name].append(seconds)
    return times, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure misses its bar")
    parser.add_argument("--layers", type=int, default=12, help="size of the model (default: 12 layers, 57M parameters)")
    parser.add_argument("--turns", type=int, default=5, help="timed rounds (default: 5)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    machine = capabilities()
    install()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_cost_", dir=options.folder))
    try:
        times, size = measure(folder, options.layers, options.turns)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    medians = {name: statistics.median(values) for name, values in times.items()}
    stall = statistics.median(a / b for a, b in zip(times["stall"], times["sync"], strict=True))
    throughput = statistics.median(a / b for a, b in zip(times["raw"], times["sync"], strict=True))
    table = Table(
        title=f"A checkpoint of {size / 1e6:,.0f} MB, fp32, one rank, {machine.device}, {machine.cpu_cores} cores"
    )
    for column in ("what", "median", "rate"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for what, name in (
        ("raw write + fsync of the same bytes", "raw"),
        ("sync save: training stands still", "sync"),
        ("async save: training stands still", "stall"),
        ("  of that, to begin", "begin"),
        ("async save: until it is visible", "async"),
    ):
        table.add_row(what, f"{medians[name]:.3f} s", f"{size / 1e6 / medians[name]:,.0f} MB/s")
    table.add_row("a step", f"{medians['step']:.3f} s", "")
    table.add_row("a step while an async save is written", f"{medians['busy step']:.3f} s", "")
    console = Console()
    console.print(table)
    console.print(f"async stall / sync save: {stall:.3f} (bar: at most {BARS['stall']})")
    console.print(f"sync save throughput / raw write: {throughput:.3f} (bar: at least {BARS['throughput']})")
    if options.check and (stall > BARS["stall"] or throughput < BARS["throughput"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
