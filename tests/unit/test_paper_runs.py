"""The paper's runs and ablations: every row of the table is legal at its size, and its CPU-sized twin trains."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from card_megatron.checkpoint.source import open_source
from card_megatron.config import RunConfig, load_config
from card_megatron.config.errors import ConfigError
from card_megatron.config.keys import flatten
from card_megatron.convert.to_hf import to_hf
from card_megatron.decoding.model import open_model
from card_megatron.decoding.text import Generation, generate
from card_megatron.platform import Ranks
from card_megatron.training.preflight import preflight
from card_megatron.training.run import train_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "paper.py"
spec = importlib.util.spec_from_file_location("paper", EXAMPLE)
assert spec is not None and spec.loader is not None
paper = importlib.util.module_from_spec(spec)
spec.loader.exec_module(paper)

ROWS = paper.rows()
PARADIGMS = [f"{objective}_{run}" for run in ("1b", "lm1b", "epochs") for objective in ("arm", "card", "mdlm", "bd3lm")]
NO_DATA = ["--data.mock=true", "--data.train=[]"]


@functools.cache
def load(*options: str) -> RunConfig:
    return load_config(options)[0]


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_legal_at_the_papers_size_and_a_twins(name):
    config = load(*paper.options_of(name, cpu=False), *NO_DATA)
    preflight(config, Ranks(world_size=8 if config.preset == "110m" else 64), with_data=False)
    twin = load(*paper.options_of(name, cpu=True), *NO_DATA, "--model.vocab_size=2048")
    preflight(twin, Ranks(), with_data=False)
    # a row is its configuration, but for what it says
    base = load(f"--config={paper.FOLDER / ROWS[name]['config']}.yaml")
    ours, theirs = (dict(flatten(asdict(one))) for one in (config, base))
    changed = {key for key in ours if ours[key] != theirs[key] and not key.startswith(("run_dir", "data."))}
    assert changed <= ROWS[name].keys()
    assert twin.objective == config.objective, "the twin trains another objective"


def test_the_table_has_all_that_the_paper_compares():
    assert set(PARADIGMS) < set(ROWS)
    objectives = {name: load(*paper.options_of(name, cpu=False), *NO_DATA).objective for name in ROWS}
    assert objectives["card_strict_tail"].tail_factor == 1 and objectives["card_random"].tail_factor == math.inf
    assert objectives["card_no_reweighting"].reweight is False
    assert len({one.tail_factor for name, one in objectives.items() if name.startswith("card")}) >= 6
    assert {one.block_size for one in objectives.values() if one.name == "bd3lm"} == {4, 8, 16, 32}
    assert objectives["card_arm_mix_25"].clean_fraction == 0.25


def test_the_epochs_are_of_the_data_that_their_comments_name():
    twin, run = (load(*paper.options_of("card_epochs", cpu=cpu)) for cpu in (True, False))
    shares = [float(share) for share in twin.data.split.split(",")]
    assert shares[0] / sum(shares) == pytest.approx(1 / 20) and twin.eval.samples
    steps = 1e9 / (run.train.global_batch_size * run.data.sequence_length)
    assert run.checkpoint.keep_every == math.ceil(steps) and run.checkpoint.keep_every % run.checkpoint.interval == 0


@pytest.mark.parametrize("name", ROWS)
def test_every_twin_trains(corpus, tmp_path, name):
    data = [f"--data.tokenizer={corpus}/tokenizer.model", f"--data.train=[{corpus}/first]", "--data.num_workers=0"]
    if "epochs" not in name:
        data.append(f"--data.validation.python_docs=[{corpus}/second]")
    short = ["--train.train_iters=2", "--eval.samples=4", "--logging.tensorboard=false"]
    rate = ["--optimizer.lr_warmup_iters=1"]
    config = load(*paper.options_of(name, cpu=True), *data, *short, *rate, f"--run_dir={tmp_path}")
    train_run(config, Ranks(), console=False)
    (after,) = json.loads((tmp_path / "summary.json").read_text())["validation_after"].values()
    exact = config.objective.name in ("arm", "card")
    assert ("clean_perplexity" in after) == exact and ("bound_perplexity" in after) != exact
    assert 0 < after["clean_nll" if exact else "bound_nll"] < 4 * math.log(500)
    if not exact:
        refuse_as_causal(tmp_path)


def refuse_as_causal(run: Path) -> None:
    """What would take its weights for a causal model's does not."""
    with pytest.raises(ConfigError, match="whose attention is not causal; a Hugging Face folder"):
        to_hf(open_source(run), run / "exported", None)
    with open_model(run) as model, pytest.raises(ConfigError, match="which has denoise; leave it out"):
        generate(model, ["def"], Generation(strategy="verify"))
