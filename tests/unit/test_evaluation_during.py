"""Tasks that a run evaluates on its own ranks: the checkpoint's scores, and a run that does not notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from card_megatron.checkpoint import folder
from card_megatron.commands import train as train_command
from card_megatron.config.errors import CheckpointError, ConfigError
from card_megatron.evaluation.during import DuringTraining
from card_megatron.evaluation.runs import read_run
from card_megatron.platform import Ranks
from card_megatron.training.run import train_run
from card_megatron.training.tasks import has_record
from tests.checkpoints import TINY, steps_in, steps_of
from tests.curves import tiny_config
from tests.evaluation import records, scores_of, write_documents

DROPOUT = "--model.hidden_dropout=0.1"
EVERY_3 = "--eval.tasks_interval=3"


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    return write_documents(tmp_path_factory.mktemp("documents"))


def options(documents: Path, *more: str) -> list[str]:
    return [*TINY, EVERY_3, "--eval.tasks=[hellaswag]", f"--eval.tasks_data={documents}", *more]


def run(corpus: Path, run_dir: Path, *overrides: str, console: bool = False) -> None:
    config = tiny_config(corpus, run_dir, *overrides)
    score = DuringTraining(config) if config.eval.tasks else None
    train_run(config, Ranks(), console=console, score_tasks=score)


def test_the_scores_are_the_checkpoint_s_and_the_run_does_not_notice(corpus, documents, tmp_path):
    run(corpus, tmp_path / "with", *options(documents, DROPOUT))
    run(corpus, tmp_path / "without", *TINY, DROPOUT)
    losses = [[record["loss"] for record in records(tmp_path / name, "loss")] for name in ("with", "without")]
    assert losses[0] == losses[1] and len(losses[0]) == 6  # the harness seeds all generators; dropout draws from them
    found = records(tmp_path / "with", "tasks")
    assert [record["step"] for record in found] == [3, 6] == sorted(steps_of(tmp_path / "with"))
    assert found[0]["tasks"] == scores_of(folder.final_path(tmp_path / "with", 3), documents)
    assert "task_bounds" not in found[0], "its likelihoods are exact"
    acc = found[0]["tasks"]["hellaswag"]["acc"]
    assert 0 <= acc["value"] <= 1 and acc["stderr"] > 0
    assert read_run(tmp_path / "with").series["tasks/hellaswag/acc"].keys() == {3, 6}


def test_a_model_that_has_a_bound_alone_is_scored_by_it_and_says_so(corpus, documents, tmp_path, capsys):
    bd3lm = options(documents, "--objective.name=bd3lm", "--objective.block_size=8")
    run(corpus, tmp_path / "run", *bd3lm, console=True)
    found = records(tmp_path / "run", "tasks")
    assert [record["step"] for record in found] == [3, 6]
    assert found[1]["tasks"] == scores_of(folder.final_path(tmp_path / "run", 6), documents)
    for record in found:
        assert record["task_bounds"]["mc_samples"] == 32 and record["task_bounds"]["mean_loglikelihood_error"] > 0
    assert "task hellaswag after step 6: acc " in (said := capsys.readouterr().out)
    assert f"by bounds of 32 samples, ± {found[1]['task_bounds']['mean_loglikelihood_error']:.3g} nats each" in said
    assert read_run(tmp_path / "run").series["task_bounds/mc_samples"] == {3: 32, 6: 32}


def test_a_run_that_ended_before_its_evaluation_has_it_still_before_it(corpus, documents, tmp_path):
    run_dir = tmp_path / "run"
    scored = []

    def score(checkpoint: Path, beat: Callable[[], None]) -> dict[str, Any]:
        scored.append(checkpoint.name)
        return {"tasks": {"a": {"acc": {"value": 0.5, "stderr": None}}}}

    def start() -> None:
        train_run(tiny_config(corpus, run_dir, *options(documents)), Ranks(), console=False, score_tasks=score)

    start()
    lines = [line for line in (run_dir / "metrics.jsonl").read_text().splitlines() if '"step": 6, "tasks"' not in line]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert not has_record(run_dir / "metrics.jsonl", 6)
    start()
    start()  # nothing is left to do
    assert scored == ["step_000003", "step_000006", "step_000006"]
    assert [record["step"] for record in records(run_dir, "tasks")] == [3, 6]


def test_a_failure_of_the_evaluation_is_not_one_of_the_run(corpus, documents, tmp_path, capsys):
    def fail(checkpoint, beat):
        raise CheckpointError("a flipped byte")

    config = tiny_config(corpus, tmp_path / "run", *options(documents))
    train_run(config, Ranks(), score_tasks=fail)
    assert "tasks could not be evaluated after step 3: rank 0: a flipped byte; going on" in capsys.readouterr().out
    assert steps_in(tmp_path / "run", "finished") == [6]
    assert not records(tmp_path / "run", "tasks")


# ---------------------------------------------------------------- what is refused


def test_an_unknown_task_is_refused_before_training(corpus, documents, tmp_path):
    given = [*options(documents), "--eval.tasks=[hellaswg]", f"--run_dir={tmp_path / 'run'}"]
    given += [f"--data.train=[{corpus}/first]", f"--data.tokenizer={corpus}/tokenizer.model"]
    with pytest.raises(ConfigError, match=r"unknown task 'hellaswg'; did you mean hellaswag"):
        train_command.run(given)


def test_tasks_without_somebody_to_score_them_are_refused(corpus, documents, tmp_path):
    with pytest.raises(ConfigError, match="needs score_tasks"):
        train_run(tiny_config(corpus, tmp_path / "run", *options(documents)), Ranks())
