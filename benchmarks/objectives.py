"""Step time and peak memory of the four objectives, beside what their FLOPs predict and what the paper reports.

    python benchmarks/objectives.py [--check]

One model, the same text and as many tokens a step for all, on one rank in fp32; the objectives take turns, step by
step, in one process, and a ratio is the median over turns. Peak memory comes from a process for each objective and
length.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

from own_memory import own_peak_megabytes
from rich.console import Console
from rich.table import Table
from step_cost import ratio, time_in_turns

from card_megatron.config import RunConfig, load_config
from card_megatron.config.derived import flops_per_token
from card_megatron.platform import Ranks, capabilities, install

PAPER = {"arm": 1.0, "card": 1.0, "mdlm": 1.5, "bd3lm": 3.0}
CARD_BAR, PREDICTED_BAR = 1.02, 1.15
LENGTHS = (128, 512, 2048)
MICRO_BATCH_TOKENS = 2048


def configured(objective: str, length: int, folder: str, steps: int, tokens: int) -> RunConfig:
    """The small preset on mock data; bd3lm with its default blocks."""
    config, _ = load_config(
        [
            *("--preset=small", "--data.mock=true", f"--data.sequence_length={length}", "--data.num_workers=1"),
            *(
                f"--train.global_batch_size={tokens // length}",
                f"--train.micro_batch_size={MICRO_BATCH_TOKENS // length}",
            ),
            *(f"--train.train_iters={steps}", "--optimizer.lr_warmup_iters=1", f"--objective.name={objective}"),
            f"--run_dir={folder}",
        ]
    )
    return config


def measure(length: int, turns: int, tokens: int) -> dict[str, list[float]]:
    """Seconds of each objective's steps at one sequence length."""
    from megatron.core import parallel_state

    from card_megatron.training.preflight import preflight
    from card_megatron.training.state import assemble_state, build_state
    from card_megatron.training.step import train_step

    with tempfile.TemporaryDirectory() as folder:
        steps: dict[str, Callable[[], Any]] = {}
        for objective in PAPER:
            plan = preflight(configured(objective, length, folder, turns + 2, tokens), Ranks())
            steps[objective] = partial(train_step, assemble_state(plan) if steps else build_state(plan))
        times = time_in_turns(steps, turns)
        parallel_state.destroy_model_parallel()
    return times


def peak_megabytes(objective: str, length: int, tokens: int) -> float:
    command = [sys.executable, __file__, "--memory-of", objective, "--length", str(length), "--tokens", str(tokens)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # what it complains of is seen
    return float(done.stdout.split()[-1])


def print_own_peak(objective: str, length: int, tokens: int) -> None:
    """Peak resident memory of this process after two steps."""
    from card_megatron.training.preflight import preflight
    from card_megatron.training.state import build_state
    from card_megatron.training.step import train_step

    with tempfile.TemporaryDirectory() as folder:
        state = build_state(preflight(configured(objective, length, folder, 2, tokens), Ranks()))
        for _ in range(2):
            train_step(state)
    print(own_peak_megabytes())


def predicted(objective: str, length: int) -> float:
    """FLOPs of a token relative to arm's."""
    config = configured(objective, length, "unused", 1, MICRO_BATCH_TOKENS)
    return flops_per_token(config.model, length, config.objective) / flops_per_token(config.model, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure misses its bar")
    parser.add_argument("--turns", type=int, default=5, help="timed steps of each objective (default: 5)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a step (default: 4096)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="sequence lengths (default: all three)")
    parser.add_argument("--memory-of", choices=list(PAPER), help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for length in options.lengths:
        if length < 1 or MICRO_BATCH_TOKENS % length:
            parser.error(
                f"--lengths {length} does not divide the {MICRO_BATCH_TOKENS} tokens of a micro-batch; try 512"
            )
    if options.tokens < 1 or options.tokens % MICRO_BATCH_TOKENS:
        parser.error(f"--tokens {options.tokens} is not a multiple of {MICRO_BATCH_TOKENS}, a micro-batch; try 4096")
    machine = capabilities()
    install()
    if options.memory_of:
        return print_own_peak(options.memory_of, options.length, options.tokens)

    console = Console(width=110)
    title = f"small, fp32, {options.tokens} tokens a step, {machine.device}, {machine.cpu_cores} cores; relative to arm"
    table = Table(title=title)
    for column in ("L", "objective", "step", "time", "by FLOPs", "time / FLOPs", "bar", "paper", "memory", "peak"):
        table.add_column(column, justify="left" if column == "objective" else "right")
    missed = False
    for length in options.lengths:
        console.print(f"timing sequence length {length} ...")
        times = measure(length, options.turns, options.tokens)
        console.print("measuring memory ...")
        peaks = {name: peak_megabytes(name, length, options.tokens) for name in PAPER}
        for name, paper in PAPER.items():
            time, flops = ratio(times, name, "arm"), predicted(name, length)
            # card costs arm's FLOPs, so both bars are on time by FLOPs
            bar = {"arm": None, "card": CARD_BAR}.get(name, PREDICTED_BAR)
            missed |= bar is not None and time / flops > bar
            table.add_row(
                *(str(length), name, f"{statistics.median(times[name]):.2f} s", f"{time:.3f}", f"{flops:.3f}"),
                *(f"{time / flops:.3f}", "" if bar is None else f"{bar:.2f}", f"{paper:.1f}"),
                *(f"{peaks[name] / peaks['arm']:.2f}", f"{peaks[name]:.0f} MB"),
                end_section=name == "bd3lm",
            )
    console.print(table)
    if options.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
