"""Who is slow, among whom; sections and settings of a process: without ranks."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from card_megatron.config.errors import ConfigError
from card_megatron.training.process import DETERMINISTIC, process_settings, record_collectives
from card_megatron.training.profiling import ProfileWindow
from card_megatron.training.sections import NAMES, Sections
from card_megatron.training.stragglers import Place, Stragglers, slow_ranks
from tests.configs import load

PLACES = [Place(rank, f"node{rank // 4}", stage=rank // 4, replica=rank % 4) for rank in range(8)]
"""PP2 x DP4."""
NO_DATA = [0.0] * 8


def test_stages_are_not_compared_with_each_other():
    own = [1.0, 1.01, 0.99, 1.0, 2.0, 2.02, 1.98, 2.0]  # the second stage has twice the work
    assert slow_ranks(PLACES, own, NO_DATA, 1.25) == []
    own[2], own[7] = 1.4, 4.0
    first, second = slow_ranks(PLACES, own, NO_DATA, 1.25)
    assert (first.ranks, first.hosts, first.ratio, first.reads) == ((7,), ("node1",), pytest.approx(2.0), False)
    assert (second.ranks, second.hosts) == ((2,), ("node0",))


def test_of_two_replicas_the_slower_one_is_named_and_alone_nobody_is():
    pair = [Place(0, "a", 0, 0), Place(1, "b", 0, 1)]
    (slow,) = slow_ranks(pair, [1.0, 1.5], [0.0, 0.4], 1.25)
    assert slow.ranks == (1,) and slow.reads and "rank 1 on b: 1.500 s" in str(slow) and "waiting for data" in str(slow)
    assert slow_ranks(pair[:1], [9.0], [0.0], 1.25) == []


def test_ranks_that_wait_for_each_other_in_every_layer_are_named_together():
    places = [Place(rank, "a" if rank < 2 else "b", 0, rank // 2) for rank in range(4)]  # TP2 x DP2
    (slow,) = slow_ranks(places, [1.0, 1.0, 1.8, 1.8], [0.0] * 4, 1.25)
    assert slow.ranks == (2, 3) and slow.hosts == ("b",)


def test_a_rank_is_named_once_when_it_is_slow_twice_running_and_again_when_it_is_over():
    said: list[tuple[str, int, list[int]]] = []
    watch = Stragglers(PLACES, 1.25, lambda event, **facts: said.append((event, facts["step"], facts["ranks"])))

    def look(step: int, slow: int | None) -> int:
        own = [1.0 + (rank == slow) for rank in range(8)]
        record = watch.look(step, own, NO_DATA)
        assert record is not None and (slow is None or (record["rank"], record["ratio"]) == (slow, 2.0))
        return record["named"]

    named = [
        look(10, 3),
        look(20, None),
        look(30, 3),
        look(40, 3),
        look(50, 3),
        look(60, None),
        look(70, 5),
        look(80, 5),
    ]
    assert named == [0, 0, 0, 1, 1, 0, 0, 1]
    assert said == [("straggler", 40, [3]), ("straggler_over", 60, [3]), ("straggler", 80, [5])]


def test_sections_take_megatrons_names():
    sections = Sections()
    assert sections("forward-compute", log_level=2) is sections("forward") and sections("data").name == "data"
    for name in ("forward-recv", "backward-send-forward-recv"):
        assert sections(name) is sections("pipeline")
    with sections("forward-compute"), sections("optimizer-inner-step"):
        pass
    seconds = sections.read()
    assert tuple(seconds) == NAMES and seconds["forward"] > 0 and seconds["backward"] == 0
    sections.reset()
    assert set(sections.read().values()) == {0.0}
    assert list(sections.reading([1, 2, 3])) == [1, 2, 3] and len(sections("data").marks) == 3


def test_a_run_sets_its_process_up_and_puts_it_back(tmp_path, monkeypatch):
    for name in (*DETERMINISTIC, "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    config = load(f"train.deterministic=true; train.manual_gc_interval=5; guard.flight_recorder=77; run_dir={tmp_path}")
    with process_settings(config):
        assert torch.are_deterministic_algorithms_enabled() and not gc.isenabled()
        assert {name: os.environ[name] for name in DETERMINISTIC} == {
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            "NCCL_ALGO": "Ring",
        }
        assert os.environ["TORCH_FR_BUFFER_SIZE"] == "77"
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "flight_recorder" / "rank_")
    assert not torch.are_deterministic_algorithms_enabled() and gc.isenabled()


def test_an_environment_that_asks_for_the_opposite_is_refused(monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    with (
        pytest.raises(
            ConfigError, match=r"does not go with NVTE_ALLOW_NONDETERMINISTIC_ALGO=1 .*unset it, or set it to 0"
        ),
        process_settings(load("train.deterministic=true; guard.flight_recorder=0")),
    ):
        pass


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "profile").write_text("a file where the folder should be")
    said: list[str] = []
    window = ProfileWindow(
        load("profile.tool=torch; profile.step_start=2; profile.step_end=3").profile,
        *(tmp_path, 0, lambda event, **facts: said.append(event)),
    )
    for step in range(1, 5):
        window.before_step(step)
        assert Sections.annotate == (step in (2, 3))
        window.after_step(step)
    assert said == ["profile_failed"] and not Sections.annotate


def test_what_a_user_set_for_the_flight_recorder_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "9")
    record_collectives(tmp_path, 77)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "9"


def test_megatron_is_told_of_determinism():
    from card_megatron.model.transformer_config import build_transformer_config

    assert build_transformer_config(load("train.deterministic=true")).deterministic_mode
    assert not build_transformer_config(load()).deterministic_mode
