"""A CARD step beside an ARM step, and the Megatron path beside the same model in plain PyTorch.

    python benchmarks/step_cost.py [--check]

All on one rank, in fp32, with the distributed optimizer that every run of ours has. The contestants take turns, step by
step, in one process; a ratio is the median over turns. Peak memory comes from a process for each objective.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from own_memory import own_peak_megabytes
from rich.console import Console
from rich.table import Table

from card_megatron.config import load_config
from card_megatron.platform import Ranks, capabilities, install

BARS = {"card/arm": 1.02, "megatron/plain": 1.10, "memory card/arm": 1.01}
TOKENS_A_STEP = 8192


def small_config(length: int, folder: str, steps: int, objective: str = "card"):
    """The small preset on mock data, with at least TOKENS_A_STEP tokens a step in micro-batches of 1,024 tokens."""
    config, _ = load_config(
        [
            *("--preset=small", "--data.mock=true", f"--data.sequence_length={length}", "--data.num_workers=1"),
            *(f"--train.global_batch_size={TOKENS_A_STEP // length}", f"--train.micro_batch_size={1024 // length}"),
            *(f"--train.train_iters={steps}", "--optimizer.lr_warmup_iters=1", f"--objective.name={objective}"),
            f"--run_dir={folder}",
        ]
    )
    return config


def build(length: int, folder: str, steps: int, objective: str = "card"):
    from card_megatron.training.preflight import preflight
    from card_megatron.training.state import build_state

    return build_state(preflight(small_config(length, folder, steps, objective), Ranks()))


def time_in_turns(contestants: dict[str, Callable[[], Any]], turns: int) -> dict[str, list[float]]:
    """Seconds of each contestant's steps; who goes first changes from turn to turn, and the first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(turns + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            started = time.perf_counter()
            contestants[name]()
            if turn:
                times[name].append(time.perf_counter() - started)
    return times


def measure(length: int, turns: int) -> dict[str, list[float]]:
    """CARD and ARM on one Megatron model, and its plain twin, at one sequence length."""
    import torch
    from megatron.core import parallel_state
    from plain_twin import PlainGPT, PlainTrainer

    from card_megatron.config.derived import padded_vocab_size
    from card_megatron.model import unwrap
    from card_megatron.objectives import Arm
    from card_megatron.training.state import training_data
    from card_megatron.training.step import train_step

    with tempfile.TemporaryDirectory() as folder:
        state = build(length, folder, steps=2 * turns + 4)
        model_config = state.config.model
        card_data = training_data(state)
        state.objective = Arm(state.config.objective, mask_id=state.objective.mask_id, eod_id=state.objective.eod_id)
        arm_data = training_data(state)

        def megatron_step(data) -> None:
            """The objective only makes the data: the rest of the step is the same for both."""
            state.data = data
            train_step(state)

        twin = PlainGPT(model_config, padded_vocab_size(model_config), length)
        twin.copy_from_megatron(unwrap(state.model)[0])
        samples = [state.datasets.train[index] for index in range(TOKENS_A_STEP // length)]
        tokens, labels = (torch.stack([sample[name] for sample in samples]) for name in ("tokens", "labels"))
        rows = state.config.train.micro_batch_size
        batches = [
            (tokens[first : first + rows], labels[first : first + rows], torch.ones(rows, length))
            for first in range(0, len(tokens), rows)
        ]
        with torch.no_grad():
            theirs = unwrap(state.model)[0](batches[0][0], None, None, labels=batches[0][1])
            torch.testing.assert_close(twin(*batches[0][:2]), theirs, rtol=1e-4, atol=1e-4)
        trainer = PlainTrainer(twin, state.config.optimizer.lr, state.config.optimizer.weight_decay)
        times = time_in_turns(
            {
                "card": lambda: megatron_step(card_data),
                "arm": lambda: megatron_step(arm_data),
                "plain": lambda: trainer.step(batches),
            },
            turns,
        )
        parallel_state.destroy_model_parallel()
    return times


def ratio(times: dict[str, list[float]], one: str, other: str) -> float:
    """Median over turns of one contestant's time by the other's."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def peak_megabytes(objective: str) -> float:
    """Peak resident memory of a process that takes three steps of 1,024-token sequences."""
    command = [sys.executable, __file__, "--memory-of", objective]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_own_peak(objective: str) -> None:
    from card_megatron.training.step import train_step

    with tempfile.TemporaryDirectory() as folder:
        state = build(1024, folder, steps=3, objective=objective)
        for _ in range(3):
            train_step(state)
    print(own_peak_megabytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure misses its bar")
    parser.add_argument("--turns", type=int, default=5, help="timed steps of each contestant (default: 5)")
    parser.add_argument("--memory-of", choices=["card", "arm"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    machine = capabilities()
    install()
    if options.memory_of:
        return print_own_peak(options.memory_of)

    console = Console()
    rows: list[tuple[str, str, float, float]] = []
    for length in (128, 1024):
        console.print(f"timing sequence length {length} ...")
        times = measure(length, options.turns)
        medians = {name: statistics.median(values) for name, values in times.items()}
        detail = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in medians.items())
        rows.append((f"CARD step / ARM step, L={length}", detail, ratio(times, "card", "arm"), BARS["card/arm"]))
        rows.append(
            (f"Megatron / plain PyTorch, L={length}", detail, ratio(times, "arm", "plain"), BARS["megatron/plain"])
        )
    console.print("measuring memory ...")
    peaks = [{name: peak_megabytes(name) for name in ("card", "arm")} for _ in range(options.turns)]
    memory = {name: statistics.median(peak[name] for peak in peaks) for name in ("card", "arm")}
    detail = ", ".join(f"{name} {megabytes:.0f} MB" for name, megabytes in memory.items())
    rows.append(("peak memory CARD / ARM, L=1024", detail, memory["card"] / memory["arm"], BARS["memory card/arm"]))

    table = Table(title=f"small, fp32, {TOKENS_A_STEP} tokens a step, {machine.device}, {machine.cpu_cores} cores")
    for column in ("what", "medians", "ratio", "bar"):
        table.add_column(column, justify="left" if column in ("what", "medians") else "right")
    for what, detail, value, bar in rows:
        table.add_row(what, detail, f"{value:.3f}", f"{bar:.2f}")
    console.print(table)
    if options.check and any(value > bar for _, _, value, bar in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
