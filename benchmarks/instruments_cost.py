"""A step whose sections are timed, as every run's are, beside the same step without timers.

    python benchmarks/instruments_cost.py [--check]

One rank, fp32, the `small` model; the two take turns, step by step, in one process, and the ratio is the median over
turns. Beside it stands the time that the timers of a step take by themselves.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time

from rich.console import Console
from rich.table import Table
from step_cost import build, ratio, time_in_turns

from card_megatron.platform import capabilities, install

LENGTH = 128
BAR = 1.01


def measure(turns: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of steps with and without timers, and the microseconds that the timers of one step take by themselves."""
    from card_megatron.training.sections import Sections
    from card_megatron.training.step import train_step

    with tempfile.TemporaryDirectory() as folder:
        state = build(LENGTH, folder, steps=2 * turns + 4)
        timed, config = state.sections, state.transformer_config
        untimed = Sections()
        untimed.sections = dict.fromkeys(untimed.sections, untimed.ignored)

        def step(sections: Sections, timers: Sections | None) -> None:
            state.sections, config.timers = sections, timers
            train_step(state)
            sections.read()

        times = time_in_turns({"timed": lambda: step(timed, timed), "untimed": lambda: step(untimed, None)}, turns)
        step(timed, timed)
        stretches = sum(len(section.marks) for section in timed.sections.values())
        started = time.perf_counter()
        for _ in range(100):
            timed.reset()
            for _ in range(stretches):
                with timed("forward"):
                    pass
            timed.read()
        return times, 1e6 * (time.perf_counter() - started) / 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--check", action="store_true", help=f"exit with 1 if the ratio is above {BAR}")
    options = parser.parse_args()
    capabilities()
    install()
    times, microseconds = measure(options.turns)
    found = ratio(times, "timed", "untimed")
    table = Table("what", "measured", "bar")
    table.add_row("a step with timers / without", f"{found:.4f}", f"{BAR}")
    table.add_row("the timers of one step alone", f"{microseconds:.0f} µs", "")
    Console(width=100).print(table)
    if options.check and found > BAR:
        sys.exit(f"a step with timers takes {found:.4f} times one without; the bar is {BAR}")


if __name__ == "__main__":
    main()
