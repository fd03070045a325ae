"""How fast checkpoints become Hugging Face folders and back, beside copying the same bytes; and the memory it takes.

    python benchmarks/convert.py [--check]

A checkpoint of the paper's 1B shape with random weights is made for the purpose (4 GB in fp32; --layers makes it
smaller). Rounds take turns on one disk: copy the bytes (the kernel's own copy, then fsync), convert to Hugging Face,
convert back, each in a process of its own, whose peak memory the kernel knows. Medians of ratios over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from own_memory import own_peak_megabytes
from rich.console import Console
from rich.table import Table

from card_megatron.config import load_config
from card_megatron.config.schema import DataConfig
from card_megatron.platform import capabilities

BARS = {"speed": 0.5, "memory over the largest shard, MB": 1000}
SHARD = 1_000_000_000


def make_checkpoint(folder: Path, layers: int) -> None:
    """Weights that no two tensors share, without training: only their bytes matter."""
    from card_megatron.convert.dcp_folder import write_checkpoint
    from card_megatron.convert.from_hf import describe_checkpoint
    from card_megatron.convert.mapping import weights_of

    config, _ = load_config(["--preset=1b", f"--model.num_layers={layers}"])
    generator = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True)

    def make(weight) -> torch.Tensor:
        return torch.randn(weight.megatron_shape, generator=generator) * 0.02

    write_checkpoint(folder, weights_of(config.model), layers, lambda weight: torch.float32, make)
    describe_checkpoint(folder, replace(config, data=DataConfig(mock=True)), None)


def copy(source: Path, target: Path) -> float:
    """Seconds to copy all files of a folder and have them on disk."""
    started = time.perf_counter()
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        descriptor = os.open(target / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - started


def convert_here(direction: str, source: Path, target: Path) -> None:
    """In this process: convert, and print seconds and memory."""
    from card_megatron.checkpoint.source import open_source
    from card_megatron.convert.from_hf import from_hf
    from card_megatron.convert.to_hf import to_hf
    from card_megatron.platform import install

    install()
    before = own_peak_megabytes()
    started = time.perf_counter()
    if direction == "to-hf":
        to_hf(open_source(source), target, None, shard_bytes=SHARD, verify=False)
    else:
        from_hf(source, target, verify=False)
    print(json.dumps({"seconds": time.perf_counter() - started, "peak": own_peak_megabytes(), "before": before}))


def convert(direction: str, source: Path, target: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--convert", direction, str(source), str(target)]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
    return json.loads(result.stdout.splitlines()[-1])


def measure(folder: Path, layers: int, rounds: int) -> tuple[int, int, list[dict[str, float]]]:
    checkpoint, exported, back = folder / "checkpoint", folder / "hf", folder / "back"
    make_checkpoint(checkpoint, layers)
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    results, largest = [], 0
    for number in range(rounds + 1):  # the first warms up: fresh disk blocks are slow on some machines
        row = {"copy": copy(checkpoint, folder / "copy")}
        for direction, source, target in (("to-hf", checkpoint, exported), ("from-hf", exported, back)):
            figures = convert(direction, source, target)
            row |= {direction: figures["seconds"], f"{direction} peak": figures["peak"], "before": figures["before"]}
        largest = max(path.stat().st_size for path in exported.iterdir())
        if number:
            results.append(row)
        for path in (folder / "copy", exported, back):
            shutil.rmtree(path)
    return size, largest, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure misses its bar")
    parser.add_argument("--layers", type=int, default=33, help="layers of the 1B shape (default: 33, all of them)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default: 3)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--convert", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.convert:
        direction, source, target = options.convert
        return convert_here(direction, Path(source), Path(target))
    machine = capabilities()
    folder = Path(tempfile.mkdtemp(prefix="convert_", dir=options.folder))
    try:
        size, largest, rows = measure(folder, options.layers, options.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table = Table(
        title=f"{size / 1e9:.2f} GB of fp32 weights, files of 1 GB, {machine.device}, {machine.cpu_cores} cores"
    )
    for column in ("what", "seconds", "MB/s", "speed / copy", "peak memory"):
        table.add_column(column, justify="left" if column == "what" else "right")
    speeds, most = {}, 0.0
    for name, what in (("copy", "copy the bytes"), ("to-hf", "to Hugging Face"), ("from-hf", "from Hugging Face")):
        seconds = statistics.median(row[name] for row in rows)
        speed = statistics.median(row["copy"] / row[name] for row in rows)
        peak = max(row.get(f"{name} peak", 0.0) for row in rows)
        table.add_row(
            what,
            f"{seconds:.2f}",
            f"{size / 1e6 / seconds:,.0f}",
            f"{speed:.2f}",
            f"{peak:,.0f} MB" if peak else "",
        )
        speeds[name], most = speed, max(most, peak)
    over = most - largest / 2**20
    console = Console()
    console.print(table)
    console.print(
        f"the process before it converts: {rows[0]['before']:,.0f} MB; largest file {largest / 2**20:,.0f} MB"
    )
    console.print(f"to Hugging Face / copy: {speeds['to-hf']:.2f} (bar: at least {BARS['speed']})")
    console.print(
        f"peak memory - largest file: {over:,.0f} MB (bar: at most {BARS['memory over the largest shard, MB']})"
    )
    if options.check and (speeds["to-hf"] < BARS["speed"] or over > BARS["memory over the largest shard, MB"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
