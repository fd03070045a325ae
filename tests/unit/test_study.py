"""Studies: what a file may declare, what is kept of runs, what a report says of them; and a small one, really run."""

from __future__ import annotations

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
from card_megatron.config.errors import ConfigError
from card_megatron.study import execute
from card_megatron.study import record as recording
from card_megatron.study.definition import StudyRun, config_hash, data_identity
from card_megatron.study.execute import is_done
from card_megatron.study.findings import is_perplexity, read_findings, unknown_metrics
from card_megatron.study.intervals import crossings, interval, paired, pooled
from card_megatron.study.pictures import draw, points
from card_megatron.study.reading import read_study
from card_megatron.study.record import evaluation_path, gradient_cells, is_evaluated, thinned
from card_megatron.study.report import mean_cell, report
from card_megatron.study.stored import read_record
from card_megatron.study.summary import summary
from tests.curves import BASE

EXAMPLES = Path(__file__).parents[2] / "examples" / "study"
TEXT = "The value of the name is a string, not a list of names. " * 20


def write_study(folder: Path, **changes: Any) -> Path:
    """A study whose base is no more than a preset."""
    (folder / "base.yaml").write_text("preset: tiny\ntrain: {train_iters: 2}\ndata: {train: [a], tokenizer: bytes}\n")
    tree = {
        "title": "A small study",
        "config": "base.yaml",
        "runs": {"arm": {"objective.name": "arm"}, "card": {"objective.name": "card"}},
        **changes,
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in tree.items() if value is not None}))
    return path


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
    assert report(findings, {}).startswith(f"## {study.title}\n")


# ---------------------------------------------------------------- intervals


def test_intervals_are_student_s():
    assert interval([2.0]).half is None and interval([2.0]).apart_from_zero is None
    two = interval([1.0, 3.0])
    assert (two.mean, two.half) == pytest.approx((2.0, 12.706))  # t(1) x sqrt(2) / sqrt(2)
    five = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert five.half == pytest.approx(2.776 * math.sqrt(2.5 / 5)) and five.apart_from_zero
    assert interval([float(n % 2) for n in range(40)]).half == pytest.approx(2.0227 * 0.50637 / math.sqrt(40), rel=1e-4)


def test_differences_are_paired_by_seed():
    found = paired({1: 3.0, 2: 14.0, 3: 9.0}, {1: 2.0, 2: 13.0, 4: 0.0})
    assert found is not None and (found.mean, found.half, found.count) == (1.0, 0.0, 2)
    assert paired({1: 3.0}, {2: 2.0}) is None


def test_pooled_differences_share_the_spread_of_all_runs():
    """Against the textbook's two-way analysis, by hand."""
    values = {"a": {1: 1.0, 2: 2.0}, "b": {1: 2.0, 2: 3.5}, "c": {1: 0.0, 2: 1.2}}
    found = pooled(values, "a")
    # residuals of run + seed: the seeds differ by 1, 1.5 and 1.2, around a mean of 37/30
    squares = 2 * sum(((step - 37 / 30) / 2) ** 2 for step in (1.0, 1.5, 1.2))
    half = 4.303 * math.sqrt(squares / 2)  # 2 degrees of freedom; a difference of means of 2 has this very spread
    assert {name: (item.mean, item.half) for name, item in found.items()} == {
        "b": pytest.approx((1.25, half)),
        "c": pytest.approx((-0.9, half)),
    }
    # a run of one seed is compared as the others say that seeds differ, and is known less well
    alone = pooled(values | {"d": {1: 5.0}}, "a")["d"]
    assert alone.mean == pytest.approx(5.0 - (1.5 - 37 / 60)) and alone.half is not None and alone.half > half
    assert pooled({"a": {1: 1.0}, "b": {1: 3.0}}, "a")["b"] == interval([2.0]), "nothing is left to know chance by"
    assert pooled({"a": {1: 1.0}, "b": {2: 3.0}}, "a") == {} == pooled({"a": {}, "b": {1: 1.0}}, "a")


def test_crossings_are_where_a_curve_falls_below_the_other():
    ours, theirs = [(0, 3.0), (1, 2.0), (2, 1.0), (3, 2.0), (4, 0.0)], [(n, 1.5) for n in range(5)]
    assert crossings(ours, theirs) == pytest.approx([1.5, 3.25])
    assert crossings(theirs, theirs) == []
    flat = [(n, 1.0) for n in range(4)]
    assert crossings([(0, 2.0), (1, 1.0), (2, 2.0), (3, 1.0)], flat) == [], "to touch is not to cross"
    assert crossings([(0, 2.0), (1, 1.0), (2, 1.0), (3, 0.5)], flat) == [2.0]


# ---------------------------------------------------------------- records and report


def record_of(run: str, seed: int, cells: dict[str, Any], curve: list[float] = (), **more: Any) -> dict[str, Any]:
    curves = {
        "validation/v/clean_nll": {"tokens": [*range(len(curve))], "epochs": [*range(len(curve))], "values": [*curve]}
    }
    return {
        **{"kind": "study_run", "run": run, "seed": seed, "objective": run, "tokens": 100, "steps": 1},
        **{"hours": 0.5, "commit": "abc", "machine": "m", "evaluations": {}, "curves": curves if curve else {}},
        "cells": {name: value if isinstance(value, dict) else {"value": value} for name, value in cells.items()},
        **more,
    }


def study_with(folder: Path, records: list[dict[str, Any]], **changes: Any):
    study = read_study(write_study(folder, **changes))
    (folder / "results").mkdir(exist_ok=True)
    for record in records:
        (run,) = study.grid([f"{record['run']}-s{record['seed']}"])
        known = {"config_hash": config_hash(run.load())} | record
        study.result_path(run).write_text(json.dumps(known))
    return study


def test_a_report_says_what_separates_and_what_does_not(tmp_path):
    bound = {"value": 90.0, "bound": "ELBO, 4 samples"}
    study = study_with(
        tmp_path,
        [
            record_of("arm", 1, {"x ppl": 10.0, "nll": 2.0}),
            record_of("arm", 2, {"x ppl": 40.0, "nll": 3.0}),
            record_of("card", 1, {"x ppl": 20.0, "nll": 2.5}),
            record_of("card", 2, {"x ppl": 80.0, "nll": 2.9}),
            record_of("mdlm", 1, {"x ppl": bound}),
        ],
        runs={"arm": {}, "card": {"objective.name": "card", "eval.samples": 3}, "mdlm": {}, "later": {}},
    )
    page = report(read_findings(study), {})
    assert "20.00 [" in page, "a mean of perplexities is geometric"
    assert "x 2.000 (+0.6931 ± 0.0000 nats)" in page, "twice as much with both seeds"
    assert "no difference seen: +0.2000 ± 3.8118" in page
    assert "≤ 90.00 (ELBO, 4 samples)" in page and "one seed" in page
    assert "| name=card |" in page, "how a run is validated does not tell it apart"
    assert "| later | " in page and "not run yet" in page
    hashes = {run.label: config_hash(run.load()) for run in study.grid(["card"])}
    assert f"| card-s2 | {hashes['card-s2']} | abc    | m       |    100 |" in page


def test_the_cells_of_a_report_can_be_read_by_programs(tmp_path):
    bound = {"value": 90.0, "bound": "ELBO, 4 samples"}
    study = study_with(
        tmp_path,
        [
            *(record_of("arm", seed, {"x ppl": value}) for seed, value in ((1, 10.0), (2, 40.0))),
            *(record_of("card", seed, {"x ppl": value}) for seed, value in ((1, 20.0), (2, 80.0))),
            record_of("mdlm", 1, {"x ppl": bound}),
        ],
        runs={"arm": {}, "card": {"objective.name": "card"}, "mdlm": {}},
    )
    arm, ours, other = summary(read_findings(study))["cells"]
    assert (arm["mean"], arm["difference"], arm["seeds"]) == (pytest.approx(20.0), None, [1, 2])
    assert arm["interval_95"] == [pytest.approx(20 * 2.0**-12.706), pytest.approx(20 * 2.0**12.706)]
    difference = {"mean": pytest.approx(math.log(2)), "half_width_95": pytest.approx(0.0, abs=1e-9)}
    assert ours["difference"] == {**difference, "unit": "nats", "seen": True}
    assert ours["config_hashes"] == [config_hash(run.load()) for run in study.grid(["card"])]
    assert (other["likelihood"], other["interval_95"], other["tokens"]) == ("ELBO, 4 samples", [None, None], [100])
    assert other["difference"]["seen"] is None, "one seed cannot tell"


def test_a_study_of_variants_pools_their_spread(tmp_path):
    nll = {"card": (2.0, 3.0), "a": (2.5, 3.4), "b": (2.1, 3.1), "c": (2.0, 3.1)}
    records = [record_of(run, seed, {"nll": value}) for run, pair in nll.items() for seed, value in enumerate(pair, 1)]
    runs = {name: {} for name in nll}
    apart = report(read_findings(study_with(tmp_path, records, runs=runs, baseline="card")), {})
    assert "no difference seen: +0.4500 ± 0.6353" in apart
    together = report(read_findings(study_with(tmp_path, records, runs=runs, baseline="card", pooled=True)), {})
    # 3.182 standard errors of sqrt(0.01 / 3)
    assert " +0.4500 ± 0.1837 |" in together and "seen: +0.4500" not in together and "share one spread" in together


def test_what_a_bound_and_a_diverged_seed_say_is_said(tmp_path):
    study = study_with(
        tmp_path,
        [
            *(record_of("arm", seed, {"x ppl": value, "y ppl": 3.0}) for seed, value in ((1, None), (2, 20.0))),
            *(record_of("mdlm", seed, {"x ppl": {"value": 40.0, "bound": f"ELBO, {seed} samples"}}) for seed in (1, 2)),
        ],
        runs={"arm": {}, "mdlm": {}},
    )
    page = report(read_findings(study), {})
    assert " 20.00; of seed 1 not finite |" in page, "a run that diverged does not look better for it"
    assert "≤ 40.00 [40.00, 40.00] (ELBO, 1 samples, ELBO, 2 samples)" in page
    assert "≤ x 2.000 (+0.6931 nats), one seed" in page


def test_both_kinds_of_perplexity_are_averaged_as_logarithms(tmp_path):
    metrics = ("Gen PPL (judge) · ar", "wikitext word_perplexity", "books ppl")
    records = [record_of("arm", seed, dict.fromkeys(metrics, value)) for seed, value in ((1, 10.0), (2, 1000.0))]
    findings = read_findings(study_with(tmp_path, records, runs={"arm": {}}))
    assert all(mean_cell(findings, "arm", metric).startswith("100.0 [") for metric in metrics)
    assert not is_perplexity("repetition-4") and not is_perplexity("tok/s · confidence:ppl")


def test_what_no_record_has_is_named(tmp_path):
    columns = {"nll": "boks nll", "x": "books nll"}
    records = [record_of("arm", 1, {"books nll": 1.0}, [1.0])]
    study = study_with(tmp_path, records, columns=columns, curves={"c": ["validation/w/clean_nll"]})
    assert unknown_metrics(read_findings(study)) == {
        "boks nll": "; did you mean books nll?",
        "validation/w/clean_nll": "; did you mean validation/v/clean_nll?",
    }


def test_curves_cross_over_the_seeds_that_both_have(tmp_path):
    """A baseline's second seed, far above, must not make a crossing of a run that has the first alone."""
    study = study_with(
        tmp_path,
        [
            *(record_of("arm", seed, {}, curve) for seed, curve in ((1, [3.0, 2.0]), (2, [7.0, 6.0]))),
            record_of("card", 1, {}, [3.1, 2.1]),
        ],
        epochs=True,
        curves={"nll": ["validation/v/clean_nll"]},
    )
    page = report(read_findings(study), {})
    row = next(line for line in page.splitlines() if "card (seed 1)" in line)
    assert row.rstrip("| ").endswith("—") and "arm (seed 1, 2)" in page


def test_decoding_strategies_stand_in_a_table_of_their_own(tmp_path):
    cells = {"tok/s · ar": 100.0, "tok/pass · ar": 1.0, "tok/s · verify:K=2": 150.0, "tok/pass · verify:K=2": 1.7}
    study = study_with(tmp_path, [record_of("card", 1, cells)], runs={"card": {}}, seeds=[1], columns={})
    page = report(read_findings(study), {})
    (row,) = [line for line in page.splitlines() if "verify:K=2" in line]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["card", "verify:K=2", "1.500 x", "1.700"]
    assert "tok/pass · ar" not in page, "strategies are no columns of the runs"


def test_curves_cross_the_baseline_and_are_drawn(tmp_path):
    study = study_with(
        tmp_path,
        [record_of("arm", 1, {}, [3.0, 2.0, 2.5]), record_of("card", 1, {}, [4.0, 2.2, 2.1])],
        seeds=[1],
        epochs=True,
        curves={"validation nll": ["validation/v/clean_nll"]},
    )
    findings = read_findings(study)
    page = report(findings, draw(findings, tmp_path))
    row = next(line for line in page.splitlines() if line.startswith("| validation nll | card"))
    assert [cell.strip() for cell in row.split("|")[3:-1]] == ["2.100", "2.0", "2.100", "2.0", "1.3"]
    assert (tmp_path / "study_validation_nll.png").read_bytes().startswith(b"\x89PNG")


def test_runs_and_strategies_are_points_between_two_metrics(tmp_path):
    cells = {"nll": 2.0, "speed": 3.0, "nll · ar": 1.0, "speed · ar": 1.0, "nll · fast": 1.5}
    records = [record_of("card", 1, cells), record_of("card", 2, {"nll": 2.5}), record_of("arm", 1, {"nll": 1.0})]
    study = study_with(tmp_path, records, points={"two": ["nll", "speed"], "none": ["x", "y"]})
    findings = read_findings(study)
    assert points(findings, "nll", "speed") == {"card": [(2.0, 3.0)], "card ar": [(1.0, 1.0)]}, "those that have both"
    assert draw(findings, tmp_path) == {"two": "study_two.png"}
    assert (tmp_path / "study_two.png").read_bytes().startswith(b"\x89PNG")


def test_no_record_is_no_report(tmp_path):
    with pytest.raises(ConfigError, match=r"has no record of .*; run the study first"):
        read_findings(read_study(write_study(tmp_path)))


def test_a_report_goes_into_a_page_between_its_marks(tmp_path, capsys):
    study = study_with(tmp_path, [record_of("arm", 1, {"x ppl": 10.0})])
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- card study report study -->\nold\n<!-- end of study -->\nafter\n")
    card(["study", "report", str(study.path), "--into", str(page)])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "## A small study" in text and "\nold\n" not in text
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="needs one line"):
        card(["study", "report", str(study.path), "--into", str(page)])
    assert page.read_text() == "no marks"


def test_records_of_something_else_are_refused(tmp_path):
    study = study_with(tmp_path, [record_of("arm", 1, {}, config_hash="h")])
    run = study.grid(["arm-s1"])[0]
    for reader in (lambda: is_done(study, run), lambda: read_findings(study)):
        with pytest.raises(ConfigError, match=r"is of another configuration .h. than"):
            reader()
    path = study.result_path(run)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is no record of a study's run"):
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
        {"evaluations": {"d": {"arguments": [], "cells": ["nowhere"]}}},
    ],
)
def test_a_damaged_record_is_no_traceback(tmp_path, damage):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record_of("arm", 1, {}, config_hash="h") | damage))
    with pytest.raises(ConfigError, match="is no record of a study's run"):
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
    assert first.returncode == 0 and "not complete: the same command goes on" in out, (out, err)
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
    assert "every run has its record in results; to train them once more" in again.stdout
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
