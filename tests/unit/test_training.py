"""A step, the loop and what they write, on one rank."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
from pathlib import Path

import pytest
import torch
import yaml
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from card_megatron.config import ConfigError, load_config
from card_megatron.data.datasets import ObjectiveDataset
from card_megatron.data.loader import Batch
from card_megatron.model import unwrap
from card_megatron.platform import Ranks
from card_megatron.training.evaluate import evaluate
from card_megatron.training.metrics import SUMS, make_report, read_report
from card_megatron.training.preflight import preflight
from card_megatron.training.records import Recorder
from card_megatron.training.run import hold, train_run
from card_megatron.training.state import build_state, release
from card_megatron.training.step import train_step
from tests.curves import tiny_config, train_curve


@pytest.fixture
def build(corpus, tmp_path):
    """Builds a state in a world of one, and leaves it again."""

    made = []

    def make(*overrides):
        made.append(build_state(preflight(tiny_config(corpus, tmp_path / "run", *overrides), Ranks())))
        return made[-1]

    yield make
    for state in made:
        release(state)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def lone_process():
    from card_megatron.platform import init_process_group

    init_process_group(Ranks())
    yield
    torch.distributed.destroy_process_group()


# ---------------------------------------------------------------- the same path


def test_card_with_clean_fraction_1_is_arm_bit_for_bit(corpus, tmp_path, lone_process):
    card, arm = (
        train_curve(tiny_config(corpus, tmp_path / "run", option, "--train.train_iters=5"))
        for option in ("--objective.clean_fraction=1", "--objective.name=arm")
    )
    assert card.losses == arm.losses and card.grad_norms == arm.grad_norms


def test_arm_step_is_megatrons_gpt_step_bit_for_bit(build):
    """The gradients of our path against a hand-written Megatron step: mean token loss of its own GPTModel."""
    state = build("--objective.name=arm", "--train.micro_batch_size=8", "--model.vocab_size=512")
    model = unwrap(state.model)[0]
    samples = [state.datasets.train[index] for index in range(8)]
    tokens, labels = (torch.stack([sample[name] for sample in samples]) for name in ("tokens", "labels"))
    losses = GPTModel.forward(model, tokens, torch.arange(32).expand(8, -1), None, labels=labels)
    wanted = torch.autograd.grad(losses.sum(), list(model.parameters()))
    scale = 1.0 / torch.tensor(losses.numel(), dtype=torch.int)  # as finalize_model_grads forms it
    kept = {}
    state.optimizer.prepare_grads = lambda: kept.update(
        {name: param.main_grad.clone() for name, param in model.named_parameters()}
    )
    result = train_step(state)
    assert read_report(result.report.tolist())["loss"] == float(losses.detach().sum()) / losses.numel()
    for (name, _), grad in zip(model.named_parameters(), wanted, strict=True):
        assert torch.equal(kept[name], grad * scale), name


@pytest.mark.parametrize("name", ["mdlm", "bd3lm"])
def test_a_diffusion_step_is_the_weighted_nll_over_all_targets(build, name):
    """Loss and gradients against the bound by hand, from the logits: 1/t on masked tokens, divided by all of them."""
    blocks = ["--objective.block_size=8"] if name == "bd3lm" else []
    state = build(f"--objective.name={name}", "--train.micro_batch_size=8", "--model.vocab_size=512", *blocks)
    model = unwrap(state.model)[0]
    noised = ObjectiveDataset(state.datasets.train, state.objective, state.config.seed, "train")
    samples = [noised[index] for index in range(8)]
    tokens, labels, weights = (torch.stack([one[part] for one in samples]) for part in ("tokens", "labels", "weights"))
    logits = model(tokens, None, None).float()
    logits[..., state.objective.mask_id] = logits[..., 512:] = -math.inf
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    masked = tokens[:, : labels.shape[1]] == state.objective.mask_id
    assert torch.equal(masked, weights > 0) and not masked.all()
    wanted = torch.where(masked, nll * weights, 0.0).sum() / labels.numel()
    gradients = torch.autograd.grad(wanted, list(model.parameters()))
    kept = {}
    state.optimizer.prepare_grads = lambda: kept.update(
        {name: param.main_grad.clone() for name, param in model.named_parameters()}
    )
    result = train_step(state)
    assert read_report(result.report.tolist())["loss"] == pytest.approx(float(wanted.detach()), rel=1e-6)
    for (name, _), grad in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(kept[name], grad, rtol=1e-4, atol=1e-6, msg=name)


# ---------------------------------------------------------------- the step


def test_a_non_finite_gradient_skips_the_update(build):
    state = build("--train.train_iters=3")
    train_step(state)
    before = [param.detach().clone() for param in unwrap(state.model)[0].parameters()]
    lr_steps = state.scheduler.num_steps
    weight = unwrap(state.model)[0].decoder.final_layernorm.weight
    healthy = weight[0].item()
    with torch.no_grad():
        weight[0] = math.nan
    result = train_step(state)
    assert result.skipped and state.skipped_steps == 1 and not math.isfinite(result.grad_norm)
    assert state.scheduler.num_steps == lr_steps, "a skipped step does not advance the schedule"
    assert state.consumed_samples == 16, "but its samples are consumed"
    with torch.no_grad():
        weight[0] = healthy
    for param, old in zip(unwrap(state.model)[0].parameters(), before, strict=True):
        assert torch.equal(param, old)


def test_norms_and_biases_are_not_decayed(build):
    state = build("--model.add_bias_linear=true", "--optimizer.weight_decay=0.5")
    for group in state.optimizer.param_groups:
        assert group["weight_decay"] == (0.5 if group["wd_mult"] else 0.0)
    undecayed = sum(
        param.numel() for group in state.optimizer.param_groups if not group["wd_mult"] for param in group["params"]
    )
    model = unwrap(state.model)[0]
    assert undecayed == sum(param.numel() for param in model.parameters() if param.dim() == 1)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", lambda done: 1.0),
        ("linear", lambda done: 1 - 0.9 * done),
        ("cosine", lambda done: 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2),
        ("WSD", lambda done: 1.0 if done <= 0.5 else 1 - 0.9 * (done - 0.5) / 0.5),
    ],
)
def test_learning_rate_schedules(build, style, expected):
    state = build(
        f"--optimizer.lr_decay_style={style}",
        *("--train.train_iters=12", "--optimizer.lr_warmup_iters=2", "--optimizer.lr=1e-2", "--optimizer.min_lr=1e-3"),
        "--optimizer.lr_wsd_decay_iters=5",
    )
    for step in range(12):
        done = (step - 2) / 10
        wanted = step / 2 if step <= 2 else expected(done)
        assert state.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * wanted), step
        state.scheduler.step(increment=8)


def test_batch_ramp_keeps_the_samples_in_order(corpus, tmp_path, lone_process):
    ramp = "--train.rampup_batch_size=[2, 2, 18]"
    curve = train_curve(tiny_config(corpus, tmp_path / "run", ramp, "--train.train_iters=8"))
    assert [index for index, *_ in curve.samples] == list(range(len(curve.samples)))
    # a size of 2 for each of the first 6 samples, then of 4, of 6, and of 8 once 18 samples are consumed
    assert len(curve.losses) == 8 and len(curve.samples) == sum([2, 2, 2, 4, 4, 6, 8, 8])


def test_gradient_accumulation_divides_by_weights_when_asked(build):
    by_tokens, by_weights = (_first_gradient(build, f"--objective.normalize={kind}") for kind in ("tokens", "weights"))
    report = by_tokens[1]
    factor = report["supervised"] / report["weights"]
    assert factor > 1.2
    torch.testing.assert_close(by_weights[0], by_tokens[0] * factor, rtol=1e-5, atol=1e-9)


def _first_gradient(build, option):
    state = build(option, "--optimizer.clip_grad=0")
    kept = []
    prepare, weight = state.optimizer.prepare_grads, unwrap(state.model)[0].embedding.word_embeddings.weight

    def prepare_and_keep():
        kept.append(weight.main_grad.clone())
        return prepare()

    state.optimizer.prepare_grads = prepare_and_keep
    result = train_step(state)
    parallel_state.destroy_model_parallel()  # another state is built next
    return kept[0], dict(zip(SUMS, result.report.tolist(), strict=False))


# ---------------------------------------------------------------- metrics


def test_report_by_hand():
    batch = Batch(
        tokens=torch.tensor([[5, 99], [6, 7]]),
        labels=torch.zeros(2, 2, dtype=torch.long),
        weights=torch.tensor([[1.0, 0.5], [1.0, 0.0]]),
        supervised=torch.tensor([[1, 1], [1, 0]]),
        t=torch.tensor([0.05, 1.0]),
        index=torch.arange(2),
    )
    numbers = read_report(make_report(batch, torch.tensor([[2.0, 4.0], [1.0, 9.0]]), mask_id=99).tolist())
    assert numbers["loss"] == (2 + 2 + 1) / 3
    assert numbers["nll"] == (2 + 4 + 1) / 3 and numbers["perplexity"] == math.exp(7 / 3)
    assert numbers["masked_fraction"] == 1 / 3 and numbers["mean_weight"] == 2.5 / 3
    assert numbers["nll_by_t"] == [3.0, *[None] * 8, 1.0] and numbers["tokens"] == 3


def test_report_of_a_diffusion_objective_by_hand():
    """Only masked tokens are scored; all supervised ones divide the loss; the clean half's tokens are no masks."""
    batch = Batch(
        tokens=torch.tensor([[99, 6, 99, 99, 5, 6, 7, 0]]),
        labels=torch.tensor([[5, 6, 7, 0]]),
        weights=torch.tensor([[1.5, 0.0, 1.5, 0.0]]),
        supervised=torch.tensor([[1, 1, 1, 0]]),
        t=torch.tensor([0.66]),
        index=torch.arange(1),
    )
    numbers = read_report(make_report(batch, torch.tensor([[2.0, 50.0, 4.0, 60.0]]), mask_id=99).tolist())
    assert numbers["loss"] == 1.5 * (2 + 4) / 3 and numbers["nll"] == 3.0
    assert numbers["masked_fraction"] == 2 / 3 and numbers["tokens"] == 3


# ---------------------------------------------------------------- a whole run


def test_a_run_leaves_config_metrics_summary_and_weights(corpus, tmp_path, capsys):
    config = tiny_config(
        corpus,
        tmp_path / "run",
        *(f"--data.validation.second=[{corpus}/second]", "--eval.samples=20", "--eval.at_start=true"),
        *("--eval.interval=5", "--train.train_iters=10", "--logging.interval=2", "--logging.tensorboard=true"),
    )
    summary = train_run(config, Ranks())
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == [2, 4, 6, 8, 10]
    assert [line["step"] for line in lines if "validation" in line] == [0, 5, 10]
    wanted = {"loss", "nll", "perplexity", "nll_by_t", "masked_fraction", "mean_weight", "grad_norm", "lr"}
    wanted |= {"tokens_per_second", "tokens_per_second_per_rank", "mfu", "consumed_samples", "consumed_tokens"}
    assert wanted | {"eta_seconds"} <= set(training[0]) and len(training[0]["nll_by_t"]) == 10
    assert training[-1]["consumed_tokens"] == 10 * 8 * 32
    assert json.loads((run / "summary.json").read_text()) == summary
    before, after = summary["validation_before"]["second"], summary["validation_after"]["second"]
    assert after["clean_nll"] < before["clean_nll"] and after["loss"] < before["loss"]
    assert list((run / "tensorboard").iterdir())
    # the configuration that was written is the run's
    again, _ = load_config([f"--config={run / 'config.yaml'}"])
    assert again.train == config.train and again.model.vocab_size == 500
    assert yaml.safe_load((run / "config.yaml").read_text())["run_dir"] == str(run)
    assert "step 10/10" in capsys.readouterr().out


def test_validation_repeats_itself(build, corpus):
    state = build(f"--data.validation.second=[{corpus}/second]", "--eval.samples=13")
    first = evaluate(state, state.datasets.validation, "validation")
    assert evaluate(state, state.datasets.validation, "validation") == first
    assert first["second"]["tokens"] == 13 * 32, "13 samples do not fill the batches, and each counts once"


# ---------------------------------------------------------------- the run directory


def _hold_for_a_while(run_dir, held, done):
    lock = hold(run_dir)
    held.set()
    done.wait(60)
    lock.close()


def test_two_runs_do_not_share_a_directory(corpus, tmp_path):
    spawn = multiprocessing.get_context("spawn")
    held, done = spawn.Event(), spawn.Event()
    other = spawn.Process(target=_hold_for_a_while, args=(str(tmp_path / "run"), held, done))
    other.start()
    try:
        assert held.wait(60)
        with pytest.raises(ConfigError, match=rf"is in use by process {other.pid} on .*choose another run_dir"):
            train_run(tiny_config(corpus, tmp_path / "run"), Ranks())
    finally:
        done.set()
        other.join()
    hold(str(tmp_path / "run")).close()


def test_a_full_disk_loses_no_record(tmp_path, capsys):
    config, _ = load_config([f"--run_dir={tmp_path}", "--logging.tensorboard=false"])
    recorder = Recorder(config)
    (sink,) = recorder.sinks
    disk = sink.file
    recorder.validation({"step": 1, "validation": {}})
    with Path("/dev/full").open("ab", buffering=0) as sink.file:
        recorder.validation({"step": 2, "validation": {}})
        recorder.sync()
    sink.file = disk
    recorder.validation({"step": 3, "validation": {}})
    recorder.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert "No space left on device; going on" in capsys.readouterr().out


def test_a_run_leaves_no_model_and_no_threads_behind(corpus, tmp_path):
    """Or a process that trains several times slows down: the groups of every run wake up a hundred times a second."""

    def left() -> tuple[int, int]:
        gc.collect()
        models = sum(type(item).__name__ == "ObjectiveGPTModel" for item in gc.get_objects())
        return models, len(list(Path("/proc/self/task").iterdir()))

    train_run(tiny_config(corpus, tmp_path / "first", "--train.train_iters=3"), Ranks(), console=False)
    models, threads = left()
    train_run(tiny_config(corpus, tmp_path / "second", "--train.train_iters=3"), Ranks(), console=False)
    models_later, threads_later = left()
    assert models_later <= models
    assert threads_later - threads < 10, "a run has some 17 groups of 3 threads each"
