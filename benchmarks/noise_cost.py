"""What CARD's noise and weights cost on the CPU: microseconds a sample, by length, beside a training step.

    python benchmarks/noise_cost.py [--check]

The step is the `small` model's, on this machine, at sequence length 128; a longer sequence costs at least as much a
token, so the shares below are upper bounds. Data workers do this work ahead of the step: it is off its critical path.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from card_megatron.config import load_config
from card_megatron.config.schema import ObjectiveConfig
from card_megatron.objectives import build_objective
from card_megatron.objectives.keys import SampleKey
from card_megatron.platform import Ranks, capabilities, install

LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
MOST_OF_A_STEP = 0.01
LINEAR_WITHIN = 1.5
"""Eight times the length may cost at most eight times this factor more."""


def noise_microseconds(length: int) -> float:
    """Median time to corrupt and weight one sample."""
    objective = build_objective(ObjectiveConfig(), mask_id=4, eod_id=2)
    tokens = np.random.default_rng(0).integers(5, 2000, length)
    supervised = np.ones(length, bool)
    times = []
    for index in range(max(30, 400_000 // length)):
        started = time.perf_counter()
        objective.corrupt(tokens, tokens, supervised, SampleKey(1, "train", index))
        times.append(time.perf_counter() - started)
    return 1e6 * float(np.median(times))


def step_microseconds_a_token() -> float:
    """Best of three real training steps of the small model: the best is the strictest yardstick."""
    from card_megatron.training.preflight import preflight
    from card_megatron.training.state import build_state
    from card_megatron.training.step import train_step

    with tempfile.TemporaryDirectory() as folder:
        config, _ = load_config(
            [
                *("--preset=small", "--data.mock=true", "--data.sequence_length=128", "--data.num_workers=0"),
                *("--train.global_batch_size=16", "--train.micro_batch_size=16", "--train.train_iters=4"),
                *("--optimizer.lr_warmup_iters=1", f"--run_dir={folder}"),
            ]
        )
        state = build_state(preflight(config, Ranks()))
        times = []
        for _ in range(4):
            started = time.perf_counter()
            train_step(state)
            times.append(time.perf_counter() - started)
    return 1e6 * min(times[1:]) / (16 * 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure misses its bar")
    options = parser.parse_args()
    machine = capabilities()
    install()
    a_token = step_microseconds_a_token()
    costs = {length: noise_microseconds(length) for length in LENGTHS}
    shares = {length: cost / (length * a_token) for length, cost in costs.items()}
    growth = costs[32768] / costs[4096]
    table = Table(
        title=f"{machine.device}, {machine.cpu_cores} cores; a step of `small` costs {a_token:.0f} us a token"
    )
    for column in ("L", "us a sample", "ns a token", "share of a step"):
        table.add_column(column, justify="right")
    for length, cost in costs.items():
        table.add_row(str(length), f"{cost:.1f}", f"{1e3 * cost / length:.1f}", f"{shares[length]:.4%}")
    console = Console()
    console.print(table)
    console.print(f"largest share of a step {max(shares.values()):.4%} (bar: {MOST_OF_A_STEP:.0%})")
    console.print(f"cost of L=32768 over L=4096: {growth:.2f} (linear: 8; bar: {8 * LINEAR_WITHIN:.0f})")
    if options.check and (max(shares.values()) >= MOST_OF_A_STEP or growth > 8 * LINEAR_WITHIN):
        sys.exit(1)


if __name__ == "__main__":
    main()
