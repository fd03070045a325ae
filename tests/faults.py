"""Runs that are killed at random moments and started again must end as if nothing had happened.

    python -m tests.faults --kills 20 --seed 0 --folder DIR

Each run is a real `card train` process, or torchrun with several. SIGKILL comes from outside, at seeded random moments:
every other one is aimed at a save. After each kill every visible checkpoint is verified and the same command is
started again; a run that reaches its end is compared, bit for bit, with one that was left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from card_megatron.checkpoint import folder
from card_megatron.checkpoint.manifest import problems_of, read_manifest
from card_megatron.config.errors import CheckpointError
from tests.runs import records, tensors

STEPS = 40
TIME_LIMIT = 180.0
"""Seconds that a run may take, kills aside; and that anything here waits for anything."""
MODES = {"sync": "--checkpoint.async_save=false", "async": "--checkpoint.async_save=true"}
OPTIONS = [
    # 2.8 million parameters: with moments, main weights and average a save writes 55 MB
    *("--model.num_layers=4", "--model.hidden_size=256", "--model.ffn_hidden_size=512", "--data.sequence_length=32"),
    *("--model.num_attention_heads=4", "--model.num_query_groups=4", "--model.max_position_embeddings=32"),
    *("--data.mock=true", "--model.vocab_size=500", "--data.num_workers=1"),
    *(f"--train.train_iters={STEPS}", "--train.global_batch_size=8", "--train.micro_batch_size=2"),
    *("--model.hidden_dropout=0.1", "--ema.decay=0.9", "--optimizer.lr_warmup_iters=10"),
    # saves fall into the middle of a record's window
    *("--checkpoint.interval=4", "--logging.interval=3", "--logging.tensorboard=false"),
]


@dataclass
class Outcome:
    """What became of one combination."""

    mode: str
    ranks: int
    kills: int = 0
    inside_a_save: int = 0
    """Kills after which the log has a save that began and never ended."""
    restarts: int = 0
    verified: int = 0
    """Checkpoints whose every byte was compared with its manifest, over all kills and ends."""
    ends: int = 0
    """Runs that reached their last step."""
    problems: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        return self.ends > 0 and not self.problems


def kill_all(process: subprocess.Popen) -> None:
    """SIGKILL to a process and all below it: torchrun gives each rank a session, so its own group is not enough."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGSTOP)  # so that a launcher starts no rank that is not seen here
    groups = {process.pid}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(ProcessLookupError):
                groups.add(os.getpgid(child.pid))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    process.wait(TIME_LIMIT)


class Run:
    """A `card train` process and all that it starts."""

    def __init__(self, run_dir: Path, ranks: int, mode: str):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        self.option = f"--run_dir={run_dir}"
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        with (run_dir / "output.txt").open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, "-m", "card_megatron", "train", *OPTIONS, MODES[mode], self.option],
                **dict(stdout=output, stderr=subprocess.STDOUT, start_new_session=True),
                **dict(cwd=Path(__file__).parents[1], env={**os.environ, "OMP_NUM_THREADS": "1"}),
            )

    def left_behind(self) -> list[int]:
        """Processes of the run that are still there, a moment after its end."""
        found: list[int] = []
        for _ in range(100):
            found = [process.pid for process in psutil.process_iter(["cmdline"]) if self._is_ours(process)]
            if not found:
                break
            time.sleep(0.1)
        return found

    def _is_ours(self, process: psutil.Process) -> bool:
        return self.option in (process.info["cmdline"] or [])

    def output(self) -> str:
        return (self.run_dir / "output.txt").read_text()[-2000:]


@contextlib.contextmanager
def started(run_dir: Path, ranks: int, mode: str) -> Iterator[Run]:
    """A run that is gone when the context ends, however it ends."""
    run = Run(run_dir, ranks, mode)
    try:
        yield run
    finally:
        kill_all(run.process)


# ---------------------------------------------------------------- what the log says


def log(run_dir: Path) -> list[dict]:
    path = run_dir / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def saves_begun(run_dir: Path) -> int:
    path = run_dir / "events.jsonl"
    return path.read_text().count('"save_started"') if path.exists() else 0


def unfinished_saves(run_dir: Path) -> set[int]:
    """Steps whose save the newest process of a run has begun and not ended."""
    begun: set[int] = set()
    for line in log(run_dir):
        if line["event"] == "started":
            begun = set()
        elif line["event"] == "save_started":
            begun.add(line["step"])
        elif line["event"] in ("save_finished", "save_failed"):
            begun.discard(line["step"])
    return begun


# ---------------------------------------------------------------- kills


@dataclass
class Moment:
    """When a kill comes."""

    saves: int
    """Wait until this many saves have begun; 0 counts from the start of the process."""
    seconds: float
    """And then for this long."""

    def wait(self, run: Run) -> None:
        """Return when the moment has come, or the run has ended before."""
        wanted = saves_begun(run.run_dir) + self.saves
        deadline = time.monotonic() + TIME_LIMIT
        while self.saves and saves_begun(run.run_dir) < wanted:
            if run.process.poll() is not None:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{run.run_dir} began no save in {TIME_LIMIT} s\n{run.output()}")
            time.sleep(0.004)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(self.seconds)


def moments(rng: random.Random, kills: int, run_seconds: float, save_seconds: float) -> Iterator[Moment]:
    """Every other kill is aimed at a save, the others fall anywhere between start and end."""
    for number in range(kills):
        if number % 2 == 0:
            yield Moment(rng.randint(1, 2), rng.uniform(0.0, save_seconds))
        else:
            yield Moment(0, rng.uniform(0.0, run_seconds))


# ---------------------------------------------------------------- checks


def verify(run_dir: Path, outcome: Outcome) -> None:
    """Every visible checkpoint is whole, and the pointer names one of them."""
    visible = folder.visible(run_dir)
    for checkpoint in visible:
        try:
            outcome.problems += problems_of(checkpoint, read_manifest(checkpoint))
        except CheckpointError as error:
            outcome.problems.append(str(error))
        outcome.verified += 1
    pointer = folder.checkpoints_of(run_dir) / folder.LATEST
    if pointer.exists() and pointer.read_text().strip() not in [checkpoint.name for checkpoint in visible]:
        outcome.problems.append(f"{pointer} names {pointer.read_text().strip()!r}, which is not there")


def compare(run_dir: Path, oracle: Path, outcome: Outcome) -> None:
    """The end of a run is the end of the one that was left alone: tensors by their bits, records by their values."""
    import torch

    ours, theirs = (tensors(folder.final_path(run, STEPS)) for run in (run_dir, oracle))
    different = [name for name in theirs if name not in ours or not torch.equal(ours[name], theirs[name])]
    if different or ours.keys() != theirs.keys():
        outcome.problems.append(f"{run_dir}: {len(different)} of {len(theirs)} tensors differ, e.g. {different[:3]}")
    if records(run_dir) != records(oracle):
        outcome.problems.append(f"{run_dir}: metrics.jsonl differs")


# ---------------------------------------------------------------- runs


def left_alone(run_dir: Path, ranks: int, mode: str) -> tuple[float, float]:
    """Run to the end; returns the seconds of the run and of one of its saves."""
    began = time.monotonic()
    with started(run_dir, ranks, mode) as run:
        if run.process.wait(TIME_LIMIT) != 0:
            raise RuntimeError(f"the run without kills failed\n{run.output()}")
    saves = [line["seconds"] for line in log(run_dir) if line["event"] == "save_finished"]
    return time.monotonic() - began, statistics.median(saves)


def kill_and_restart(base: Path, ranks: int, mode: str, kills: int, seed: int) -> Outcome:
    """Kill a run until `kills` are spent, in a new folder whenever one reaches its end; then let the last one end."""
    outcome = Outcome(mode, ranks)
    oracle = base / "left alone"
    plan = moments(random.Random(f"{seed}/{mode}/{ranks}"), kills, *left_alone(oracle, ranks, mode))
    moment = next(plan, None)
    while moment is not None and not outcome.problems:
        run_dir = base / f"killed {outcome.ends}"
        moment = until_the_end(run_dir, plan, moment, outcome)
        outcome.ends += 1
        if not outcome.problems:
            compare(run_dir, oracle, outcome)
            verify(run_dir, outcome)
    if outcome.identical:  # what went wrong is kept
        shutil.rmtree(base)
    return outcome


def until_the_end(run_dir: Path, plan: Iterator[Moment], moment: Moment | None, outcome: Outcome) -> Moment | None:
    """Kill and restart one run until it ends; returns the moment that it did not live to see."""
    while True:
        with started(run_dir, outcome.ranks, outcome.mode) as run:
            if moment is None:
                run.process.wait(TIME_LIMIT)
            else:
                moment.wait(run)
        killed = moment is not None and run.process.returncode == -signal.SIGKILL
        if not killed and run.process.returncode != 0:
            outcome.problems.append(f"exit code {run.process.returncode}\n{run.output()}")
        if left := run.left_behind():
            outcome.problems.append(f"{run_dir} left processes behind: {left}")
        if not killed or outcome.problems:
            # too late for this run: sooner in the next one
            return None if moment is None else replace(moment, seconds=moment.seconds / 2)
        inside = unfinished_saves(run_dir)
        outcome.kills += 1
        outcome.restarts += 1
        outcome.inside_a_save += bool(inside)
        verify(run_dir, outcome)
        place = f"inside the save of step {min(inside)}" if inside else "outside a save"
        whole = len(folder.visible(run_dir))
        print(f"{outcome.mode}, ranks {outcome.ranks}: kill {outcome.kills} {place}; {whole} whole", flush=True)
        moment = next(plan, None)


def table(outcomes: list[Outcome]) -> str:
    lines = [
        "| save | ranks | kills | inside a save | restarts | checkpoints verified | runs ended | identical |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        counts = (one.mode, one.ranks, one.kills, one.inside_a_save, one.restarts, one.verified, one.ends)
        lines.append(f"| {' | '.join(map(str, counts))} | {'yes' if one.identical else 'NO'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="in all, shared out among the combinations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--modes", default="sync,async")
    parser.add_argument("--folder", type=Path, required=True, help="a new folder for all runs")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # by way of the contexts that end the runs
    warnings.filterwarnings("ignore", module="torch")  # of its own deprecations
    combinations = [(int(ranks), mode) for mode in options.modes.split(",") for ranks in options.ranks.split(",")]
    outcomes = []
    for number, (ranks, mode) in enumerate(combinations):
        kills = (options.kills + number) // len(combinations)  # together exactly as many as asked for
        base = options.folder.absolute() / f"{mode} {ranks}"
        outcomes.append(kill_and_restart(base, ranks, mode, kills, options.seed))
    for one in outcomes:
        for problem in one.problems:
            print(f"{one.mode}, {one.ranks} ranks: {problem}", file=sys.stderr)
    print(f"\n{table(outcomes)}")
    inside = sum(one.inside_a_save for one in outcomes)
    if not all(one.identical for one in outcomes):
        sys.exit(1)
    if options.kills >= 20 and inside < 5:
        sys.exit(f"only {inside} of {options.kills} kills were inside a save; 5 are needed")


if __name__ == "__main__":
    main()
