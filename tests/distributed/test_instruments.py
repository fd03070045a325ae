"""Instruments of real runs: who is slow is named, nobody else is; traces, timers, garbage; and the same losses."""

from __future__ import annotations

import gc
import gzip
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from card_megatron.config import RunConfig
from card_megatron.testing import run_distributed
from tests.curves import tiny_config
from tests.distributed.test_layouts import ONE_ROW, PP, TP
from tests.runs import events, records, train

pytestmark = pytest.mark.timeout(300)

SHORT = [ONE_ROW, "--train.train_iters=12", "--logging.interval=3"]
SIX = [*SHORT, "--train.train_iters=6", "--train.micro_batch_size=4"]
# far above what the busy, shared cores of a test machine do to a healthy rank, far below what is planted
FACTOR = 4.0
SLEEP = 0.4


def train_slowed(config: RunConfig, slow: int | None, where: str) -> list[dict[str, Any]]:
    """A whole run in which one rank sleeps while it reads its data, or in its forward passes."""
    import torch

    from card_megatron.training import state as state_module
    from card_megatron.training import step as step_module

    make, forward = state_module.micro_batches, step_module.loss_function
    is_slow = torch.distributed.get_rank() == slow

    def slow_batches(*args):
        for batch in make(*args):
            time.sleep(SLEEP)
            yield batch

    def slow_loss(*args):
        time.sleep(SLEEP)
        return forward(*args)

    if is_slow and where == "data":
        state_module.micro_batches = slow_batches
    if is_slow and where == "forward":
        step_module.loss_function = slow_loss
    try:
        train(config)
    finally:
        state_module.micro_batches, step_module.loss_function = make, forward
    return records(config.run_dir)


def train_each(turns: list[tuple[RunConfig, int | None, str]]) -> list[list[dict[str, Any]]]:
    return [train_slowed(*turn) for turn in turns]


def raw_records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_slow_rank_of_two_is_named_with_its_host_and_losses_stay(corpus, tmp_path):
    factor = f"--logging.straggler_factor={FACTOR}"
    turns = [
        (tiny_config(corpus, tmp_path / "healthy", *SIX, factor), None, ""),
        (tiny_config(corpus, tmp_path / "data", *SIX, factor), 1, "data"),
        (tiny_config(corpus, tmp_path / "forward", *SIX, factor), 0, "forward"),
        (tiny_config(corpus, tmp_path / "off", *SIX, "--logging.straggler_factor=0"), None, ""),
    ]
    healthy, data, forward, off = run_distributed(train_each, 2, turns, timeout=240)[0]
    assert healthy == data == forward == off, "looking at a run must not change it"
    assert not events(tmp_path / "healthy", "straggler")
    host = socket.gethostname()
    for name, rank, reads in (("data", 1, True), ("forward", 0, False)):
        (event,) = events(tmp_path / name, "straggler")
        assert (event["ranks"], event["hosts"], event["reads"], event["step"]) == ([rank], [host], reads, 6)
        assert event["ratio"] > FACTOR and event["seconds"] > SLEEP and f"rank {rank} on {host}" in event["text"]
        last = raw_records(tmp_path / name)[-1]["slowest"]
        assert (last["rank"], last["host"], last["named"]) == (rank, host, 1) and last["ratio"] > FACTOR
    assert raw_records(tmp_path / "healthy")[-1]["slowest"]["named"] == 0
    assert "slowest" not in raw_records(tmp_path / "off")[-1]


def test_a_slow_rank_is_compared_with_its_own_stage_and_named_with_its_tensor_parallel_peers(corpus, tmp_path):
    """Rank 3 of PP2 x DP2 is the last stage of the second replica; rank 2 of TP2 x DP2 moves in step with rank 3."""
    options = [*SIX, f"--logging.straggler_factor={FACTOR}"]
    turns = [
        (tiny_config(corpus, tmp_path / "pipeline", *options, PP), 3, "forward"),
        (tiny_config(corpus, tmp_path / "tensor", *options, TP), 2, "data"),
    ]
    run_distributed(train_each, 4, turns, timeout=240)
    (pipeline,) = events(tmp_path / "pipeline", "straggler")
    assert pipeline["ranks"] == [3]
    (tensor,) = events(tmp_path / "tensor", "straggler")
    assert tensor["ranks"] == [2, 3] and tensor["reads"]


# ---------------------------------------------------------------- timers, profiles, garbage, determinism


def train_watched(config: RunConfig) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """(records, (step, generation) of every collection of garbage between the first step and the last).

    The sections of a step, one after the other, must fit into it: no stretch is counted twice.
    """
    from card_megatron.training import instruments

    collections: list[tuple[int, int]] = []
    step, own = [0], instruments.Instruments

    def note(phase: str, facts: dict[str, Any]) -> None:
        if phase == "start" and step[0]:
            collections.append((step[0], facts["generation"]))

    class Watched(own):
        def before_step(self, number):
            super().before_step(number)
            self.started = time.perf_counter()

        def after_step(self, number):
            step[0], elapsed = number, time.perf_counter() - self.started
            super().after_step(number)
            parts = [self.steps[-1][name] for name in ("forward", "backward", "gradients", "optimizer", "agree")]
            assert all(part > 0 for part in parts) and sum(parts) <= elapsed
            assert 0 < self.steps[-1]["data"] < self.steps[-1]["forward"]

    from card_megatron.training import loop

    loop.Instruments = Watched
    gc.callbacks.append(note)
    try:
        train(config)
    finally:
        gc.callbacks.remove(note)
        loop.Instruments = own
    assert gc.isenabled()
    return records(config.run_dir), collections


def train_watched_each(configs: list[RunConfig]) -> list[Any]:
    import torch

    results = [train_watched(config) for config in configs]
    assert not torch.are_deterministic_algorithms_enabled(), "a run puts back what it set"
    return results


@pytest.fixture(scope="module")
def watched(corpus, tmp_path_factory):
    """Run directory of a plain run and of one with every instrument, and what two ranks saw of them."""
    base = tmp_path_factory.mktemp("watched")
    every = [
        *("--profile.timers=true", "--profile.tool=torch", "--profile.step_start=4", "--profile.step_end=5"),
        *("--profile.ranks=[0, 1]", "--train.manual_gc_interval=5", "--train.deterministic=true"),
        *("--checkpoint.interval=6", "--checkpoint.async_save=false"),
    ]
    configs = [tiny_config(corpus, base / "plain", *SHORT), tiny_config(corpus, base / "every", *SHORT, *every)]
    return base, run_distributed(train_watched_each, 2, configs, timeout=240)


def test_instruments_change_no_loss(watched):
    _, ranks = watched
    (plain, _), (every, _) = ranks[0]
    assert plain == every


def test_garbage_is_collected_by_all_ranks_at_the_same_steps(watched):
    """Saves collect too, on all ranks alike: Megatron does so."""
    _, ranks = watched
    ours = [[(step, generation) for step, generation in each[1][1] if step in (5, 10)] for each in ranks]
    assert ours == [[(5, 2), (10, 2)]] * 2
    elsewhere = {step for each in ranks for step, _ in each[1][1]} - {5, 10}
    assert elsewhere <= {6, 12}, "between them Python collects nothing by itself, saves aside"


def test_traces_of_both_ranks_show_the_sections_of_the_profiled_steps(watched):
    base, _ = watched
    for rank in range(2):
        path = base / "every" / "profile" / f"rank_{rank}.steps_4-5.json.gz"
        trace = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = [event["name"] for event in trace if event.get("cat") == "user_annotation"]
        # 8 samples over 2 ranks, one a micro-batch: 4 micro-batches in each of 2 steps
        assert [names.count(name) for name in ("forward", "backward", "optimizer", "agree")] == [8, 8, 2, 2]
        assert "aten::addmm" in path.with_name(f"rank_{rank}.steps_4-5.txt").read_text() or any(
            "mm" in event["name"] for event in trace
        )
    assert sorted(path.suffix for path in (base / "every" / "profile").iterdir()) == [".gz", ".gz", ".txt", ".txt"]


def test_section_timers_are_in_the_records(watched):
    base, _ = watched
    for record in raw_records(base / "every"):
        for name in ("data", "forward", "backward", "gradients", "optimizer", "agree"):
            section = record["seconds"][name]
            assert 0 < section["mean"] <= section["max"] and section["rank"] in (0, 1)
        assert record["seconds"]["pipeline"]["max"] == 0.0
    saves = [record["seconds"]["save"]["mean"] > 0 for record in raw_records(base / "every")]
    assert saves == [False, False, True, False], "a save counts in the record that follows it"
    assert "seconds" not in raw_records(base / "plain")[-1]
