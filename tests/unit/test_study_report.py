"""What a report of a study says: intervals, differences, strategies, crossings, pictures; and what it refuses."""

from __future__ import annotations

import math

import pytest

from card_megatron.cli import main as card
from card_megatron.config.errors import ConfigError
from card_megatron.evaluation.report import shown
from card_megatron.study.definition import config_hash, is_perplexity
from card_megatron.study.findings import read_findings, unknown_metrics
from card_megatron.study.intervals import crossings, interval, paired, pooled
from card_megatron.study.pictures import draw, points
from card_megatron.study.reading import read_study
from card_megatron.study.report import mean_cell, report
from card_megatron.study.summary import summary
from tests.studies import record_of, study_with, write_study

# ---------------------------------------------------------------- intervals


def test_intervals_are_student_s():
    assert interval([2.0]).half is None and interval([2.0]).apart_from_zero is None
    two = interval([1.0, 3.0])
    assert (two.mean, two.half) == pytest.approx((2.0, 12.7062))  # t(1) x sqrt(2) / sqrt(2)
    five = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert five.half == pytest.approx(2.7764451 * math.sqrt(2.5 / 5)) and five.apart_from_zero
    assert interval([float(n % 2) for n in range(40)]).half == pytest.approx(2.0227 * 0.50637 / math.sqrt(40), rel=1e-4)


def test_differences_are_paired_by_seed():
    found = paired({1: 3.0, 2: 14.0, 3: 9.0}, {1: 2.0, 2: 13.0, 4: 0.0})
    assert found is not None and (found.mean, found.half, found.count) == (1.0, 0.0, 2)
    rounding = paired({1: 0.1 + 0.2, 2: 0.1 + 0.2}, {1: 0.3, 2: 0.3})
    assert rounding == interval([0.0, 0.0]) and rounding.apart_from_zero is False, "rounding is no difference"
    assert paired({1: 3.0}, {2: 2.0}) is None


def test_pooled_differences_share_the_spread_of_all_runs():
    """Against the textbook's two-way analysis, by hand."""
    values = {"a": {1: 1.0, 2: 2.0}, "b": {1: 2.0, 2: 3.5}, "c": {1: 0.0, 2: 1.2}}
    found = pooled(values, "a")
    # residuals of run + seed: the seeds differ by 1, 1.5 and 1.2, around a mean of 37/30
    squares = 2 * sum(((step - 37 / 30) / 2) ** 2 for step in (1.0, 1.5, 1.2))
    # 2 degrees of freedom, and two differences that hold together: Student's 97.5% for both signs is 6.2053. A
    # difference of means of 2 has this very spread
    half = 6.2053 * math.sqrt(squares / 2)
    assert {name: (item.mean, item.half) for name, item in found.items()} == {
        "b": pytest.approx((1.25, half), rel=1e-5),
        "c": pytest.approx((-0.9, half), rel=1e-5),
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


# ---------------------------------------------------------------- report


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
    assert "no difference seen: +0.200 ± 3.812" in page
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
    assert (arm["mean"], arm["differences"], arm["seeds"]) == (pytest.approx(20.0), {}, [1, 2])
    assert arm["interval_95"] == [pytest.approx(20 * 2.0**-12.7062047), pytest.approx(20 * 2.0**12.7062047)]
    difference = {"mean": pytest.approx(math.log(2)), "half_width_95": pytest.approx(0.0, abs=1e-9)}
    assert ours["differences"] == {"arm": {**difference, "unit": "nats", "seen": True}}
    assert ours["config_hashes"] == [config_hash(run.load()) for run in study.grid(["card"])]
    assert (other["likelihood"], other["interval_95"], other["tokens"]) == ("ELBO, 4 samples", [None, None], [100])
    assert other["differences"]["arm"]["seen"] is None, "one seed cannot tell"


def test_a_study_of_variants_pools_their_spread(tmp_path):
    nll = {"card": (2.0, 3.0), "a": (2.5, 3.4), "b": (2.1, 3.1), "c": (2.0, 3.1)}
    records = [record_of(run, seed, {"nll": value}) for run, pair in nll.items() for seed, value in enumerate(pair, 1)]
    runs = {name: {} for name in nll}
    apart = report(read_findings(study_with(tmp_path, records, runs=runs, baseline="card")), {})
    assert "no difference seen: +0.4500 ± 0.6353" in apart
    together = report(read_findings(study_with(tmp_path, records, runs=runs, baseline="card", pooled=True)), {})
    # 4.857 standard errors of sqrt(0.01 / 3): Student's of 3 degrees of freedom for three differences at once
    assert " +0.4500 ± 0.2804 |" in together and "seen: +0.4500" not in together and "share one spread" in together


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


def test_numbers_beyond_all_measure_are_shown_as_such(tmp_path):
    """A run that diverged in one seed has a perplexity whose interval no float can hold."""
    records = [record_of("arm", seed, {"x ppl": value}) for seed, value in ((1, 10.0), (2, 1e60))]
    findings = read_findings(study_with(tmp_path, records, runs={"arm": {}}))
    assert mean_cell(findings, "arm", "x ppl").endswith(", —]")
    assert summary(findings)["cells"][0]["interval_95"][1] is None
    assert shown(5.55e-17, 0.0335) == "0.00000 ± 0.03350"


def test_what_no_record_has_is_named(tmp_path):
    columns = {"nll": "boks nll", "x": "books nll"}
    records = [record_of("arm", 1, {"books nll": 1.0}, [1.0])]
    study = study_with(tmp_path, records, columns=columns, curves={"c": ["validation/w/clean_nll"]})
    assert {*unknown_metrics(read_findings(study)).values()} == {"; runs that are not finished may bring it"}
    whole = study_with(tmp_path, records, runs={"arm": {}}, seeds=[1], columns=columns, curves=study.curves)
    assert unknown_metrics(read_findings(whole)) == {
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
    asked = {"evaluate": {"generation": "generation --prompts text.txt --scorer judge"}}
    record = record_of("card", 1, cells)
    record["evaluations"] = {"generation": {"arguments": asked["evaluate"]["generation"].split(), "cells": [*cells]}}
    study = study_with(tmp_path, [record], runs={"card": {}}, seeds=[1], **asked)
    page = report(read_findings(study), {})
    value, apart = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if "verify:K=2" in line
    )
    assert value == ["card", "verify:K=2", "1.700"], "tokens a second say nothing on another machine"
    assert apart == ["card", "verify:K=2", "x 1.500, one seed", "+0.7000, one seed"]
    assert page.count("| card | ar ") == 1, "the first strategy does not differ from itself"
    assert "tok/pass · ar" not in page, "strategies are no columns of the runs"
    other = study_with(tmp_path, [record], runs={"card": {}}, seeds=[1])
    assert "verify:K=2" not in report(read_findings(other), {}), "another study asked, this one did not"


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
    assert [cell.strip() for cell in row.split("|")[3:-1]] == ["2.100", "2.0", "2.100", "2.0", "—", "1.3"]
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
    (tmp_path / "reports" / "study.md").unlink()
    with pytest.raises(SystemExit, match=r"page.md is a file; name the folder"):
        card(["study", "report", str(study.path), "--output", str(page)])
    with pytest.raises(SystemExit, match="needs one line"):
        card(["study", "report", str(study.path), "--into", str(page)])
    assert page.read_text() == "no marks" and not (tmp_path / "reports" / "study.md").exists()


def test_a_study_compares_with_further_runs_in_tables_of_their_own(tmp_path):
    bound = {"value": 90.0, "bound": "ELBO, 4 samples"}
    values = {"arm": (10.0, 11.0), "card": (20.0, 22.0), "mdlm": (bound, bound)}
    records = [record_of(run, seed, {"x ppl": value}) for run, two in values.items() for seed, value in enumerate(two)]
    runs = {"arm": {}, "card": {}, "mdlm": {}}
    study = study_with(tmp_path, records, runs=runs, seeds=[0, 1], also_against=["card"])
    page = report(read_findings(study), {})
    first, second = page.split("Difference from `card`:")
    assert "Difference from `arm`:" in first and "| card | x 2.000 (+0.6931 ± 0.0000 nats) |" in first
    assert "| arm  | x 0.500 (-0.6931 ± 0.0000 nats) " in second and "≤ x 4.291 (+1.456" in second
    assert {*summary(read_findings(study))["cells"][2]["differences"]} == {"arm", "card"}


def test_an_evaluation_that_is_to_come_is_told_from_one_that_has_no_number(tmp_path):
    given = {"d": {"arguments": ["denoising"], "cells": ["nll behind 1 mask"]}}
    study = study_with(
        tmp_path,
        [
            record_of("card", 1, {"nll behind 1 mask": 3.0}, evaluations=given),
            record_of("late", 1, {}),
            record_of("arm", 1, {}, evaluations={"d": given["d"] | {"cells": []}}),
        ],
        runs={"card": {}, "late": {}, "arm": {}},
    )
    cells = [mean_cell(read_findings(study), run, "nll behind 1 mask") for run in ("card", "late", "arm")]
    assert cells == ["3.000", "not measured yet", "—"]


def test_a_curve_may_fall_below_all_that_the_baseline_ever_had(tmp_path):
    """Past a baseline that got worse is one thing, past its best point is another."""
    curves = {"arm": [3.0, 2.0, 4.0, 5.0], "card": [4.0, 3.0, 2.5, 1.5], "mdlm": [9.0, 8.0, 3.0, 0.5]}
    records = [record_of(run, 1, {}, curve) for run, curve in curves.items()]
    more = {"runs": {name: {} for name in curves}, "also_against": ["card"], "seeds": [1], "epochs": True}
    study = study_with(tmp_path, records, curves={"nll": ["validation/v/clean_nll"]}, **more)
    lines = report(read_findings(study), {}).splitlines()
    card, mdlm = (
        [cell.strip() for cell in line.split("|")[-4:-1]]
        for name in ("card", "mdlm")
        for line in lines
        if line.startswith(f"| nll   | {name}")
    )
    assert card == ["2.5", "1.4", "—"] and mdlm == ["2.4", "1.9", "2.3"], "each baseline has a column"
    crossing = next(found for found in summary(read_findings(study))["crossings"] if found["run"] == "card")
    assert crossing["below"] == {"arm": [pytest.approx(1.4)]} and crossing["below_best"] == pytest.approx(2.5)
