"""`card eval` and the harness's own `lm_eval`, as a user starts them: killed, resumed, refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from card_megatron.cli import main
from card_megatron.evaluation.runner import metrics_of, scores_path
from card_megatron.evaluation.tasks import FOLDER
from tests.scoring import sentence, trained_model, write_lines, write_tasks

CARD = [sys.executable, "-m", "card_megatron", "eval"]
CLOCK = ("seconds", "resumed", "requests_per_rank", "tokens_forwarded_per_rank")
"""What an interrupted evaluation reports otherwise than one that ran through."""


@pytest.fixture(scope="module")
def models(corpus, tmp_path_factory) -> tuple[Path, Path]:
    return trained_model(corpus, tmp_path_factory.mktemp("evaluation"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    import random

    rng, folder = random.Random(0), tmp_path_factory.mktemp("data")
    rows = [
        {"question": sentence(rng, 6), "choices": [sentence(rng, 3) for _ in range(4)], "gold": rng.randrange(4)}
        for _ in range(30)
    ]
    write_lines(folder / "arc/ARC-Easy-test.jsonl", rows)
    return folder


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def refusal(*arguments: object) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["eval", *map(str, arguments)])
    assert isinstance(caught.value.code, str)
    return caught.value.code


def test_a_killed_evaluation_goes_on_and_gives_the_same(models, data, tmp_path):
    """Killed by SIGKILL as soon as some of its scores are on disk."""
    options = [str(models[1]), "--tasks", "arc_easy", "--data", str(data), "--num-fewshot=1", "--batch-tokens=48"]
    output = tmp_path / "killed.json"
    process = subprocess.Popen(
        [*CARD, *options, "--output", str(output)],
        **dict(env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True),
    )
    deadline = time.monotonic() + 120
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if scores_path(output).is_file() and len(scores_path(output).read_bytes().splitlines()) > 10:
                process.send_signal(signal.SIGSTOP)  # it is fast: no more than this
                break
            time.sleep(0.002)
    finally:
        process.kill()
        errors = process.communicate()[1]
    kept = len(scores_path(output).read_bytes().splitlines()) - 1 if scores_path(output).is_file() else 0
    assert 10 <= kept < 120 and not output.exists(), errors
    main(["eval", *options, "--output", str(output)])
    main(["eval", *options, "--output", str(tmp_path / "straight.json")])
    again, straight = (json.loads(path.read_text()) for path in (output, tmp_path / "straight.json"))
    assert again["resumed"] >= kept - 1 and straight["resumed"] == 0
    assert again["requests_per_rank"][0] + again["resumed"] == straight["requests_per_rank"][0] == 120
    assert {**again, **dict.fromkeys(CLOCK)} == {**straight, **dict.fromkeys(CLOCK)}
    assert not scores_path(output).exists() and "| arc_easy | acc " in output.with_suffix(".md").read_text()
    assert straight["versions"]["lm_eval"] and straight["checkpoint"] == str(models[1])


def test_results_say_where_they_come_from(models, data, tmp_path, capsys):
    """A group without one of its files, requests that are too long, a limit."""
    main(["eval", str(models[0]), "--tasks=card_paper", f"--data={data}", "--limit=3", f"--output={tmp_path}/a/r.json"])
    shown, found = capsys.readouterr().out, json.loads((tmp_path / "a/r.json").read_text())
    assert found["documents"] == {"arc_easy": 3} and found["shots"] == {"arc_easy": 25}
    assert "sciq" in found["no_local_data"] and "no local data" in shown and "sciq/test.jsonl" in shown
    assert found["truncated"] == found["requests"] == 12 and "lost their beginning" in shown
    assert found["objective"] == "card" and found["likelihood"] == "exact" and found["mc_samples"] is None


def test_the_harness_own_command_knows_card(models, tmp_path):
    """The unmodified command, which a task's file tells of the model."""
    command = shutil.which("lm_eval", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert command is not None
    tasks = ",".join([str(FOLDER / "card_model.yaml"), *write_tasks(tmp_path)])
    ended = subprocess.run(
        [
            *(command, "--model=card", f"--model_args=checkpoint={models[0]}", f"--tasks={tasks}"),
            *("--limit=2", "--output_path=results", "--log_samples"),
        ],
        **dict(env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=180),
    )
    assert ended.returncode == 0, ended.stderr
    for name in ("tiny_choice", "tiny_rolling", "tiny_generate", "word_perplexity", "exact_match"):
        assert name in ended.stdout
    (results,) = tmp_path.glob("results/**/results_*.json")
    assert json.loads(results.read_text())["config"]["objective"] == "card"


def test_our_own_start_of_the_harness_knows_its_models_too(capsys, monkeypatch):
    from lm_eval.api.registry import get_model
    from lm_eval.models.huggingface import HFLM

    from card_megatron.evaluation.harness import CardLM

    monkeypatch.setattr(sys, "argv", ["card"])
    with pytest.raises(SystemExit) as ended:
        main(["eval", "lm_eval", "run", "--help"])
    assert not ended.value.code and "--model_args" in capsys.readouterr().out
    assert sys.argv[-2:] == ["--include_path", str(FOLDER)]
    assert get_model("card") is CardLM and get_model("hf") is HFLM


def test_a_users_error_is_one_message(models, data, corpus, tmp_path):
    exported = models[1]
    local = ["--tasks=arc_easy", f"--data={data}"]
    assert "unknown task 'arc_esy'; did you mean arc_easy" in refusal(exported, "--tasks=arc_esy", f"--data={data}")
    missing = refusal(exported, "--tasks=piqa", f"--data={data}")
    assert "task piqa" in missing and "piqa/validation_with_labels.jsonl is not there" in missing
    assert "no task is given" in refusal(exported, "--tasks=,", f"--data={data}")
    assert "max_length=1000 must lie in 1 .. 96" in refusal(exported, *local, "--max-length=1000")
    assert "leave out --ema and the tensor" in refusal(exported, *local, "--tensor=2")
    assert "'temperature' is not NAME=VALUE" in refusal(exported, *local, "--gen-kwargs=temperature")
    (tmp_path / "file").write_text("")
    assert "choose another --output" in refusal(exported, *local, f"--output={tmp_path}/file/out.json")


def test_a_tokenizer_of_another_vocabulary_is_refused(models, data, tmp_path):
    from card_megatron.data.python_docs import python_documents
    from card_megatron.data.tokenizer_training import train_sentencepiece

    train_sentencepiece([text[:600] for text in python_documents()[:240]], tmp_path / "big.model", vocab_size=600)
    for model in models:
        said = refusal(model, "--tasks=arc_easy", f"--data={data}", f"--tokenizer={tmp_path / 'big.model'}")
        assert "has 600 pieces and the model 500 rows" in said


def test_without_the_hub_the_error_names_the_way_out(models, monkeypatch):
    import datasets

    def offline(*args, **kwargs):
        raise ConnectionError("the hub cannot be reached")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    said = refusal(models[1], "--tasks=arc_easy")
    assert "arc_easy: the data could not be loaded (ConnectionError" in said and "--data DIR reads local files" in said


def test_metrics_are_named_by_their_filter():
    found = metrics_of(
        {"alias": "x", "acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 1.0, "em_stderr,strict": "N/A"}
    )
    assert found == {"acc": {"value": 0.5, "stderr": 0.1}, "em (strict)": {"value": 1.0, "stderr": None}}
