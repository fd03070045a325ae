"""When a run saves, what it keeps, and what is in it."""

from __future__ import annotations

import re
import time

import pytest
import torch

from card_megatron.checkpoint import folder, saver, writer
from card_megatron.checkpoint.contents import weights_of
from card_megatron.checkpoint.optimizer_state import save_without_copies
from card_megatron.training import control
from card_megatron.training.state import TrainState
from card_megatron.training.step import train_step
from tests.checkpoints import (
    EMA,
    EVERY_2,
    STEPS,
    assert_all_whole,
    cut_off,
    optimizer_tensors,
    same_bits,
    shards_of,
    steps_in,
    steps_of,
)
from tests.runs import records, tensors

# ---------------------------------------------------------------- when to save, and what to keep


def test_saves_at_the_interval_and_at_the_end(train, straight):
    assert steps_of(straight) == [6, 4, 2]
    assert steps_of(train("--checkpoint.interval=4")) == [6, 4]
    assert steps_of(train(name="other")) == [6]


def test_saves_on_request(train, tmp_path, monkeypatch):
    monkeypatch.setattr(control, "LOOK_EVERY_SECONDS", 0)
    request = tmp_path / "run" / "save_now"
    left = []

    def touch(state):
        left.append(request.exists())
        if state.step == 3:
            request.touch()

    assert steps_of(train(after=touch)) == [6, 3]
    assert not any(left) and not request.exists()


def test_saves_by_the_clock(train):
    def wait(state):
        if state.step in (2, 5):
            time.sleep(0.7)

    assert steps_of(train(f"--checkpoint.interval_minutes={0.6 / 60}", after=wait)) == [6, 5, 2]


@pytest.mark.parametrize(("options", "kept"), [([2], [6, 5]), ([1, 2], [6, 4, 2]), ([1, 5], [6, 5])])
def test_old_checkpoints_go(train, options, kept):
    keep_last, *keep_every = options
    keep = [f"--checkpoint.keep_last={keep_last}", *(f"--checkpoint.keep_every={steps}" for steps in keep_every)]
    run_dir = train("--checkpoint.interval=1", *keep)
    assert steps_of(run_dir) == kept and steps_in(run_dir, "save_finished") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("bound", [1, 3])
def test_pending_saves_are_bounded(train, monkeypatch, bound):
    alive, most, write = set(), [], writer._write

    def wait_and_write(*args):
        time.sleep(0.3)
        return write(*args)

    class Counted(writer.Writing):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            alive.add(self)
            most.append(len(alive))

        def collect(self):
            alive.remove(self)
            return super().collect()

    monkeypatch.setattr(writer, "_write", wait_and_write)
    monkeypatch.setattr(saver, "Writing", Counted)
    run_dir = train("--checkpoint.interval=1", f"--checkpoint.max_pending={bound}", "--train.train_iters=5")
    assert max(most) == bound and not alive
    assert steps_of(run_dir) == [5, 4, 3, 2, 1]
    assert_all_whole(run_dir)


# ---------------------------------------------------------------- what is saved


def weights_now(state: TrainState) -> list[tuple[str, tuple, torch.Tensor]]:
    """(name, part of the whole tensor, value) of each weight of this rank."""
    shards = shards_of(weights_of(state.model))
    return [(shard.key, shard.global_slice(), shard.data.detach().clone()) for shard in shards]


def test_an_async_save_is_the_step_that_asked_for_it(train, gate):
    """Training goes on while the writers wait; what they then write is still the state of their step."""
    weights = {}

    def keep(state):
        weights[state.step] = weights_now(state)
        gate.open() if state.step == STEPS else gate.close()

    run_dir = train(EVERY_2, EMA, "--checkpoint.max_pending=3", after=keep)
    for step in (2, 4, 6):
        saved = tensors(folder.final_path(run_dir, step))
        assert len(weights[step]) > 25
        for name, part, weight in weights[step]:
            assert torch.equal(saved[name][part], weight), f"{name} of step {step}"
    sync = train(EVERY_2, EMA, "--checkpoint.async_save=false", name="sync")
    for step in (2, 4, 6):
        one, other = (tensors(folder.final_path(run, step)) for run in (run_dir, sync))
        assert same_bits(one, other)


@pytest.mark.parametrize("options", [[], ["--model.num_moe_experts=4"]], ids=["dense", "experts"])
def test_the_optimizer_state_is_megatrons(build, options):
    state = build(*options)
    train_step(state)
    train_step(state)
    megatrons = optimizer_tensors(state)
    save_without_copies(state.optimizer)
    assert len(megatrons) > 60 and same_bits(optimizer_tensors(state), megatrons)


def test_before_the_first_update_the_moments_are_zero(build):
    """Megatron's own way knows no answer yet: KeyError."""
    state = build()
    save_without_copies(state.optimizer)
    weights = {name: weight for name, _, weight in weights_now(state)}
    saved = optimizer_tensors(state)
    assert len(saved) == 3 * len(weights_now(state))
    for name, tensor in saved.items():
        kind, key, _ = re.match(r"optimizer\.state\.(\w+)\.(\S+) (.*)", name).groups()
        assert kind == "param" or not tensor.any()
        if "layers" not in key and kind == "param":
            assert torch.equal(tensor, weights[key])


def test_a_mixture_of_experts_resumes_bit_for_bit(train, tmp_path):
    experts = ["--model.num_moe_experts=4", EVERY_2, EMA]
    whole = train(*experts, name="whole")
    resumed = cut_off(whole, tmp_path / "run", 4)
    train(*experts)
    assert steps_in(resumed, "resumed") == [4] and records(resumed) == records(whole)
    assert same_bits(tensors(folder.final_path(resumed, 6)), tensors(folder.final_path(whole, 6)))
