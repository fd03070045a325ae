"""Interrupted and resumed: bit for bit in the same layout, the one-process curve in any other."""

from __future__ import annotations

import json
import signal

import pytest
import torch

from card_megatron.checkpoint import folder
from card_megatron.testing import run_distributed
from tests.curves import tiny_config
from tests.distributed.test_layouts import BD3LM, CP, MDLM, ONE_ROW, PP, SP, TOLERANCE, TP, VPP, worst_difference
from tests.runs import events, records, tensors, train_in_turn

STEPS = 16
EMA = "--ema.decay=0.9"
RAMP = ["--train.rampup_batch_size=[4, 2, 40]", ONE_ROW]
OVERLAP = ["--parallel.overlap_grad_reduce=true", "--parallel.overlap_param_gather=true"]
DROPOUT = ["--model.hidden_dropout=0.1", "--model.attention_dropout=0.1"]
TINY = [f"--train.train_iters={STEPS}", "--optimizer.lr_warmup_iters=6", EMA]


def same_bits(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------- the same layout

EXACT = {
    # world size, overrides; stops fall into the warm-up, an epoch, a batch ramp and a logging window
    "one process": (1, [*RAMP, *DROPOUT]),
    "DP2 overlapped": (2, [*RAMP, *DROPOUT, *OVERLAP]),
    "TP2": (2, [TP, *DROPOUT]),
    "PP2xVPP2": (2, [PP, VPP]),
    "TP2+SP bd3lm": (2, [TP, SP, *BD3LM]),
    "DP2 mdlm": (2, [ONE_ROW, *MDLM]),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", EXACT)
def test_resumed_runs_are_bit_identical(corpus, tmp_path, layout):
    world_size, overrides = EXACT[layout]
    sets = [f"--data.validation.second=[{corpus}/second]", "--eval.samples=8", "--eval.interval=4"]
    options = [*TINY, *overrides, *sets, "--logging.interval=3", "--eval.at_start=true"]
    straight, broken = (tiny_config(corpus, tmp_path / name, *options) for name in ("straight", "broken"))
    stop = {"stop_rank": world_size - 1}
    turns = [(straight, {}), (broken, {"stop_at": 4, **stop}), (broken, {"stop_at": 10, **stop}), (broken, {})]
    results = run_distributed(train_in_turn, world_size, turns)[0]
    assert [result.get("stopped") for result in results] == [None, "SIGTERM", "SIGTERM", None]
    assert [event["step"] for event in events(broken.run_dir, "resumed")] == [4, 10]
    assert records(broken.run_dir) == records(straight.run_dir)
    assert same_bits(tensors(results[0]["checkpoint"]), tensors(results[3]["checkpoint"]))
    skipped = ("seconds", "checkpoint", "last_record")
    assert {k: v for k, v in results[0].items() if k not in skipped} == {
        k: v for k, v in results[3].items() if k not in skipped
    }


# ---------------------------------------------------------------- another layout

RESHARDED = {
    # saved in, continued in: each (world size, overrides)
    "TP2 -> PP2": ((2, [TP]), (2, [PP])),
    "CP2 -> TP2+SP": ((2, [CP]), (2, [TP, SP])),
    "DP2 overlapped -> 1": ((2, [ONE_ROW, *OVERLAP]), (1, [])),
    "1 -> PP2xVPP2": ((1, []), (2, [PP, VPP])),
    "PP2xDP2 -> TP2": ((4, [PP, ONE_ROW]), (2, [TP])),
    "PP2xVPP2 -> TP2xDP2": ((2, [PP, VPP]), (4, [TP, ONE_ROW])),
    "mdlm: CP2 -> TP2": ((2, [CP]), (2, [TP])),
    "bd3lm: TP2+SP -> PP2xVPP2": ((2, [TP, SP]), (2, [PP, VPP])),
}
STOP = 7
OBJECTIVES = {"mdlm": MDLM, "bd3lm": BD3LM}


def objective_of(name: str) -> list[str]:
    """What a name's beginning says; card's runs have none."""
    return OBJECTIVES.get(name.partition(":")[0], [])


@pytest.fixture(scope="module")
def resharded(corpus, tmp_path_factory):
    """name -> its run directory, saved at STOP in one layout and run to the end in another; and the straight runs'."""
    base = tmp_path_factory.mktemp("resharded")
    straight = ["straight", *(f"{objective}: straight" for objective in OBJECTIVES)]
    saves: dict[int, list] = {1: [], 2: [], 4: []}
    rest: dict[int, list] = {1: [], 2: [], 4: []}
    for name in straight:
        saves[1].append((tiny_config(corpus, base / name, *TINY, *objective_of(name)), {}))
    for name, ((before, first), (after, second)) in RESHARDED.items():
        options = [*TINY, *objective_of(name)]
        saves[before].append((tiny_config(corpus, base / name, *options, *first), {"stop_at": STOP}))
        rest[after].append((tiny_config(corpus, base / name, *options, *second), {}))
    for turns in (saves, rest):
        for world_size, runs in turns.items():
            if runs:
                run_distributed(train_in_turn, world_size, runs, timeout=420)
    return {name: base / name for name in (*straight, *RESHARDED)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RESHARDED)
def test_another_layout_continues_the_one_process_curve(resharded, name):
    start = f"{name.partition(':')[0]}: straight" if objective_of(name) else "straight"
    straight, ours = resharded[start], resharded[name]
    assert [event["step"] for event in events(ours, "resumed")] == [STOP]
    assert not events(ours, "resumed")[0]["same_layout"]
    for metric in ("loss", "grad_norm", "lr"):
        curve, oracle = ([record[metric] for record in records(run)] for run in (ours, straight))
        assert len(curve) == STEPS
        assert worst_difference(curve[1:], oracle[1:]) < TOLERANCE, metric
    one, other = (tensors(folder.final_path(run, STEPS)) for run in (straight, ours))
    assert one.keys() == other.keys() and any(key.startswith("ema.") for key in one)
    for key, tensor in one.items():
        # moments and averages too: relative to the tensor's own size
        assert (other[key] - tensor).abs().max() <= 5e-5 * tensor.abs().max() + 1e-12, key


def test_a_checkpoint_is_the_same_whatever_the_layout_saved_it(resharded):
    """Names and shapes of a save do not depend on the layout; values differ by rounding alone."""
    saved = {name: tensors(folder.final_path(run, STOP)) for name, run in resharded.items() if name in RESHARDED}
    reference = saved.pop("1 -> PP2xVPP2")
    for name, state in saved.items():
        assert {key: tensor.shape for key, tensor in state.items()} == {
            key: tensor.shape for key, tensor in reference.items()
        }, name


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_on_one_rank_stops_all_at_the_same_step(corpus, tmp_path, number):
    config = tiny_config(corpus, tmp_path / "run", *TINY, ONE_ROW)
    turns = [(config, {"stop_at": 5, "stop_rank": 1, "number": number})]
    (first,), (second,) = run_distributed(train_in_turn, 2, turns)
    assert first == second and first["steps"] == 5
    marker = json.loads((tmp_path / "run" / "stopped.json").read_text())
    assert (marker["reason"], marker["step"]) == (signal.Signals(number).name, 5)
    assert folder.visible(config.run_dir)[0].name == "step_000005"
