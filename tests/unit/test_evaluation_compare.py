"""Tables and curves from files written by hand: bold best, ties, what is missing, tokens and epochs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from card_megatron.commands import eval_compare
from card_megatron.config.errors import ConfigError
from card_megatron.config.load import dump_yaml
from card_megatron.config.schema import DataConfig, ObjectiveConfig, RunConfig, TrainConfig
from card_megatron.evaluation.compare import Cell, Comparison, Row, better, run_cells
from card_megatron.evaluation.curves import default_metrics, draw_by_epochs
from card_megatron.evaluation.runs import read_run

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(folder: Path, clean: list[float], objective: str = "card", data: str | None = None, **train) -> Path:
    """A run directory as training leaves it: a record and a validation every 10 steps."""
    folder.mkdir(parents=True)
    config = RunConfig(
        run_dir=str(folder),
        objective=ObjectiveConfig(name=objective),  # type: ignore[arg-type]
        data=DataConfig(train=[data] if data else [], sequence_length=8),
        train=TrainConfig(train_iters=50, global_batch_size=4, **train),
    )
    (folder / "config.yaml").write_text(dump_yaml(config))
    lines = []
    for number, value in enumerate(clean, start=1):
        step = 10 * number
        lines.append({"step": step, "steps": 50, "consumed_tokens": step * 32, "loss": 5.0 - number, "mfu": None})
        sets = {"books": {"nll": 9.0, "perplexity": 99.0, "clean_nll": value / 10, "clean_perplexity": value}}
        lines.append({"step": step, "validation": sets})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 60, "lo')
    return folder


def write_perplexity(path: Path, **perplexities: float | None) -> Path:
    """Model path -> token perplexity on one set."""
    results = [
        {
            "model_path": model.replace("__", "/"),
            "set": "wiki",
            "how": "exact",
            **{f"{unit}_perplexity": value for unit in ("token", "word", "byte")},
            **{f"{unit}_perplexity_stderr": 0.5 for unit in ("token", "word", "byte")},
        }
        for model, value in perplexities.items()
    ]
    path.write_text(json.dumps({"kind": "perplexity", "results": results}))
    return path


def write_tasks(path: Path, checkpoint: str, acc: float) -> Path:
    results = {"hellaswag": {"acc": {"value": acc, "stderr": 0.01}, "alias": {"value": "hellaswag", "stderr": None}}}
    path.write_text(json.dumps({"kind": "tasks", "checkpoint": checkpoint, "results": results}))
    return path


def comparison(*rows: dict[str, float | None]) -> Comparison:
    made = Comparison()
    for number, cells in enumerate(rows):
        known = {name: Cell(value) for name, value in cells.items() if value is not None}
        made.rows.append(Row((f"m{number}", None, ""), known))
    return made


def test_a_bound_is_not_shown_as_an_exact_number(tmp_path):
    exact = write_perplexity(tmp_path / "card.json", card=20.0)
    content = json.loads(write_perplexity(tmp_path / "mdlm.json", mdlm=19.0).read_text())
    content["results"][0] |= {"how": "ELBO, 8 samples", "likelihood": "bound", "samples": 8}
    (tmp_path / "mdlm.json").write_text(json.dumps(content))
    tasks = json.loads(write_tasks(tmp_path / "tasks.json", "mdlm", 0.5).read_text())
    (tmp_path / "tasks.json").write_text(json.dumps(tasks | {"likelihood": "bound", "mc_samples": 32}))
    run = write_run(tmp_path / "run", [7.0], objective="mdlm")
    lines = (run / "metrics.jsonl").read_text().replace("clean_", "bound_")
    (run / "metrics.jsonl").write_text(lines)
    made = Comparison()
    for entry in (exact, tmp_path / "mdlm.json", tmp_path / "tasks.json", run):
        made.add(str(entry))
    table = made.table()
    assert "**≤ 19.00 ± 0.50 (ELBO, 8 samples)**" in table and " 20.00 ± 0.50 |" in table
    assert "0.5000 ± 0.0100 (ELBO, 32 samples)" in table, "an accuracy is what bounds chose, and no bound"
    assert "books bound ppl" in table and "7.000" in table and "99" not in table, "not the perplexity under noise"
    assert "≤ is a bound: the model may be better" in table
    assert len(made.rows) == 3, "a model has one row, whatever is known of it"
    cells = {name: cell for row in made.record()["rows"] for name, cell in row["cells"].items() if "bound" in cell}
    assert cells["wiki token ppl"]["bound"] == "ELBO, 8 samples"


def test_the_best_of_a_column_is_bold_by_its_direction():
    table = comparison(
        {"wiki ppl": 20.0, "arc acc": 0.5, "tokens": 5}, {"wiki ppl": 10.0, "arc acc": 0.25, "tokens": 9}
    )
    assert table.table() == (
        "| model | wiki ppl ↓ |  arc acc ↑ | tokens |\n"
        "| ----- | ---------: | ---------: | -----: |\n"
        "| m0    |      20.00 | **0.5000** |      5 |\n"
        "| m1    |  **10.00** |     0.2500 |      9 |\n"
    )


def test_ties_are_all_bold_and_what_is_missing_is_a_dash():
    made = comparison({"a ppl": 10.001, "b ppl": 3.0}, {"a ppl": 10.0012, "c ppl": 4.0}, {"a ppl": 11.0, "b ppl": None})
    rows = [line.split("|")[2:-1] for line in made.table().splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["**10.00**", "3.000", "—"],  # alone in its column: nothing to be better than
        ["**10.00**", "—", "4.000"],
        ["11.00", "—", "—"],
    ]


@pytest.mark.parametrize(
    ("column", "direction"),
    [
        ("lambada_openai acc", 1),
        ("lambada_openai perplexity", -1),
        ("hellaswag acc_norm", 1),
        ("wiki word ppl", -1),
        ("accounts ppl", -1),  # the last word that says it
        ("repetition-4", -1),
        ("distinct-2", 1),
        ("tok/s", 1),
        ("tokens", 0),
        ("lr", 0),
    ],
)
def test_which_way_is_better(column, direction):
    assert better(column) == direction


def test_rows_that_share_no_column_stand_in_tables_of_their_own():
    made = comparison({"x ppl": 1.0}, {"tok/s": 5.0}, {"x ppl": 2.0, "y ppl": 1.0}, {"y ppl": 3.0})
    assert made.parts() == [[0, 2, 3], [1]]
    assert made.table().count("| model |") == 2


def test_evaluations_of_a_run_s_last_checkpoint_join_its_row(tmp_path):
    run = write_run(tmp_path / "card", [9.0, 7.0])
    last = f"{run}/checkpoints/step_000020"
    made = Comparison()
    made.add(str(run))
    made.add(str(write_perplexity(tmp_path / "p.json", **{last: 12.0, f"{run}/checkpoints/step_000010": 15.0})))
    made.add(str(write_tasks(tmp_path / "t.json", last, 0.4)))
    assert made.labels() == ["card@20", "card@10"]
    cells = made.rows[0].cells
    assert cells["wiki token ppl"] == Cell(12.0, 0.5) and cells["hellaswag acc"] == Cell(0.4, 0.01)
    assert cells["books ppl"].value == 7.0 and cells["books nll"].value == 0.7
    assert cells["tokens"].value == 20 * 4 * 8 and cells["train loss (card)"].value == 3.0
    assert "hellaswag alias" not in made.columns()


def test_a_bound_is_called_a_bound(tmp_path):
    folder = write_run(tmp_path / "diffusion", [8.0], objective="mdlm")
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("clean_", "bound_"))
    run = read_run(folder)
    cells = run_cells(run)
    assert cells["books bound ppl"].value == 8.0 and "books ppl" not in cells
    assert default_metrics([run]) == ["loss", "validation/books/bound_perplexity"]


def test_a_row_has_the_name_it_was_given_and_whole_paths_tell_namesakes_apart(tmp_path):
    one, two = write_run(tmp_path / "a" / "run", [9.0]), write_run(tmp_path / "b" / "run", [8.0], objective="arm")
    made = Comparison()
    made.add(str(one))
    made.add(str(two))
    made.add(f"mine={one}")
    made.add(f"mine={write_tasks(tmp_path / 't.json', 'elsewhere/step_000007', 0.5)}")
    assert made.labels() == [f"{one}@10", f"{two}@10", "mine"]
    assert {"books ppl", "hellaswag acc"} <= set(made.rows[2].cells)
    assert "train loss (arm)" in made.rows[1].cells  # which is another column than card's


def test_what_the_watcher_wrote_is_part_of_the_run(tmp_path):
    run = write_run(tmp_path / "card", [9.0, 8.0, 7.0])
    (run / "evaluations").mkdir()
    for step, acc in ((10, 0.3), (20, 0.5)):
        checkpoint = f"{run}/checkpoints/step_{step:06d}"
        tasks = json.loads(write_tasks(tmp_path / "t.json", checkpoint, acc).read_text())
        content = {"kind": "checkpoint", "step": step, "checkpoint": checkpoint, "tasks": tasks, "perplexity": None}
        (run / "evaluations" / f"step_{step:06d}.json").write_text(json.dumps(content))
    found = read_run(run)
    assert found.series["tasks/hellaswag/acc"] == {10: 0.3, 20: 0.5}
    assert default_metrics([found]) == ["loss", "tasks/hellaswag/acc", "validation/books/clean_perplexity"]
    made = Comparison()
    made.add(str(run))
    made.add(str(run / "evaluations" / "step_000010.json"))
    assert made.rows[0].cells["hellaswag acc"] == Cell(0.5, 0.01)
    assert made.labels() == ["card@30", "card@10"]


def test_generation_has_a_row_a_strategy(tmp_path):
    facts = {"tokens_per_second": 9.0, "tokens_per_pass": 1.5, "repetition_4": None}
    facts |= {f"distinct_{n}": 0.5 for n in (1, 2, 3)}
    judges = {"some/gpt2": {"perplexity": 7.0, "perplexity_stderr": None}}
    results = [{"strategy": strategy, **facts, "judges": judges} for strategy in ("ar", "verify:K=8")]
    content = {"kind": "generation", "model_path": "runs/card/checkpoints/step_000005", "results": results}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "generation.json").write_text(json.dumps(content))
    (tmp_path / "out" / "other.json").write_text("[]")
    made = Comparison()
    made.add(str(tmp_path / "out"))
    assert made.labels() == ["card@5 · ar", "card@5 · verify:K=8"]
    assert made.table().count("**7.000**") == 2 and "repetition-4" not in made.columns()


# ---------------------------------------------------------------- curves


def test_tokens_follow_the_ramp_of_the_batch(tmp_path):
    run = read_run(write_run(tmp_path / "run", [9.0], rampup_batch_size=[2, 1, 6]))
    batches = [2, 2, 3, 4, 4, 4]  # 2 until 3 samples are consumed, 3 until 6, then 4
    assert run.tokens_at([0, 1, 2, 3, 4, 6]) == [8 * sum(batches[:step]) for step in (0, 1, 2, 3, 4, 6)]


def test_epochs_are_counted_by_the_manifests_and_minima_are_found(tmp_path):
    (tmp_path / "text.json").write_text('{"tokens": 640}')
    card = read_run(write_run(tmp_path / "card", [9.0, 7.0, 6.0, 6.5, 8.0], data=str(tmp_path / "text")))
    arm = read_run(write_run(tmp_path / "arm", [8.0, 7.5, 9.0], data=f"0.5 {tmp_path / 'text'}"))
    assert card.epoch_tokens() == 640
    best = draw_by_epochs(tmp_path / "epochs.png", {"card": card, "arm": arm}, "validation/books/clean_perplexity")
    assert best == {"card": (30 * 32 / 640, 6.0), "arm": (20 * 32 / 640, 7.5)}
    assert (tmp_path / "epochs.png").read_bytes().startswith(PNG)
    card.config.data.split = "50,25,25"
    assert card.epoch_tokens() == 320


def test_the_command_writes_tables_and_pictures(tmp_path, capsys):
    (tmp_path / "text.json").write_text('{"tokens": 640}')
    one = write_run(tmp_path / "card", [9.0, 7.0, 8.0], data=str(tmp_path / "text"))
    two = write_run(tmp_path / "arm", [8.0, 7.5], objective="arm", data=str(tmp_path / "lost"))
    eval_compare.run([str(one), f"baseline={two}", f"--output={tmp_path / 'out'}"])
    names = {path.name for path in (tmp_path / "out").iterdir()}
    curve = "validation_books_clean_perplexity.png"
    assert names == {"comparison.md", "comparison.json", "curve_loss.png", f"curve_{curve}", f"epochs_{curve}"}
    assert all((tmp_path / "out" / name).read_bytes().startswith(PNG) for name in names if name.endswith(".png"))
    record = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [row["label"] for row in record["rows"]] == ["card@30", "baseline"]
    assert record["rows"][1]["cells"]["books ppl"] == {"value": 7.5, "stderr": None, "best": True}
    assert record["epochs"]["validation/books/clean_perplexity"] == {str(one): {"epoch": 1.0, "value": 7.0}}
    said = capsys.readouterr().out
    assert (
        "**7.500**" in said and "lost.json, the manifest that says how many tokens an epoch has, is not there" in said
    )
    eval_compare.run([str(one), f"--output={tmp_path / 'more'}", "--metrics", "loss"])
    assert not list((tmp_path / "more").glob("epochs_*"))
    with pytest.raises(ConfigError, match=r"--metrics los is in no metrics.jsonl; there are .*, loss,"):
        eval_compare.run([str(one), f"--output={tmp_path / 'more'}", "--metrics", "los"])


def test_what_is_no_evaluation_is_refused(tmp_path):
    (tmp_path / "other.json").write_text('{"kind": "other"}')
    for entry, fault in (
        (tmp_path / "other.json", "no JSON of `card eval`"),
        (tmp_path, "no run directory .* and has no evaluation's JSON"),
        (tmp_path / "nowhere", "is not there"),
    ):
        with pytest.raises(ConfigError, match=fault):
            eval_compare.run([str(entry)])
