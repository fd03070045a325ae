"""Bad numbers: skipped alike on all ranks, counted, named by sample; spikes are seen, noise is not."""

from __future__ import annotations

import math
import random

import pytest
import torch

from card_megatron.checkpoint import folder
from card_megatron.config.errors import RunStopped
from card_megatron.config.schema import GuardConfig
from card_megatron.testing import run_distributed
from tests.curves import BASE, tiny_config
from tests.runs import events, records, tensors, train
from tests.unit.test_cli import card

PP, CP = "--parallel.pipeline_model_parallel_size=2", "--parallel.context_parallel_size=2"
ONE_ROW = "--train.micro_batch_size=1"


def make_guard(**fields):
    from card_megatron.training.guard import Guard  # here: ranks import this file before the CPU platform is there

    return Guard(GuardConfig(**fields))


def plant(added: dict[int, float]) -> None:
    """Add to the loss of some samples: the gradients stay what they are, so only the loss can give it away."""
    from card_megatron.training import step

    clean = step.loss_function

    def loss_function(state, batch, nll_BS):
        extra = torch.tensor([added.get(index, 0.0) for index in batch.index.tolist()])
        return clean(state, batch, nll_BS + extra[:, None])

    step.loss_function = loss_function


def train_planted(runs):
    """Each (configuration, planted) in turn, in one set of ranks; what a run that stopped itself said."""
    from card_megatron.training import step

    clean, results = step.loss_function, []
    for config, planted in runs:
        plant(planted)
        try:
            results.append(train(config))
        except RunStopped as error:
            results.append(str(error))
        finally:
            step.loss_function = clean
    return results


# ---------------------------------------------------------------- steps that are skipped

LAYOUTS = {"one process": (1, []), "DP2": (2, [ONE_ROW]), "PP2": (2, [PP]), "CP2": (2, [CP])}
BAD = {"nan": math.nan, "inf": math.inf}
SAMPLE = 8 * 3 + 5
"""The sixth of the eight samples of the fourth step."""


@pytest.fixture(scope="module")
def planted(corpus, tmp_path_factory):
    """(layout, kind) -> (run directory, what each rank returned) of runs with one bad loss and of runs with many."""
    base, outcomes = tmp_path_factory.mktemp("planted"), {}
    every_step = ["--train.train_iters=6", "--checkpoint.interval=1", "--checkpoint.keep_last=6", "--ema.decay=0.9"]
    for world_size in (1, 2):
        runs = {}
        for name in (name for name, (size, _) in LAYOUTS.items() if size == world_size):
            for kind, value in BAD.items():
                config = tiny_config(corpus, base / f"{name} {kind}", *every_step, *LAYOUTS[name][1])
                runs[name, kind] = (config, {SAMPLE: value})
        # steps 3, then 5 and 6: one is forgiven, two in a row are not
        options = ["--train.train_iters=9", "--guard.max_bad_steps=2", "--checkpoint.interval=4"]
        config = tiny_config(corpus, base / f"many {world_size}", *options, *([ONE_ROW] if world_size == 2 else []))
        runs["many", world_size] = (config, dict.fromkeys((17, 33, 47), math.nan))
        results = run_distributed(train_planted, world_size, list(runs.values()))
        for place, (key, (config, _)) in enumerate(runs.items()):
            outcomes[key] = (config.run_dir, [of_rank[place] for of_rank in results])
    return outcomes


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bad_loss_skips_the_step_on_all_ranks(planted, layout, kind):
    run_dir, results = planted[layout, kind]
    assert [(result["steps"], result["skipped_steps"]) for result in results] == [(6, 1)] * LAYOUTS[layout][0]
    assert [record["skipped_steps"] for record in records(run_dir)] == [0, 0, 0, 1, 0, 0]
    assert [record["loss"] is None for record in records(run_dir)] == [False, False, False, True, False, False]
    before, skipped, after = (tensors(folder.final_path(run_dir, step)) for step in (3, 4, 5))
    assert any(name.startswith("optimizer.state.exp_avg") for name in before)
    assert all(torch.equal(before[name], skipped[name]) for name in before), "nothing was learned from it"
    assert not any(torch.equal(skipped[name], after[name]) for name in before if "exp_avg" in name)
    (event,) = events(run_dir, "bad_step")
    assert (event["step"], event["first"], event["last"]) == (4, 24, 31)
    assert event["worst"][0] == {"index": SAMPLE, "nll": kind}
    assert [math.isfinite(float(row["nll"])) for row in event["worst"]] == [False, *[True] * 7]


@pytest.mark.parametrize("world_size", [1, 2])
def test_too_many_bad_steps_stop_the_run(planted, world_size):
    run_dir, messages = planted["many", world_size]
    assert all(message == messages[0] for message in messages)
    assert messages[0].startswith("2 steps in a row had a non-finite loss or gradient")
    assert "step 6 with samples 40..47 (worst: [{'index': 47, 'nll': 'nan'}" in messages[0]
    assert f"the last good checkpoint is {folder.final_path(run_dir, 4)}" in messages[0]
    assert [event["step"] for event in events(run_dir, "bad_step")] == [3, 5, 6]


def test_a_good_step_forgives_the_bad_ones_before():
    guard = make_guard(max_bad_steps=3)
    assert [guard.too_many_bad(skipped) for skipped in (True, True, False, True, True, True)] == [*[False] * 5, True]


def scored_in_parts():
    """Two ranks have a part each of samples 5 and 6, as with context parallelism."""
    from card_megatron.training.guard import Samples

    first = torch.distributed.get_rank() == 0
    nlls = [math.nan, 2.0] if first else [1.0, 3.0]
    return Samples([torch.tensor([5, 6])], [torch.tensor(nlls)]).worst()


def test_the_worse_part_of_a_sample_counts():
    expected = [{"index": 5, "nll": "nan"}, {"index": 6, "nll": 3.0}]
    assert run_distributed(scored_in_parts, 2) == [expected, expected]


# ---------------------------------------------------------------- spikes


def falling_losses(steps: int, seed: int) -> list[float]:
    """What training looks like: a power law, and noise that is a few percent of it."""
    rng = random.Random(seed)
    return [(2.0 + 8.0 / (1.0 + step) ** 0.4) * rng.gauss(1.0, 0.02) for step in range(steps)]


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_spike_and_a_jump_is(seed):
    guard = make_guard()
    losses = falling_losses(5000, seed)
    assert not any(guard.is_spike(loss) for loss in losses)
    assert guard.is_spike(1.5 * losses[-1])
    assert not guard.is_spike(losses[-1]) and not guard.is_spike(math.nan)
    assert guard.is_spike(1.5 * losses[-1]), "a spike does not make the next one normal"


def test_a_level_that_stays_is_soon_the_new_normal():
    guard = make_guard()
    losses = falling_losses(1000, 0)
    calm = [guard.is_spike(loss) for loss in losses]
    raised = [guard.is_spike(1.5 * loss) for loss in falling_losses(2000, 1)[1000:]]
    assert not any(calm) and raised[0] and 1 <= sum(raised) < 20 and not any(raised[100:])


def test_no_spike_before_the_window_is_full_and_none_with_sigma_0():
    guard = make_guard(spike_window=50)
    assert not any(guard.is_spike(3.0 + 0.01 * (step % 2)) for step in range(49))
    assert not guard.is_spike(30.0)
    guard = make_guard(spike_sigma=0.0, spike_window=2)
    assert not any(guard.is_spike(loss) for loss in (1.0, 1.0, 1.0, 100.0))


def test_a_resumed_guard_judges_alike():
    losses = falling_losses(400, 0)
    losses[250] = losses[380] = 9.0
    straight, first, second = (make_guard() for _ in range(3))
    expected = [straight.is_spike(loss) for loss in losses]
    judged = [first.is_spike(loss) for loss in losses[:300]]
    second.load(first.state())
    assert judged + [second.is_spike(loss) for loss in losses[300:]] == expected
    assert [step for step, spike in enumerate(expected) if spike] == [250, 380]


# ---------------------------------------------------------------- a spike in a real run

CARD_WITH_A_SPIKE = """
from card_megatron.platform import install
install()
from tests.unit.test_guard import plant
plant({165: 60.0})
from card_megatron.cli import main
main()
"""


def test_a_spike_is_logged_with_its_samples_and_stops_a_run_that_asks_for_it(corpus, tmp_path):
    from tests.unit.test_watchdog import python

    sources = [f"--data.train=[{corpus}/first]", f"--data.tokenizer={corpus}/tokenizer.model"]
    options = [*BASE, *sources, "--train.train_iters=24", "--guard.spike_window=12", "--checkpoint.interval=10"]
    for on_spike, exit_code in (("log", 0), ("stop", 1)):
        run_dir = tmp_path / on_spike
        guard = [f"--guard.on_spike={on_spike}", f"--run_dir={run_dir}"]
        ended = card("train", *options, *guard, command=python(CARD_WITH_A_SPIKE))
        assert ended.returncode == exit_code, ended.stderr
        (event,) = events(run_dir, "spike")
        assert (event["step"], event["first"], event["last"]) == (21, 160, 167)
        assert event["worst"][0]["index"] == 165 and event["worst"][0]["nll"] > 60 > event["worst"][1]["nll"]
        assert "loss spike at step 21" in ended.stdout and "Traceback" not in ended.stderr
    last_line = ended.stderr.strip().splitlines()[-1]
    assert last_line.startswith("card train: the loss jumped to") and "samples 160..167" in last_line
    assert f"the last good checkpoint is {folder.final_path(run_dir, 20)}" in last_line
