"""`card`: help that is complete, errors that a user can read, and the same run however it is started."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import yaml

from card_megatron.cli import COMMANDS, main
from card_megatron.config import ConfigError, RunConfig, load_config
from card_megatron.config.document import field_docs
from card_megatron.config.keys import leaf_types
from card_megatron.version import __version__

CARD = [sys.executable, "-m", "card_megatron"]
MOCK = ["--data.mock=true", "--model.vocab_size=200", "--train.train_iters=4"]
SUBCOMMANDS = [
    *(["data", name] for name in ("python-docs", "tokenizer", "build", "inspect", "sample", "epochs")),
    *(["data", name] for name in ("merge", "split", "shuffle")),
    *(["data", "tokenizer", name] for name in ("train", "add-mask")),
    *(["checkpoint", name] for name in ("list", "inspect", "verify")),
    *(["convert", name] for name in ("to-hf", "from-hf")),
    *(["eval", name] for name in ("perplexity",)),
]
TIME_LIMIT = 120


def card(*arguments: str, command: list[str] = CARD, folder: Path | None = None) -> subprocess.CompletedProcess:
    """Run to its end in a session of its own, all of which is killed when the time is up."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *arguments],
        **dict(cwd=folder, env=environment, text=True, start_new_session=True),
        **dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE),
    )
    try:
        stdout, stderr = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"{arguments} still ran after {TIME_LIMIT} s\n{stdout}\n{stderr}") from None
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def printed(capsys, *arguments: str) -> str:
    """What a command that ends well prints."""
    try:
        importlib.import_module(COMMANDS[arguments[0]][0]).run(arguments[1:])
    except SystemExit as end:
        assert not end.code
    return capsys.readouterr().out


def squeezed(text: str) -> str:
    return "".join(text.split())


# ---------------------------------------------------------------- help


def test_help_lists_every_command(capsys):
    for arguments in ([], ["--help"], ["-h"], ["help"]):
        main(arguments)
        shown = capsys.readouterr().out
        assert all(name in shown and about in shown for name, (_, about) in COMMANDS.items())
    main(["--version"])
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("command", [*([name] for name in COMMANDS), *SUBCOMMANDS], ids=" ".join)
def test_every_command_has_help(capsys, command):
    shown = printed(capsys, *command, "--help")
    assert shown.startswith(f"usage: card {' '.join(command)} ") and "--help" in shown


@pytest.mark.parametrize("command", ["train", "config"])
def test_help_has_every_field_with_its_docstring(capsys, command):
    shown = squeezed(printed(capsys, command, "--help"))
    for key in leaf_types():
        section, _, name = key.rpartition(".")
        kind = typing.get_type_hints(RunConfig)[section] if section else RunConfig
        assert f"--{key}" in shown and squeezed(field_docs(kind)[name]) in shown, key
    assert "--nproc" in shown


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "card: unknown command 'trian'; choose from train, config"),
        (["config", "--train.global_batchsize=4"], "did you mean train.global_batch_size?"),
        (["config", "--nprco=2"], "unknown config key nprco; did you mean nproc?"),
        (["config", "--nproc=0"], "--nproc: '0' is not a number of ranks; give 1 or more"),
        (["config", "--nproc=x"], "--nproc: 'x' is not a number of ranks; give 1 or more"),
        (["config", *MOCK, "--nproc=3"], "=32 is not a multiple of micro_batch_size*dp=12; try 24 or 36"),
        (["config", "--train.train_iters=4"], "data.train is empty; give prefixes"),
        (["data", "build", "nowhere.txt", "--output=x", "--tokenizer=nowhere"], "tokenizer nowhere: no such file"),
        (["data", "tokenizer", "train", "nowhere.txt", "--output=x"], "nowhere.txt: no such file"),
        (["data", "python-docs", __file__], "File exists"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_users_error_is_one_message(arguments, expected):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, str) and expected in caught.value.code


@pytest.mark.parametrize(
    "arguments", [["data"], ["data", "nothing"], ["data", "build"], ["data", "build", "x", "--outptu=y"]]
)
def test_data_shows_its_usage_on_a_wrong_command_line(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: card data")


def test_a_run_dir_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file is no folder that can be written to; choose another run_dir"):
        importlib.import_module("card_megatron.commands.train").run([*MOCK, f"--run_dir={tmp_path}/file/run"])


def test_errors_go_to_stderr_without_a_traceback(tmp_path):
    ended = card("train", *MOCK, "--nproc=2", "--parallel.tensor_model_parallel_size=4", folder=tmp_path)
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr.splitlines()[-1].startswith("card train: 2 ranks cannot hold replicas of tensor 4")
    assert "Traceback" not in ended.stderr
    assert not list(tmp_path.iterdir()), "a refused run must leave nothing behind"


# ---------------------------------------------------------------- card config


def test_config_prints_yaml_that_reads_back_and_the_numbers_that_follow(capsys, tmp_path):
    options = [*MOCK, "--objective.tail_factor=inf", "--data.sequence_length=64"]
    shown = printed(capsys, "config", *options, "--nproc=2")
    assert yaml.safe_load(shown)["objective"]["tail_factor"] == float("inf")
    (tmp_path / "run.yaml").write_text(shown)
    assert load_config([f"--config={tmp_path}/run.yaml"])[0] == load_config(options)[0]
    assert "# parameters: 885,888" in shown
    assert "# vocabulary: 200, padded to 256" in shown
    assert "# global batch: 32 samples = 4 micro-batches x 4 x 2 data-parallel" in shown
    assert "# tokens per step: 2,048" in shown
    assert "# run: 4 steps, 128 samples, 8,192 tokens" in shown


def test_config_shows_a_clusters_run_on_a_laptop(capsys, monkeypatch):
    """The tokenizer of the paper's model is not here; all else is checked, and its pipeline is shown."""
    monkeypatch.chdir(Path(__file__).parents[2])
    pipeline = ["--parallel.pipeline_model_parallel_size=4", "--train.micro_batch_size=4"]
    shown = printed(capsys, "config", "--config=examples/configs/card_1b.yaml", "--nproc=64", *pipeline)
    assert "# parameters: 1,011,847,680" in shown and "# tokens per step: 1,048,576" in shown
    assert "# pipeline layout: Etttttttt|ttttttttt|tttttttt|ttttttttL" in shown
    assert "# tokenizer: data/tokenizer_50k.model is not here" in shown
    with pytest.raises(ConfigError, match="not a multiple of micro_batch_size"):
        printed(capsys, "config", "--config=examples/configs/card_1b.yaml", "--nproc=48")


# ---------------------------------------------------------------- card train

RUN = [
    *("--model.num_layers=2", "--model.hidden_size=32", "--model.ffn_hidden_size=64", "--data.sequence_length=16"),
    *("--train.global_batch_size=8", "--train.micro_batch_size=2", "--data.num_workers=0", "--run_dir=run"),
    *("--logging.interval=1", "--logging.tensorboard=false", "--eval.at_start=false"),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "card_megatron"]


def losses(folder: Path, command: list[str], *options: str) -> list[float]:
    """The losses of a whole run, as its metrics.jsonl has them."""
    ended = card("train", *MOCK, *RUN, *options, command=command, folder=folder)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("step 4/4") == 1, "one rank speaks"
    return [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_the_same_however_it_is_started(tmp_path):
    one, nproc, torchrun = (tmp_path / name for name in ("one", "nproc", "torchrun"))
    for folder in (one, nproc, torchrun):
        folder.mkdir()
    expected = losses(one, CARD)
    assert len(expected) == 4
    assert losses(nproc, CARD, "--nproc", "2") == pytest.approx(expected, rel=5e-6)
    assert losses(torchrun, TORCHRUN) == pytest.approx(expected, rel=5e-6)
    assert (nproc / "run" / "config.yaml").read_text() == (one / "run" / "config.yaml").read_text()
