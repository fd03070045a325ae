"""Studies: what a file may declare, what is kept of runs, what is refused before hours; and a small one, really run."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from card_megatron.cli import main as card
from card_megatron.commands.study import with_part
from card_megatron.commands.study_checks import check_evaluations
from card_megatron.config.errors import ConfigError
from card_megatron.study import execute
from card_megatron.study import record as recording
from card_megatron.study.definition import StudyRun, config_hash, data_identity
from card_megatron.study.execute import is_done
from card_megatron.study.findings import read_findings
from card_megatron.study.reading import read_study
from card_megatron.study.record import evaluation_path, gradient_cells, is_evaluated, thinned
from card_megatron.study.report import report
from card_megatron.study.stored import read_record
from card_megatron.study.summary import summary
from tests.curves import BASE
from tests.studies import record_of, study_with, write_study

EXAMPLES = Path(__file__).parents[2] / "examples" / "study"
TEXT = "The value of the name is a string, not a list of names. " * 20


# ---------------------------------------------------------------- what a file declares


def test_the_grid_is_whole_seed_by_seed(tmp_path):
    study = read_study(write_study(tmp_path, every={"objective.name": "card", "optimizer.lr": 0.01}, seeds=[3, 1]))
    assert [run.label for run in study.grid()] == ["arm-s3", "card-s3", "arm-s1", "card-s1"]
    assert [run.label for run in study.grid(["card-s1", "arm"])] == ["arm-s3", "arm-s1", "card-s1"]
    arm = study.grid(["arm-s1"])[0].load()
    assert (arm.objective.name, arm.optimizer.lr, arm.seed) == ("arm", 0.01, 1)
    assert study.compared_with == "arm"
    with pytest.raises(ConfigError, match="--only crad is no run"):
        study.grid(["crad"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runz": {}}, "unknown key runz; did you mean runs"),
        ({"title": None}, "has no title"),
        ({"runs": ["arm"]}, "runs must be a mapping"),
        ({"config": "elsewhere.yaml"}, "config=elsewhere.yaml is not beside it"),
        ({"seeds": [1, 1]}, "must be different whole numbers"),
        ({"seeds": [True]}, "must be different whole numbers"),
        ({"every": [1]}, "every must be a mapping of names; it is a list"),
        ({"seeds": 1}, "seeds=1 must be a list"),
        ({"runs": {True: {}}}, "runs: True is no name; YAML reads it as a bool: quote it"),
        ({"runs": {"a": False}}, r"a must be \{section.key: value\}; it is False"),
        ({"runs": {"every": 3}}, r"every must be \{section.key: value\}; it is 3"),
        ({"columns": {"nll": 5}}, "columns: nll: 5 is no metric"),
        ({"curves": {"a b": ["x"]}, "points": {"a_b": ["x", "y"]}}, "'a b' has the file study_a_b.png, and another"),
        ({"evaluate": {"x": "perplexity --data 'a=b"}}, "must begin with .*, and be whole"),
        ({"runs": {"a b": {}}}, "'a b' is no name for a folder"),
        ({"runs": {"a": {"seed": 3}}}, "a gives seed, which the study decides"),
        ({"every": {"run_dir": "x"}}, "every gives run_dir, which the study decides"),
        ({"runs": {"a": 3}}, r"a must be \{section.key: value\}; it is 3"),
        ({"baseline": "b"}, "baseline=b is no run"),
        ({"also_against": ["b"]}, "also_against=b is no run"),
        ({"runs": {"a": {}, "A": {}}}, "A and a are one file where case does not count"),
        ({"runs": {"a": {"objective": {"name": "arm"}}}}, r"write its fields with dots, as objective\.name"),
        ({"seeds": "two"}, r"seeds='two' must be a list, as \[1, 2\]"),
        ({"also_against": ["arm"]}, r"names a run twice, or the baseline arm"),
        ({"points": {"x": ["nll"]}}, r"points: x: \['nll'\] must be a list of two metrics"),
        ({"curves": {"x": "nll"}}, "curves: x: 'nll' must be a list of metrics"),
        ({"evaluate": {"x": "compare a b"}}, "must begin with perplexity, denoising, generation or --tasks"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_study(write_study(tmp_path, **changes))


def test_a_wrong_key_of_a_run_is_named_with_the_run(tmp_path):
    study = read_study(write_study(tmp_path, runs={"card": {"objective.tail_facto": 2}}))
    with pytest.raises(ConfigError, match=r"run card: .*tail_facto.*did you mean objective.tail_factor"):
        study.grid()[0].load()


def test_the_hash_is_of_what_a_run_learns_from(tmp_path):
    def hashed(**given):
        return config_hash(read_study(write_study(tmp_path, runs={"card": given}, seeds=[1])).grid()[0].load())

    same = hashed()
    assert hashed(**{"logging.interval": 3, "checkpoint.interval": 7, "data.num_workers": 0}) == same
    assert hashed(**{"objective.tail_factor": 2.0}) != same
    assert hashed(**{"train.train_iters": 3}) != same
    assert hashed(**{"checkpoint.init_from": "weights"}) != same, "of its section the one that is learned from"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_studies_of_the_repository_are_those_that_their_records_are_of(path):
    if path.stem == "base":
        return
    study = read_study(path)
    findings = read_findings(study)  # refuses records of other configurations
    for name, records in findings.records.items():
        for seed, record in records.items():
            assert (record["run"], record["seed"]) == (name, seed)
    drawn = {name: study.picture_file(name) for name in (*study.curves, *study.points)}
    reports, page = EXAMPLES / "reports", EXAMPLES.parents[1] / "docs" / "study.md"
    again = f"card study report examples/study/{path.name} --into docs/study.md"
    assert (reports / f"{study.name}.md").read_text("utf-8") == report(findings, drawn), again
    assert rounded((reports / f"{study.name}.json").read_text("utf-8")) == rounded(json.dumps(summary(findings))), again
    beside = {name: f"../examples/study/reports/{file}" for name, file in drawn.items()}
    assert with_part(page, study.name, report(findings, beside)) == page.read_text("utf-8"), again


def rounded(text: str) -> Any:
    """Another processor's least squares may end in other digits."""
    return json.loads(text, parse_float=lambda number: round(float(number), 9))


# ---------------------------------------------------------------- records


def test_records_of_something_else_are_refused(tmp_path):
    study = study_with(tmp_path, [record_of("arm", 1, {}, config_hash="h")])
    run = study.grid(["arm-s1"])[0]
    for reader in (lambda: is_done(study, run), lambda: read_findings(study)):
        with pytest.raises(ConfigError, match=r"is of another configuration .h. than"):
            reader()
    path = study.result_path(run)
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"is no whole record of a study's run: .*; restore it"):
        is_done(study, run)


def test_records_that_cannot_stand_side_by_side_are_refused(tmp_path):
    def findings(*records, **changes):
        return read_findings(study_with(tmp_path, [*records], **changes))

    data = {"p": {"documents": 1, "tokens": 2, "tokenizer": "t"}}
    other = {"p": data["p"] | {"tokens": 3}}
    with pytest.raises(ConfigError, match=r"p was .* when arm-s1 was trained, and .* for arm-s2"):
        findings(record_of("arm", 1, {}, data=data), record_of("arm", 2, {}, data=other))
    words = {"d": {"arguments": ["denoising", "--limit", "10"], "cells": []}}
    with pytest.raises(ConfigError, match=r"d was measured by other words \(denoising --limit 10\)"):
        findings(record_of("arm", 1, {}, evaluations=words), evaluate={"d": "denoising --limit 1000"})
    study = study_with(tmp_path, [record_of("arm", 1, {})])
    mine, its = (study.result_path(run) for run in study.grid(["arm-s1", "card-s1"]))
    its.write_text(mine.read_text())
    with pytest.raises(ConfigError, match="is the record of arm-s1, not of card-s1"):
        read_findings(study)


@pytest.mark.parametrize(
    "damage",
    [
        {"cells": {"nll": {"value": "2.0"}}},
        {"cells": {"nll": 2.0}},
        {"curves": {"loss": {"tokens": [1, 2], "epochs": None, "values": [1.0]}}},
        {"tokens": None},
        {"hours": math.nan},
        {"steps": -1},
        {"commit": 3},
        {"cells": {"books ppl": {"value": 0.0}}},
        {"cells": {"nll": {"value": True}}},
        {"cells": {"nll": {"value": 1.0, "bound": 2}}},
        {"curves": {"loss": {"tokens": [1, 2], "epochs": None, "values": [1.0, "2"]}}},
        {"evaluations": {"d": {"arguments": "denoising", "cells": []}}},
        {"evaluations": {"d": {"arguments": [], "cells": ["nowhere"]}}},
    ],
)
def test_a_damaged_record_is_no_traceback(tmp_path, damage):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record_of("arm", 1, {}, config_hash="h") | damage))
    with pytest.raises(ConfigError, match=r"is no whole record of a study's run: .*; restore it"):
        read_record(path)


def test_the_identity_of_data_looks_behind_the_weights_of_a_blend(tmp_path):
    (tmp_path / "a.json").write_text(
        json.dumps({"format": 1, "documents": 1, "tokens": 2, "tokenizer": {"sha256": "0" * 64}})
    )
    given = {"data.train": [f"0.5 {tmp_path}/a"], "data.validation": {}}
    (run,) = read_study(write_study(tmp_path, runs={"card": given}, seeds=[1])).grid()
    assert data_identity(run.load()) == {f"{tmp_path}/a": {"documents": 1, "tokens": 2, "tokenizer": "0" * 16}}


def test_a_study_is_not_continued_on_other_data(tmp_path, monkeypatch):
    study = study_with(tmp_path, [])
    run = study.grid(["arm-s1"])[0]
    data = {"a": {"documents": 1, "tokens": 2, "tokenizer": "t"}}
    done = record_of("arm", 1, {}, config_hash=config_hash(run.load()), data=data)
    study.result_path(run).write_text(json.dumps(done))
    assert is_done(study, run), "data that is not there says nothing"
    monkeypatch.setattr(execute, "data_identity", lambda config: data)
    assert is_done(study, run)
    monkeypatch.setattr(execute, "data_identity", lambda config: {"a": data["a"] | {"tokens": 3}})
    with pytest.raises(ConfigError, match="was trained on other data"):
        is_done(study, run)


def test_an_evaluation_counts_where_it_is_of_these_words_this_run_and_its_last_checkpoint(tmp_path, monkeypatch):
    run = StudyRun("arm", 1, tmp_path, tmp_path / "arm-s1", {})
    words = ["denoising", "--data", "a=b"]
    path = evaluation_path(run, "d", words)
    assert path != evaluation_path(run, "d", [*words, "--depth=2"])
    monkeypatch.setattr(recording, "read_run", lambda path: SimpleNamespace(last_step=4))

    def evaluated(model: str, path: Path = path, words: list[str] = words) -> bool:
        path.parent.mkdir(parents=True, exist_ok=True)
        result = {"set": "x", "nll": [1.0], "nll_stderr": [None], "model_path": str(tmp_path / model)}
        path.write_text(json.dumps({"kind": "denoising", "results": [result]}))
        return is_evaluated(run, path, words)

    assert not is_evaluated(run, path, words)
    assert evaluated("arm-s1/checkpoints/step_000004")
    assert not evaluated("arm-s1/checkpoints/step_000002"), "a run that ended early was evaluated, and went on"
    assert not evaluated("arm-s1/checkpoints/step_000004", words=["perplexity"]), "which may be a part"
    with pytest.raises(ConfigError, match=r"is of .*other, and not of .*arm-s1"):
        evaluated("other/checkpoints/step_000004")


def test_two_evaluations_do_not_share_a_cell(tmp_path, monkeypatch):
    words = {"evaluate": {"short": "denoising --data x=b --window 16", "long": "denoising --data x=b --window 64"}}
    study = read_study(write_study(tmp_path, runs={"arm": {}}, seeds=[1], **words))
    study = replace(study, folder=str(tmp_path))
    (run,) = study.grid()
    monkeypatch.setattr(recording, "read_run", lambda path: SimpleNamespace(last_step=4, config=None, series={}))
    monkeypatch.setattr(recording, "earlier_record", lambda *arguments: None)
    for name in ("refuse_other_configuration", "run_cells", "draft_cells", "gradient_cells"):
        monkeypatch.setattr(recording, name, lambda *arguments: {})
    for name, words in study.evaluations().items():
        path = evaluation_path(run, name, words)
        path.parent.mkdir(parents=True, exist_ok=True)
        result = {"set": "x", "nll": [1.0], "nll_stderr": [None], "model_path": str(run.run_dir)}
        path.write_text(json.dumps({"kind": "denoising", "results": [result]}))
    with pytest.raises(ConfigError, match="evaluation short of arm-s1 gives x nll behind 0 masks, which stands there"):
        recording.collect(study, run)


def test_gradient_norms_are_compared_within_windows():
    def cells_of(norms: dict[int, float]) -> dict[str, Any]:
        run: Any = SimpleNamespace(last_step=1000, series={"grad_norm": norms})
        return gradient_cells(run)

    cells = cells_of({step: (1.0 + step / 1000) * (1 + 0.1 * (-1) ** step) for step in range(1, 1001)})
    assert cells["grad norm variation"]["value"] == pytest.approx(0.1, rel=0.03), "the trend does not count"
    thin = cells_of({step: 1.0 for step in range(10, 1001, 10)})
    assert thin == {}, "records of every tenth step say nothing of single steps"


def test_training_curves_are_means_over_stretches():
    steps, values = thinned([*range(1, 251)], [float(step) for step in range(1, 251)])
    assert steps[:2] == [3, 6] and steps[-1] == 250 and values[:2] == [2.0, 5.0] and len(steps) <= 100


# ---------------------------------------------------------------- really run


@pytest.fixture(scope="module")
def small(corpus, tmp_path_factory) -> Path:
    """A folder with a study of two runs that take seconds."""
    folder = tmp_path_factory.mktemp("study")
    fields: dict[str, Any] = {}
    for option in BASE:
        key, _, value = option.removeprefix("--").partition("=")
        *sections, name = key.split(".")
        place = fields
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = yaml.safe_load(value)
    fields["data"] = fields.get("data", {}) | {
        "train": [f"{corpus}/first"],
        "validation": {"second": [f"{corpus}/second"]},
        "tokenizer": f"{corpus}/tokenizer.model",
    }
    fields["train"] = fields.get("train", {}) | {"train_iters": 4}
    (folder / "base.yaml").write_text(yaml.safe_dump(fields))
    (folder / "text.txt").write_text(TEXT)
    study = {
        "title": "Two paradigms",
        "config": "base.yaml",
        "seeds": [1],
        "runs": {"arm": {"objective.name": "arm"}, "card": {"objective.name": "card"}},
        "evaluate": {
            "perplexity": "perplexity --data text=text.txt --window 16",
            "denoising": "denoising --data text=text.txt --window 16 --depth 4",
        },
        "curves": {"nll": ["validation/second/clean_nll"]},
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    return folder


def card_study(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "card_megatron", "study", *words],
        **dict(cwd=folder, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}),
    )


@pytest.mark.timeout(600)
def test_a_study_is_stopped_goes_on_and_is_reported(small):
    """Ctrl-C while it trains; the same command finishes; once more does nothing; a lost record comes back the same."""
    dry = card_study(small, "run", "study.yaml", "--dry-run")
    assert dry.returncode == 0 and "card-s1" in dry.stdout and "objective.name=card" in dry.stdout, dry.stderr
    command = [sys.executable, "-m", "card_megatron", "study", "run", "study.yaml", "--jobs=2", "--threads=1"]
    first = subprocess.Popen(command, cwd=small, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not (small / "runs" / "study" / "card-s1" / "study.log").exists() and time.monotonic() < end:
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=120)
    assert first.returncode == 3 and "not complete: the same command goes on" in out, (out, err)
    assert "stopping (SIGINT)" in err and not list((small / "results").glob("*.json"))

    done = card_study(small, "run", "study.yaml", "--jobs=2", "--threads=1")
    assert done.returncode == 0 and "study.yaml: complete" in done.stdout, (done.stdout, done.stderr)
    record = json.loads((small / "results" / "card-s1.json").read_text())
    assert record["steps"] == 4 and record["data"] is not None and record["objective"] == "card"
    assert str(small) not in json.dumps({name: record[name] for name in record if name not in ("data", "given")})
    assert {"text token ppl", "text nll behind 3 masks", "second nll"} <= set(record["cells"])
    assert record["cells"]["text nll behind 0 masks"]["value"] > 0

    again = card_study(small, "run", "study.yaml")
    assert again.returncode == 0 and "training" not in again.stdout, again.stdout
    assert "every run has its record in results; --again trains them here once more" in again.stdout
    assert "every run has its record" in card_study(small, "run", "study.yaml", "--again").stdout, "it was trained here"
    (small / "results" / "card-s1.json").rename(small / "kept.json")
    assert card_study(small, "run", "study.yaml").returncode == 0
    assert json.loads((small / "results" / "card-s1.json").read_text()) == record

    # a record that lacks an evaluation, left by another training of the same run: nothing of that one stays
    other = json.loads(json.dumps(record))
    other["cells"]["of another training"] = {"value": 1.0, "stderr": None}
    other["curves"]["loss"]["values"][0] += 1.0
    del other["evaluations"]["denoising"]
    (small / "results" / "card-s1.json").write_text(json.dumps(other))
    assert card_study(small, "run", "study.yaml").returncode == 0
    assert json.loads((small / "results" / "card-s1.json").read_text()) == record

    page = card_study(small, "report", "study.yaml")
    assert "## Two paradigms" in page.stdout and (small / "reports" / "study_nll.png").is_file(), page.stderr
    status = card_study(small, "status", "study.yaml")
    assert "2 of 2 runs are done" in status.stdout, status.stderr


def copied(small: Path, folder: Path, **changes: Any) -> Path:
    """The small study elsewhere, with changes."""
    for name in ("base.yaml", "text.txt"):
        (folder / name).write_text((small / name).read_text())
    tree = yaml.safe_load((small / "study.yaml").read_text()) | changes
    (folder / "study.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return folder


@pytest.mark.timeout(300)
def test_one_run_that_fails_does_not_take_the_others_with_it(small, tmp_path):
    folder = copied(small, tmp_path, evaluate={})
    (folder / "runs" / "study").mkdir(parents=True)
    (folder / "runs" / "study" / "arm-s1").write_text("a file where a folder should be")
    done = card_study(folder, "run", "study.yaml", "--threads=1")
    assert done.returncode == 1 and "arm-s1 failed: " in done.stderr, (done.stdout, done.stderr)
    assert [path.name for path in (folder / "results").iterdir()] == ["card-s1.json"]


def test_jobs_of_a_study_are_those_of_card_launch(small, tmp_path):
    """Nothing is submitted by a dry run; every job is a command that can be read."""
    copied(small, tmp_path)
    shown = card_study(tmp_path, "run", "study.yaml", "--dry-run", "--slurm", "--nodes=1", "--gpus-per-node=0")
    lines = shown.stdout.splitlines()
    assert len(lines) == 6 and not (tmp_path / "runs").exists(), (shown.stdout, shown.stderr)
    assert lines[0].startswith(
        "card launch train --job-name=study-arm-s1 --nodes=1 --gpus-per-node=0 --config=base.yaml"
    )
    assert lines[5].startswith("card launch eval --job-name=study-card-s1-denoising ")
    for words, message in (
        (("--slurm", "--nodes=1", "--job-name=x"), "a study names its own jobs"),
        (("--slurm", "--chain", "3"), "evaluations follow one job"),
        (("--jobs=2", "--slurm", "--nodes=1"), "--jobs is of runs on this machine"),
        (("--slurm=x",), "--slurm takes no value of its own"),
    ):
        with pytest.raises(SystemExit, match=message):
            card(["study", "run", str(tmp_path / "study.yaml"), *words])
    (tmp_path / "text.txt").unlink()
    with pytest.raises(SystemExit, match=r"perplexity: text.txt is not there"):
        card(["study", "run", str(tmp_path / "study.yaml"), "--slurm", "--nodes=1", "--gpus-per-node=0"])


def test_a_run_is_held_by_one_study_at_a_time(tmp_path):
    run = StudyRun("arm", 1, tmp_path, tmp_path / "arm-s1", {})
    with execute.held(run):
        with pytest.raises(ConfigError, match=r"another `card study run` has .*arm-s1"), execute.held(run):
            pass
        with execute.held(replace(run, run_dir=tmp_path / "arm-s2")):
            pass
    with execute.held(run):
        pass


def test_training_once_more_for_an_evaluation_is_announced(tmp_path):
    study = study_with(tmp_path, [record_of("arm", 1, {})], evaluate={"d": "denoising --data a=b"})
    again, never = (execute.why_again(study, run) for run in study.grid(["arm-s1", "card-s1"]))
    assert "trained once more, since its record has no d" in again and never == ""
    assert [execute.state_of(study, run) for run in study.grid(["arm-s1", "card-s1"])] == ["lacks d", "not finished"]


def test_what_was_trained_elsewhere_is_done_but_not_here(tmp_path, monkeypatch):
    """In a clone that has the records alone: nothing to do, not even where the texts are missing; or all, --again."""
    monkeypatch.chdir(tmp_path)
    words = ["perplexity", "--data", "x=nowhere.txt"]
    records = [
        record_of(run, 1, {"x ppl": 2.0}, evaluations={"p": {"arguments": words, "cells": ["x ppl"]}})
        for run in ("arm", "card")
    ]
    study = study_with(tmp_path, records, seeds=[1], evaluate={"p": " ".join(words)})
    card(["study", "run", str(study.path)])
    make = functools.partial(execute.Executor, study, study.grid(), jobs=1, threads=1, minutes=None)
    assert make().todo == [] and [run.label for run in make(again=True).todo] == ["arm-s1", "card-s1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("perplexity --data x=nowhere.txt", r"nowhere.txt is not there"),
        ("perplexity --datta x=text.txt", r"unrecognized arguments: --datta.*card eval perplexity --help"),
        ("perplexity --data x=text.txt --window 0", r"--window"),
        ("perplexity another --data x=text.txt", r"a study gives the model and --output"),
        ("perplexity --data x=text.txt --output=o.json", r"a study gives the model and --output"),
        ("denoising --data x=text.txt", r"run mdlm is of mdlm, .*causal models alone"),
        ("generation --prompts text.txt --scorer judge", r"judge/config.json is not there"),
        ("generation --prompts text.txt --strategies verify:K=2", r"verify:K=2, run mdlm"),
        ("--tasks arc_easy --data nowhere", r"nowhere is not there"),
    ],
)
def test_an_evaluation_that_could_not_run_is_refused_before_hours_of_training(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    runs = {"arm": {"objective.name": "arm"}, "mdlm": {"objective.name": "mdlm"}}
    study = read_study(write_study(tmp_path, runs=runs, evaluate={"asked": words}))
    with pytest.raises(ConfigError, match=f"evaluate: asked: .*{message}"):
        check_evaluations(study, study.grid())
    fitting = read_study(write_study(tmp_path, runs=runs, evaluate={"p": "perplexity --data x=text.txt --samples 4"}))
    check_evaluations(fitting, fitting.grid())
