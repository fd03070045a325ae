"""Runs that the tests of checkpoints share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state

from card_megatron.platform import Ranks
from card_megatron.training.preflight import preflight
from card_megatron.training.run import train_run
from card_megatron.training.state import TrainState, build_state, release
from tests.curves import tiny_config

pytest.register_assert_rewrite("tests.checkpoints")  # so that its asserts show values, as those of a test do

from tests.checkpoints import EMA, EVERY_2, TINY, Gate, after_each_step, cut_off, limit_file_size  # noqa: E402


@pytest.fixture
def train(corpus, tmp_path):
    """Runs to the end on one rank, in tmp_path / name; returns the run directory."""

    def run(*overrides: str, name: str = "run", after: Callable = lambda state: None, console: bool = False) -> Path:
        with after_each_step(after):
            train_run(tiny_config(corpus, tmp_path / name, *TINY, *overrides), Ranks(), console=console)
        return tmp_path / name

    return run


@pytest.fixture
def build(corpus, tmp_path):
    """Builds a state in a world of one, and leaves it again."""

    made = []

    def make(*overrides: str) -> TrainState:
        made.append(build_state(preflight(tiny_config(corpus, tmp_path / "run", *TINY, *overrides), Ranks())))
        return made[-1]

    yield make
    for state in made:
        release(state)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def straight(corpus, tmp_path_factory) -> Path:
    """A run that nothing interrupted, with checkpoints of steps 2, 4 and 6."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    train_run(tiny_config(corpus, run_dir, *TINY, EVERY_2, EMA), Ranks(), console=False)
    return run_dir


@pytest.fixture
def interrupted(straight, tmp_path) -> Path:
    """The same run, ended in the middle of step 5: checkpoints of steps 2 and 4."""
    return cut_off(straight, tmp_path / "run", 4)


@pytest.fixture
def gate(tmp_path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.remove()
    limit_file_size(None)
