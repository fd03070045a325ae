"""The average of the weights; and two ranks that save it, the optimizer's state, and fail together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tests.conftest  # noqa: F401  (first: on the ranks of run_distributed it installs the CPU platform)

# isort: split
import pytest
import torch
from megatron.core import parallel_state

from card_megatron.checkpoint import folder
from card_megatron.checkpoint.optimizer_state import save_without_copies
from card_megatron.config import RunConfig
from card_megatron.config.errors import CheckpointError
from card_megatron.model import unwrap
from card_megatron.platform import ranks_from_environment
from card_megatron.testing import run_distributed
from card_megatron.training.evaluate import evaluate
from card_megatron.training.preflight import preflight
from card_megatron.training.state import build_state
from card_megatron.training.step import train_step
from tests import runs
from tests.checkpoints import (
    EMA,
    EVERY_2,
    STEPS,
    TINY,
    Gate,
    after_each_step,
    assert_all_whole,
    kill_writer,
    limit_file_size,
    optimizer_tensors,
    same_bits,
    steps_of,
)
from tests.curves import tiny_config
from tests.runs import events, records, tensors

# ---------------------------------------------------------------- the average


def test_the_average_by_hand(build):
    state = build(EMA)
    assert state.ema is not None
    by_hand = [param.detach().clone() for param in unwrap(state.model)[0].parameters()]
    for _ in range(4):
        train_step(state)
        for average, param in zip(by_hand, unwrap(state.model)[0].parameters(), strict=True):
            average.copy_(0.9 * average + 0.1 * param.detach())
    ours = state.ema.average[0]
    assert sum(shard.numel() for shard in ours.values()) == sum(average.numel() for average in by_hand)
    for param, average in zip(unwrap(state.model)[0].parameters(), by_hand, strict=True):
        torch.testing.assert_close(ours[param].view_as(average), average, rtol=1e-6, atol=1e-8)


def test_validation_with_the_average(build, corpus):
    state = build(EMA, f"--data.validation.second=[{corpus}/second]", "--eval.samples=8")
    for _ in range(4):
        train_step(state)
    assert state.ema is not None
    before = [param.detach().clone() for param in unwrap(state.model)[0].parameters()]
    trained = evaluate(state, state.datasets.validation, "validation")
    with state.ema.in_model():
        averaged = evaluate(state, state.datasets.validation, "validation")
        for param in unwrap(state.model)[0].parameters():
            assert torch.equal(param.flatten(), state.ema.average[0][param])
    assert averaged["second"]["loss"] != trained["second"]["loss"]
    assert all(map(torch.equal, unwrap(state.model)[0].parameters(), before)), "the weights are back"
    assert evaluate(state, state.datasets.validation, "validation") == trained


def test_a_run_validates_with_the_average_when_asked(train, corpus):
    options = [EMA, f"--data.validation.second=[{corpus}/second]", "--eval.samples=8", "--eval.interval=2"]
    trained, averaged = train(*options, name="trained"), train(*options, "--ema.validate=true", name="averaged")
    one, other = ([line["validation"] for line in records(run) if "validation" in line] for run in (trained, averaged))
    assert len(one) == len(other) == 3 and all(a != b for a, b in zip(one, other, strict=True))
    assert same_bits(tensors(folder.final_path(trained, 6)), tensors(folder.final_path(averaged, 6)))


# ---------------------------------------------------------------- two ranks


def on_two_ranks(configs: dict[str, RunConfig], base: Path) -> dict[str, Any]:
    """What a rank finds: runs whose saves fail on rank 1 alone, and its part of optimizer state and average."""
    rank = ranks_from_environment().rank
    gate = Gate(base / f"gate {rank}")

    def fail_on_rank_1(state):
        if rank == 1:
            limit_file_size(50_000 if state.step == 2 else None)
            kill_writer(state, gate)

    with after_each_step(fail_on_rank_1):
        summary = runs.train(configs["continue"])
        try:
            stopped = str(runs.train(configs["stop"]))
        except CheckpointError as error:
            stopped = str(error)
    limit_file_size(None)
    state = build_state(preflight(configs["state"], ranks_from_environment()))
    train_step(state)
    megatrons = optimizer_tensors(state)
    save_without_copies(state.optimizer)
    found = {
        "steps": summary["steps"],
        "stopped": stopped,
        "megatrons": megatrons,
        "ours": optimizer_tensors(state),
        "averaged": sum(shard.numel() for shard in state.ema.average[0].values()),
        "parameters": sum(param.numel() for param in unwrap(state.model)[0].parameters()),
    }
    parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def two_ranks(corpus, tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    base = tmp_path_factory.mktemp("two")
    options = {"continue": [], "stop": ["--checkpoint.on_save_error=stop"], "state": []}
    configs = {name: tiny_config(corpus, base / name, *TINY, EVERY_2, EMA, *more) for name, more in options.items()}
    return base, run_distributed(on_two_ranks, 2, configs, base, timeout=120)


def test_both_ranks_go_on_when_one_cannot_save(two_ranks):
    base, ranks = two_ranks
    assert [found["steps"] for found in ranks] == [STEPS, STEPS]
    full, killed = events(base / "continue", "save_failed")
    assert full["step"] == 2 and full["problems"][0].startswith("rank 1: File too large: ")
    assert killed["step"] == 4 and killed["problems"] == ["rank 1: a writer process died"]
    assert steps_of(base / "continue") == [6]
    assert_all_whole(base / "continue")


def test_or_both_stop(two_ranks):
    base, ranks = two_ranks
    assert ranks[0]["stopped"] == ranks[1]["stopped"]
    assert "step 2 could not be written: rank 1: File too large" in ranks[0]["stopped"]
    assert steps_of(base / "stop") == []


def test_two_ranks_save_megatrons_optimizer_state_once(two_ranks):
    _, (first, second) = two_ranks
    assert not first["ours"].keys() & second["ours"].keys(), "each tensor is saved by one rank"
    assert second["ours"] and same_bits(first["ours"] | second["ours"], first["megatrons"])


def test_two_ranks_share_the_average(two_ranks):
    _, ranks = two_ranks
    assert sum(found["averaged"] for found in ranks) == ranks[0]["parameters"]
    assert max(found["averaged"] for found in ranks) < 0.6 * ranks[0]["parameters"]
