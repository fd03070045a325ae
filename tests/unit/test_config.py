"""The configuration room: who wins, presets, and the numbers that follow."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator
from megatron.core.transformer.enums import LayerType

from card_megatron.config import ConfigError, RunConfig, check, dump_yaml, load_config
from card_megatron.config.derived import (
    batch_size_at,
    padded_vocab_size,
    parameter_count,
    pipeline_chunks,
    pipeline_layout,
    total_samples,
    total_steps,
)
from card_megatron.config.presets import PRESETS
from card_megatron.model import build_transformer_config
from card_megatron.platform import Ranks
from card_megatron.training.preflight import preflight
from tests.configs import load, load_yaml, options

EXAMPLES = [
    path
    for path in sorted((Path(__file__).parents[2] / "examples" / "configs").glob("*.yaml"))
    if "_h100_" not in path.stem  # tests/unit/test_plan_command.py has those
]


# ---------------------------------------------------------------- what is read


def test_defaults_preset_file_command_line_each_win_over_the_one_before(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("preset: 1b\nmodel: {num_layers: 7, hidden_size: 96}\n")
    arguments = [f"--config={path}", "--model.hidden_size=64"]
    for order in (arguments, arguments[::-1]):
        model = load_config(order)[0].model
        assert (model.hidden_size, model.num_layers, model.ffn_hidden_size) == (64, 7, 4096)
        assert model.rotary_base == RunConfig().model.rotary_base == 10000


def test_a_preset_on_the_command_line_takes_the_files_place(tmp_path):
    for order in itertools.permutations(["--preset=small", f"--config={tmp_path}/run.yaml"]):
        (tmp_path / "run.yaml").write_text("preset: 1b\nmodel: {num_layers: 7}\n")
        config, _ = load_config(order)
        assert (config.preset, config.model.num_layers, config.model.hidden_size) == ("small", 7, 320)
    assert load_config([f"--config={tmp_path}/run.yaml", "--preset=null"])[0].model.hidden_size == 128


def test_of_several_files_the_later_wins_and_all_count(tmp_path):
    (tmp_path / "a.yaml").write_text("preset: 1b\nmodel: {num_layers: 7, hidden_size: 96}\n")
    (tmp_path / "b.yaml").write_text("model: {num_layers: 9}\n")
    model = load_config([f"--config={tmp_path}/a.yaml", f"--config={tmp_path}/b.yaml"])[0].model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (9, 96, 4096)
    (tmp_path / "a.yaml").write_text("modle: 3\n")
    with pytest.raises(ConfigError, match="unknown config key modle"):
        load_config([f"--config={tmp_path}/a.yaml", f"--config={tmp_path}/b.yaml"])


@pytest.mark.parametrize(
    ("arguments", "field", "expected"),
    [
        (["--objective.tail_factor", "inf"], "objective.tail_factor", math.inf),
        (["--objective.tail_factor=.inf"], "objective.tail_factor", math.inf),
        (["--objective.tail_factor=2"], "objective.tail_factor", 2.0),
        (["--optimizer.lr", "1e-4"], "optimizer.lr", 1e-4),
        (["--train.train_tokens=33_000_000_000"], "train.train_tokens", 33 * 10**9),
        (["--data.train", "one"], "data.train", ["one"]),
        (["--data.train=[a, b]"], "data.train", ["a", "b"]),
        (["--data.train=['0.3 a', '0.7 b']"], "data.train", ["0.3 a", "0.7 b"]),
        (["--data.train=0.3 a"], "data.train", ["0.3 a"]),
        (["--data.validation.a=[x]", "--data.validation.b=[y, z]"], "data.validation", {"a": ["x"], "b": ["y", "z"]}),
        (["--train.rampup_batch_size=[8, 8, 64]"], "train.rampup_batch_size", [8, 8, 64]),
        (["--model.transformer.qk_clip=true"], "model.transformer", {"qk_clip": True}),
        (["--run_dir=a=b"], "run_dir", "a=b"),
        (["--objective.reweight=false"], "objective.reweight", False),
        (["--model.num_layers=3", "--model.num_layers=5"], "model.num_layers", 5),
    ],
)
def test_values_of_the_command_line(arguments, field, expected):
    value = load_config(arguments)[0]
    for name in field.split("."):
        value = getattr(value, name)
    assert value == expected and type(value) is type(expected)


UNUSUAL = ["--objective.tail_factor=inf", "--data.validation.a=[x, y]", "--model.transformer.qk_clip=true", "--seed=7"]


@pytest.mark.parametrize("overrides", [[], UNUSUAL], ids=["plain", "unusual"])
@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_a_dumped_configuration_reads_back_equal(tmp_path, preset, overrides):
    config, _ = load_config([*overrides, *([f"--preset={preset}"] if preset else [])])
    assert load_yaml(tmp_path, dump_yaml(config)) == config


# ---------------------------------------------------------------- presets and examples


@pytest.mark.parametrize(("preset", "millions"), [("tiny", 1.1), ("small", 12), ("110m", 109), ("1b", 1012)])
def test_presets_have_the_size_that_their_name_says(preset, millions):
    model = load_config([f"--preset={preset}"])[0].model
    model.vocab_size = model.vocab_size or 2048  # tiny takes its tokenizer's: the demo's
    assert parameter_count(model) == pytest.approx(millions * 1e6, rel=0.03)


def test_the_1b_preset_is_the_papers_model():
    config = load_config(["--preset=1b"])[0]
    paper = {
        "model": dict(
            num_layers=33,
            hidden_size=1536,
            ffn_hidden_size=4096,
            num_attention_heads=24,
            vocab_size=50368,
            max_position_embeddings=8192,
            activation="swiglu",
            normalization="RMSNorm",
        ),
        "optimizer": dict(lr=3e-4, lr_warmup_iters=2500, lr_decay_style="cosine"),
        "precision": dict(preset="bf16"),
        "train": dict(train_tokens=300_000_000_000),
        "objective": dict(name="card", tail_factor=1.5, decay=0.5, beta=1.0),
    }
    for section, fields in paper.items():
        for name, value in fields.items():
            assert getattr(getattr(config, section), name) == value, name
    assert load_config(["--preset=110m"])[0].train.train_tokens == 33_000_000_000


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_passes_the_checks(path):
    """The data of the examples are not here: mock data stand in, with a vocabulary where the preset gives none."""
    preset = yaml.safe_load(path.read_text())["preset"]
    own_vocabulary = [] if "vocab_size" in PRESETS[preset]["model"] else ["--model.vocab_size=2048"]
    config, _ = load_config([f"--config={path}", "--data.mock=true", "--data.train=[]", *own_vocabulary])
    preflight(config, Ranks(world_size={"110m": 8, "1b": 64}.get(preset, 1)), with_data=False)
    assert path.stem == f"card_{preset}"


def test_there_is_an_example_for_every_preset():
    assert {path.stem for path in EXAMPLES} == {f"card_{preset}" for preset in PRESETS}


# ---------------------------------------------------------------- numbers that follow


@pytest.mark.parametrize("virtual", [None, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_33_layers_pipeline(ranks, virtual):
    text = f"PP={ranks}; VPP={virtual or 'null'}; train.micro_batch_size=1; data.mock=true"
    config, _ = load_config(["--preset=1b", *options(text)])
    check(config, world_size=ranks, cuda=False)
    layout = pipeline_layout(config.model, config.parallel)
    stages = [stage.count("t") for stage in layout.split("|")]
    assert len(stages) == pipeline_chunks(config.parallel) == ranks * (virtual or 1)
    assert sum(stages) == 33 and max(stages) - min(stages) == 1
    assert stages[0] == min(stages) or len(stages) == 2, "the embedding's stage is spared before others"
    megatrons = build_transformer_config(config).pipeline_model_parallel_layout.layout
    assert [len(chunks) for chunks in megatrons] == [virtual or 1] * ranks
    for rank, chunk in itertools.product(range(ranks), range(virtual or 1)):
        assert megatrons[rank][chunk].count(LayerType.decoder) == stages[chunk * ranks + rank]


def test_layers_that_divide_evenly_need_no_layout():
    config = load("PP=2; VPP=2")
    assert pipeline_layout(config.model, config.parallel) is None


def test_the_padded_vocabulary_does_not_depend_on_the_layout():
    sizes = {padded_vocab_size(load(f"TP={tp}; model.vocab_size=50368").model) for tp in (1, 2, 4, 8)}
    assert sizes == {50432}


@st.composite
def ramped_runs(draw):
    """A run whose batch grows in equal steps, of a given number of iterations or of tokens."""
    config = RunConfig()
    start, increment, increments = (draw(st.integers(low, 12)) for low in (1, 1, 0))
    config.train.global_batch_size = start + increment * increments
    config.train.rampup_batch_size = draw(st.sampled_from([None, [start, increment, draw(st.integers(1, 400))]]))
    config.data.sequence_length = draw(st.sampled_from([1, 7, 128]))
    if draw(st.booleans()):
        config.train.train_iters = draw(st.integers(1, 120))
    else:
        config.train.train_tokens = draw(st.integers(1, 900)) * draw(st.sampled_from([1, config.data.sequence_length]))
    return config


@given(ramped_runs())
def test_samples_and_steps_of_a_ramped_run_are_those_of_running_it(config):
    samples, steps = 0, 0
    while not is_over(config, samples, steps):
        samples, steps = samples + batch_size_at(config.train, samples), steps + 1
    assert (total_samples(config), total_steps(config)) == (samples, steps)


def is_over(config: RunConfig, samples: int, steps: int) -> bool:
    train, tokens = config.train, samples * config.data.sequence_length
    return tokens >= train.train_tokens if train.train_iters is None else steps >= train.train_iters


@given(ramped_runs(), st.integers(0, 500))
def test_the_ramp_is_megatrons(config, samples):
    train = config.train
    assume(train.rampup_batch_size and train.rampup_batch_size[0] < train.global_batch_size)
    megatrons = RampupBatchsizeNumMicroBatchesCalculator(
        train.global_batch_size, 1, 1, False, 1, *train.rampup_batch_size
    )
    megatrons.update(samples, consistency_check=False)
    assert batch_size_at(train, samples) == megatrons.get_current_global_batch_size()
