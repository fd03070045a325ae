"""The watcher: each checkpoint once, whatever the run does meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from card_megatron.checkpoint import folder
from card_megatron.checkpoint.manifest import MANIFEST
from card_megatron.commands import eval_perplexity, eval_watch
from card_megatron.config.errors import CheckpointError, ConfigError
from card_megatron.evaluation.watch import Watcher
from card_megatron.testing import run_distributed


def save(run_dir: Path, step: int) -> Path:
    """What a finished save looks like from outside."""
    checkpoint = folder.final_path(run_dir, step)
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST).write_text(f'{{"step": {step}}}')
    (checkpoint / "weights").write_text(f"weights of {step}")
    return checkpoint


def finish(run_dir: Path, steps: int) -> None:
    (run_dir / "summary.json").write_text(json.dumps({"steps": steps}))


class Reader:
    """An evaluation that reads the weights; `meanwhile` happens before it does."""

    def __init__(self, meanwhile=lambda checkpoint: None):
        self.meanwhile, self.read, self.said = meanwhile, [], []

    def __call__(self, held, name, unfinished):
        self.meanwhile(name)
        self.read.append((held / "weights").read_text())
        return {"tasks": {"checkpoint": str(name)}}


def watcher(run_dir: Path, reader: Reader) -> Watcher:
    return Watcher(run_dir, reader, reader.said.append)


def test_each_checkpoint_is_evaluated_once_as_it_appears(tmp_path):
    save(tmp_path, 20)
    save(tmp_path, 10)
    later = iter([lambda: save(tmp_path, 30), lambda: None, lambda: save(tmp_path, 40), lambda: finish(tmp_path, 40)])
    waited, reader = [], Reader()

    def sleep(seconds):
        waited.append(seconds)
        next(later)()

    watching = watcher(tmp_path, reader)
    assert watching.watch(interval=5, until_finished=True, sleep=sleep) == 4
    assert reader.read == [f"weights of {step}" for step in (10, 20, 30, 40)]
    assert waited == [5] * 4
    content = json.loads((tmp_path / "evaluations" / "step_000030.json").read_text())
    name = str(folder.final_path(tmp_path, 30))
    assert (content["kind"], content["step"], content["checkpoint"]) == ("checkpoint", 30, name)
    watching.close()
    assert watcher(tmp_path, reader).watch(once=True) == 0  # another one has nothing left to do
    assert {path.name for path in (tmp_path / "evaluations").iterdir()} == {
        *(f"step_0000{step}.json" for step in (10, 20, 30, 40)),
        "lock",
    }


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_read_to_its_end(tmp_path):
    save(tmp_path, 10)
    reader = Reader(meanwhile=lambda name: folder.discard([name]))
    assert watcher(tmp_path, reader).watch(once=True) == 1
    assert reader.read == ["weights of 10"] and not folder.visible(tmp_path)
    assert not (tmp_path / "evaluations" / "held").exists()  # the disk has its space back


def test_a_checkpoint_that_is_gone_before_its_turn_is_named(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    reader = Reader()
    watching = watcher(tmp_path, reader)
    hold = watching.hold

    def too_late(checkpoint):
        if folder.step_of(checkpoint) == 10:
            folder.discard([checkpoint])
        return hold(checkpoint)

    watching.hold = too_late
    assert watching.watch(once=True) == 1
    assert reader.said[0] == "step 10 was deleted before it could be read; going on"
    assert reader.read == ["weights of 20"]


def test_without_links_a_deletion_is_survived_too(tmp_path, monkeypatch):
    def no_links(source, target):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", no_links)
    save(tmp_path, 10)
    save(tmp_path, 20)
    reader = Reader(meanwhile=lambda name: folder.discard([name]) if name.name == "step_000010" else None)
    assert watcher(tmp_path, reader).watch(once=True) == 1
    assert reader.said[0] == "step 10 was deleted while it was read; going on"
    assert reader.read == ["weights of 20"]


def test_a_damaged_checkpoint_is_named_and_not_tried_for_ever(tmp_path):
    save(tmp_path, 10)

    def refuse(name):
        raise CheckpointError("a flipped byte")

    reader = Reader(meanwhile=refuse)
    finish(tmp_path, 10)
    assert watcher(tmp_path, reader).watch(until_finished=True) == 0
    assert reader.said == ["step 10 cannot be evaluated: a flipped byte; going on"]


def test_the_summary_of_a_run_that_was_extended_is_not_its_end(tmp_path):
    watching = watcher(tmp_path, Reader())
    assert not watching.finished()
    finish(tmp_path, 10)
    save(tmp_path, 10)
    assert watching.finished()
    save(tmp_path, 20)
    assert not watching.finished()


def test_two_watchers_of_one_run_are_one_too_many(tmp_path):
    first, second = watcher(tmp_path, Reader()), watcher(tmp_path, Reader())
    first.watch(once=True)
    with pytest.raises(ConfigError, match="is watched already"):
        second.watch(once=True)
    first.close()
    assert second.watch(once=True) == 0


# ---------------------------------------------------------------- real checkpoints


@pytest.fixture
def trained(straight, tmp_path) -> Path:
    return Path(shutil.copytree(straight, tmp_path / "run"))


@pytest.fixture
def texts(tmp_path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "Return the name of the file."}\n{"text": "def main(): pass"}\n')
    return path


def test_a_real_run_is_evaluated_to_its_end(trained, texts, tmp_path, capsys):
    eval_watch.run([str(trained), "--until-finished", "--interval=1", "--perplexity", f"docs={texts}", "--stride=8"])
    assert "3 checkpoints evaluated" in capsys.readouterr().out
    found = [json.loads(path.read_text()) for path in sorted((trained / "evaluations").glob("step_*.json"))]
    assert [one["step"] for one in found] == [2, 4, 6]
    output = tmp_path / "by_hand.json"
    checkpoint = folder.final_path(trained, 4)
    eval_perplexity.run([str(checkpoint), f"--data=docs={texts}", "--stride=8", f"--output={output}"])
    (by_hand,) = json.loads(output.read_text())["results"]
    (watched,) = found[1]["perplexity"]["results"]
    assert watched["nll"] == by_hand["nll"] and watched["model_path"] == by_hand["model_path"] == str(checkpoint)
    assert found[0]["perplexity"]["results"][0]["nll"] != watched["nll"]


def watch_on_a_rank(*arguments: str) -> None:
    eval_watch.run(arguments)


def test_ranks_watch_together(trained, texts):
    arguments = (str(trained), "--once", "--perplexity", f"docs={texts}", "--tensor=2")
    run_distributed(watch_on_a_rank, 2, *arguments, timeout=120)
    together = json.loads((trained / "evaluations" / "step_000006.json").read_text())
    shutil.rmtree(trained / "evaluations")
    eval_watch.run([str(trained), "--once", "--perplexity", f"docs={texts}"])
    alone = json.loads((trained / "evaluations" / "step_000006.json").read_text())
    nlls = [one["perplexity"]["results"][0]["nll"] for one in (together, alone)]
    assert nlls[0] == pytest.approx(nlls[1], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["."], "nothing to evaluate"),
        (["nowhere", "--tasks=arc_easy"], "nowhere is not there"),
        ([".", "--perplexity", "a=nowhere.txt"], "no such file"),
    ],
)
def test_bad_options_are_refused(options, fault):
    with pytest.raises(ConfigError, match=fault):
        eval_watch.run(options)


def test_an_interval_is_a_time(capsys):
    with pytest.raises(SystemExit):
        eval_watch.run([".", "--tasks=arc_easy", "--interval=0"])
    assert "'0' is not a number of seconds above 0" in capsys.readouterr().err
