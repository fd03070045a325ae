"""What `precision` means: presets, fields that win over them, and what older files called it."""

from __future__ import annotations

import dataclasses

import pytest

from card_megatron.config.load import config_from_tree, load_config
from card_megatron.config.precision import FP8, Precision, resolve_precision
from card_megatron.config.schema import PrecisionConfig, RunConfig
from tests.configs import MOCK, load_yaml


def resolved(preset: str, **fields) -> Precision:
    return resolve_precision(PrecisionConfig(preset=preset, **fields))  # type: ignore[arg-type]


def test_without_fp8_there_is_no_trace_of_it():
    assert resolved("fp32") == Precision("fp32", grad_reduce_in_fp32=True)
    assert resolved("bf16") == Precision("bf16", grad_reduce_in_fp32=True)
    assert resolved("bf16", grad_reduce_in_fp32=False).grad_bytes == 2
    assert resolved("fp32", grad_reduce_in_fp32=False).grad_bytes == 4
    assert not resolved("fp32").main_params and resolved("bf16").main_params


@pytest.mark.parametrize("preset", FP8)
def test_every_field_of_a_preset_can_be_overridden(preset):
    """Whatever a field is given, the record has it."""
    other = dict(
        params_dtype="fp32",
        fp8_format="e4m3" if FP8[preset]["fp8_format"] == "hybrid" else "hybrid",
        fp8_recipe="tensorwise" if preset != "fp8_tensorwise" else "blockwise",
        fp8_param_gather=not FP8[preset]["fp8_param_gather"],
        fp8_amax_history_len=7,
        fp8_amax_compute_algo="most_recent",
        first_last_layers_bf16=preset == "fp8_delayed",
        num_layers_at_start_in_bf16=3,
        num_layers_at_end_in_bf16=2,
    )
    record = resolved(preset, **other)
    assert {name: getattr(record, name) for name in other} == other
    given = {field.name for field in dataclasses.fields(PrecisionConfig)}
    assert given == {*other, "preset", "emulate", "grad_reduce_in_fp32"}, "a new field belongs into this test"


def test_layers_in_fp8():
    tensorwise = resolved("fp8_tensorwise")
    assert [tensorwise.in_fp8(layer, 4) for layer in range(4)] == [False, True, True, False]
    assert all(resolved("fp8_delayed").in_fp8(layer, 4) for layer in range(4))
    assert not any(resolved("bf16").in_fp8(layer, 4) for layer in range(4))
    assert not tensorwise.in_fp8(0, 1)


def test_an_emulation_keeps_fp32_around_it_and_stores_no_fp8():
    record = resolved("fp8_tensorwise", emulate=True)
    assert record.params_dtype == "fp32" and record.fp8 and not record.hardware_fp8 and not record.fp8_param_gather
    assert resolved("fp8_tensorwise", emulate=True, params_dtype="bf16").params_dtype == "bf16"
    assert resolved("fp8_tensorwise").linear_weight_bytes == 1 and record.linear_weight_bytes == 4


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("text", ["precision: bf16", "precision: {dtype: bf16}", "precision: {preset: bf16}"])
def test_a_file_may_say_it_shortly_or_as_older_versions_did(tmp_path, text):
    config = load_yaml(tmp_path, text + "\nobjective: {tail_factor: .inf}\noptimizer: {lr: 1e-5}", *MOCK)
    assert config.precision == PrecisionConfig(preset="bf16")
    assert config.objective.tail_factor == float("inf") and config.optimizer.lr == 1e-5
    assert load_yaml(tmp_path, text, *MOCK, "--precision=fp32").precision.preset == "fp32"


@pytest.mark.parametrize("option", ["--precision=bf16", "--precision.dtype=bf16", "--precision.preset=bf16"])
def test_so_may_the_command_line(option):
    assert load_config([*MOCK, option])[0].precision.preset == "bf16"
    assert load_config([*MOCK, *option.split("=")])[0].precision.preset == "bf16"


def test_configurations_of_older_checkpoints_are_read():
    tree = dataclasses.asdict(RunConfig())
    tree["precision"] = {"dtype": "bf16"}
    assert config_from_tree(tree) == RunConfig(precision=PrecisionConfig(preset="bf16"))


def test_resuming_an_older_checkpoint_sees_no_change_of_precision():
    from card_megatron.checkpoint.manifest import Manifest
    from card_megatron.checkpoint.resume import changes

    ours = dataclasses.asdict(RunConfig(precision=PrecisionConfig(preset="bf16")))
    theirs = dict(ours, precision={"dtype": "bf16"})
    older = Manifest(step=1, consumed_samples=1, parameters=1, layout={}, config=theirs, versions={})
    assert changes(ours, older) == []
    older.config["precision"] = {"dtype": "fp32"}
    assert changes(ours, older) == ["precision.preset: 'fp32' -> 'bf16'"]
