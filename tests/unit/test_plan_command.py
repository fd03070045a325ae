"""`card plan`: what it prints, what it refuses, and what it does to a user's file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from card_megatron.cli import main
from card_megatron.commands.config import ELSEWHERE
from card_megatron.commands.plan import run
from card_megatron.config import ConfigError, load_config
from card_megatron.planning.gpus import GPUS
from card_megatron.planning.write import edited, replace_file

EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"
H100 = [f"card_{size}_h100_{precision}" for size in ("1b", "7b") for precision in ("bf16", "fp8")]

USERS_FILE = """\
# my run
preset: 1b  # the paper's
run_dir: runs/mine
train: {micro_batch_size: 64, global_batch_size: 512}  # far too large

parallel:
    # tried on Tuesday
    tensor_model_parallel_size: 4   # four
    sequence_parallel: true
data: {mock: true}
"""


def plan(capsys, *arguments: str) -> str:
    run(list(arguments))
    return capsys.readouterr().out


@pytest.mark.parametrize("name", H100)
def test_an_h100_example_has_the_layout_that_is_planned_for_64_gpus_and_passes_the_checks(name, capsys, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parents[1])
    path = f"examples/configs/{name}.yaml"
    printed = plan(capsys, "--config", path, "--gpus", "64", "--top", "1", "--json")
    best = json.loads(printed)["layouts"][0]
    config, _ = load_config([f"--config={path}"])
    assert best["fits"]
    assert best["micro_batch_size"] == config.train.micro_batch_size
    for field in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        assert best[field] == getattr(config.parallel, field)
    main(["config", "--config", path, "--nproc", "64", "--gpu", "h100-80gb"])
    printed = capsys.readouterr().out
    assert "# ranks: 64 = tensor 1" in printed
    assert "kernels: linear: TE" in printed
    assert "# checked for NVIDIA H100 80GB HBM3 with Transformer Engine, which is not this machine" in printed


def test_config_checks_fp8_for_the_gpu_that_is_named_and_refuses_it_elsewhere():
    arguments = ["config", "--config", str(EXAMPLES / "card_1b_h100_fp8.yaml"), "--nproc", "64"]
    with pytest.raises(SystemExit, match="needs CUDA and Transformer Engine"):
        main(arguments)
    with pytest.raises(SystemExit, match="fp8_tensorwise"):
        main([*arguments, "--gpu", "a100-80gb"])
    assert set(ELSEWHERE) == set(GPUS)


def test_a_preset_alone_can_be_planned_and_every_number_is_there(capsys):
    printed = plan(capsys, "--preset", "1b", "--gpus", "8", "--top", "3")
    for words in (
        "1,011,847,680 parameters",
        "6.69 GFLOPs",
        "300,000,",
        "tokens/s/GPU",
        "GPU-hours",
        "MFU",
        "legal layouts",
    ):
        assert words in printed
    for item in ("weights", "gradients", "optimizer", "average", "activations", "logits", "workspace", "KV cache 0.0"):
        assert item in printed
    assert "with recompute: none" in printed and "selective" in printed and "full" in printed
    assert "advice: precision.preset=fp8_tensorwise" in printed
    assert [line.split()[0] for line in printed.split("GPU-hours\n")[1].split("\n\n")[0].splitlines()] == [
        "1",
        "2",
        "3",
    ]


def test_json_hours_follow_from_tokens_and_speed(capsys):
    told = json.loads(plan(capsys, "--preset=1b", "--gpus=16", "--json", "--top=5", "--gpus-per-node=4"))
    assert len(told["layouts"]) == 5 and told["gpus_per_node"] == 4
    for layout in told["layouts"]:
        seconds = told["tokens"] / (layout["tokens_per_second_per_gpu"] * told["gpus"])
        assert layout["hours"] == pytest.approx(seconds / 3600)
        assert layout["gpu_hours"] == pytest.approx(16 * layout["hours"])
        assert layout["bytes"]["total"] == pytest.approx(sum(layout["bytes"].values()) / 2)
        assert set(layout["bytes_by_recompute"]) == {"none", "selective", "full"}


@pytest.mark.parametrize("gpus", [8, 64, 512])
def test_docs_scaling_quotes_what_is_printed(gpus, capsys, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parents[1])
    config = "examples/configs/card_1b_h100_bf16.yaml"
    printed = plan(capsys, "--config", config, "--gpus", str(gpus), "--top", "5")
    assert printed in Path("docs/scaling.md").read_text()


def test_calibration_lists_every_held_out_error(capsys):
    printed = plan(capsys, "--calibration")
    assert "23 held out: mean error 4.2%, largest 11.3%" in printed
    assert printed.count("https://github.com/") == 6
    assert printed[printed.index("held out  ") :] in (EXAMPLES.parents[1] / "docs" / "scaling.md").read_text()


def test_goodput_marks_the_best_and_the_configured_interval(capsys):
    printed = plan(
        capsys, "--preset=1b", "--gpus=512", "--goodput", "--checkpoint.interval_minutes=30", "--save-seconds=20"
    )
    assert "a failure every 99.0 hours" in printed
    assert next(line for line in printed.splitlines() if line.endswith("configured")).split()[0] == "30.0"
    assert "best" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset=1b"], "--gpus is missing"),
        (["--preset=1b", "--gpus=0"], "give 1 or more"),
        (["--preset=1b", "--gpus=8", "--write"], "--write needs one --config"),
        (["--gpus=8", "--train.train_iters=5"], "model.vocab_size is not known"),
        (["--preset=1b", "--gpus=8", "--model.num_moe_experts=8"], "dense models only"),
        (["--preset=1b", "--gpus=8", "--objective.name=bd3lm"], "objective.name=bd3lm: card plan counts one causal"),
        (
            ["--preset=1b", "--gpus=8", "--gpu=a100-80gb", "--precision.preset=fp8_tensorwise"],
            "does not run on a100-80gb",
        ),
        (["--preset=1b", "--gpus=8", "--precision.preset=mxfp8"], "Blackwell"),
        (["--preset=1b", "--gpus=8", "--model.num_attention_heads=7"], "not a multiple"),
        (["--preset=1b", "--gpus=8", "--gpu=v100"], "h100-80gb"),
        (["--preset=1b", "--gpus=8", "--goodput", "--save-seconds=-1"], "not a positive number"),
        (["--preset=1b", "--gpus=8", "--top=0"], "is not a whole number; give 1 or more"),
        (["--preset=1b", "--gpus=8", "--parallel.tensor_model_parallel_size=0"], "size=0 must be at least 1"),
        (["--preset=1b", "--gpus=8", "--train.micro_batch_size=0"], "micro_batch_size=0 must be at least 1"),
        (["--preset=1b", "--gpus=8", "--parallel.expert_model_parallel_size=2"], "=2 shares experts.*leave it out"),
        (
            ["--preset=1b", "--gpus=8", "--precision=fp8_tensorwise", "--precision.emulate=true"],
            "plan with precision.emulate=false",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_rule(arguments, message):
    with pytest.raises(ConfigError, match=message):
        run(arguments)


def test_the_best_layout_is_written_and_all_else_stays(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(USERS_FILE)
    path.chmod(0o640)
    printed = plan(capsys, "--config", str(path), "--gpus", "64", "--write")
    text = path.read_text()
    assert "train.micro_batch_size=8" in printed
    assert text == USERS_FILE.replace("micro_batch_size: 64", "micro_batch_size: 8").replace(
        "    # tried on Tuesday\n    tensor_model_parallel_size: 4   # four\n    sequence_parallel: true\n",
        "    # tried on Tuesday\n    overlap_param_gather: true\n    overlap_grad_reduce: true\n"
        "    tensor_model_parallel_size: 1   # four\n    sequence_parallel: false\n",
    )
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]
    assert "has this layout already" in plan(capsys, "--config", str(path), "--gpus", "64", "--write")
    assert path.read_text() == text


def test_a_layout_that_the_file_alone_would_not_allow_is_not_written(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(USERS_FILE.replace("512", "510"))
    with pytest.raises(
        ConfigError, match=r"is left as it was: train.global_batch_size=510 .* belong into the file too"
    ):
        run(["--config", str(path), "--gpus", "64", "--train.global_batch_size=512", "--write"])
    assert path.read_text() == USERS_FILE.replace("512", "510")
    assert list(tmp_path.iterdir()) == [path]


def test_a_layout_planned_with_other_options_than_the_files_is_not_written(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(USERS_FILE)
    options = ["--data.sequence_length=1024", "--precision.preset=fp32"]
    with pytest.raises(ConfigError) as caught:
        run(["--config", str(path), "--gpus=8", *options, "--write"])
    for words in ("precision.preset=bf16 there and fp32 in", "data.sequence_length=2048 there and 1024", "belong into"):
        assert words in str(caught.value)
    assert path.read_text() == USERS_FILE


def test_short_forms_dotted_keys_windows_lines_and_an_overlap_that_ends_are_written(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    before = (
        "preset: 1b\nprecision: bf16\ndata.mock: true\ntrain.micro_batch_size: 64 # many\n"
        "parallel: {tensor_model_parallel_size: 2, sequence_parallel: true, tp_comm_overlap: true}\n"
    )
    path.write_text(before, newline="\r\n")
    run(["--config", str(path), "--gpus=8", "--write", "--json"])
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert "parallel.tp_comm_overlap=False" in captured.err and "train.micro_batch_size=" in captured.err
    text = path.read_bytes().decode()
    assert text.count("\n") == text.count("\r\n") == before.count("\n")
    assert "tp_comm_overlap: false" in text and "precision: bf16" in text and " # many" in text
    assert "train.micro_batch_size: 64" not in text


def test_rows_that_make_fp8s_tokens_whole_are_planned(capsys):
    options = ["--preset=1b", "--gpus=8", "--precision=fp8_tensorwise", "--data.sequence_length=2044", "--top=1"]
    assert json.loads(plan(capsys, *options, "--json"))["layouts"][0]["micro_batch_size"] % 2 == 0


def test_a_pipeline_stage_without_layers_is_judged(capsys):
    layout = ["--parallel.pipeline_model_parallel_size=2", "--parallel.pipeline_model_parallel_layout=E|t*33L"]
    assert "as configured: " in plan(capsys, "--preset=1b", "--gpus=8", "--top=1", *layout)
    recompute = ["--model.recompute_granularity=full", "--model.recompute_method=uniform"]
    plan(capsys, "--preset=1b", "--gpus=8", "--top=1", *layout, *recompute, "--model.recompute_num_layers=1")


@pytest.mark.parametrize("hours", [12, 0.01])
def test_goodput_of_machines_that_fail_all_the_time_ends(hours, capsys):
    printed = plan(capsys, "--preset=1b", "--gpus=512", "--goodput", f"--gpu-mtbf-hours={hours}")
    assert "240.0        no progress: under 2%" in printed


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    path.write_text("old")
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError):
            replace_file(link, "new")
    assert path.read_text() == "old"
    replace_file(link, "new")
    assert path.read_text() == "new" and link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, path]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("seed: 1", "seed: 1\ntrain:\n  micro_batch_size: 2\n"),
        (
            "train:\n  # why\n  global_batch_size: 8 # so\n",
            "train:\n  # why\n  micro_batch_size: 2\n  global_batch_size: 8 # so\n",
        ),
        ("train: {global_batch_size: 8}\n", "train: {global_batch_size: 8, micro_batch_size: 2}\n"),
        ("train.micro_batch_size: 8 # so\r\n", "train.micro_batch_size: 2 # so\r\n"),
        ("train:\r\n  seed: 8\r\n", "train:\r\n  micro_batch_size: 2\r\n  seed: 8\r\n"),
        ("train:\n  micro_batch_size: null  # none\nseed: 1\n", "train:\n  micro_batch_size: 2  # none\nseed: 1\n"),
    ],
)
def test_a_value_changes_where_it_stands_or_joins_its_section(before, after):
    assert edited(before, {"train.micro_batch_size": 2}) == after


@pytest.mark.parametrize("text", ['{"seed": 1}', "train: {global_batch_size: 8,}\n"])
def test_a_file_in_braces_that_has_no_place_is_refused(text):
    with pytest.raises(ConfigError, match="write the section in block style"):
        edited(text, {"train.micro_batch_size": 2})
