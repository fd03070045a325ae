"""The harness's tasks by name, from the hub or from local files; and the paper's list as the group `card_paper`.

With `--data DIR` a task's prompts are the harness's own, and its documents come from files of one JSON object a line:

    DIR/arc/ARC-Challenge-test.jsonl        {"question", "choices": {"text", "label"}, "answerKey"}, as on the hub;
    DIR/arc/ARC-Easy-test.jsonl             or "choices": [texts] with "gold": index
    DIR/commonsense_qa/validation.jsonl     as on the hub
    DIR/hellaswag/hellaswag_val.jsonl       {"ctx_a", "ctx_b", "activity_label", "endings", "label"}, as on the hub;
                                            or cleaned: {"context", "endings", "gold"}
    DIR/mmlu_redux/mmlu_redux.jsonl         {"subject", "question", "choices", "answer"}; "error_type": ok ones alone
    DIR/piqa/validation_with_labels.jsonl   {"goal", "sol1", "sol2", "label"}
    DIR/sciq/test.jsonl                     {"support", "question", "correct_answer", "distractor1" .. "distractor3"}
    DIR/winogrande/validation.jsonl         {"sentence", "option1", "option2", "answer"}
    DIR/lambada/lambada_test.jsonl          {"text"} (the task lambada_openai; not one of the paper's)

Few-shot examples come from a second file of the same form: arc/ARC-*-validation.jsonl, mmlu_redux/dev.jsonl,
sciq/validation.jsonl, elsewhere train.jsonl in the same folder; and where there is none, from the other documents.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from card_megatron.config.errors import ConfigError

PAPER = "card_paper"
FOLDER = Path(__file__).parent / "tasks"
"""Our own tasks and groups, in the harness's YAML."""
STOCK_FOLDERS = ("arc", "commonsense_qa", "hellaswag", "lambada", "piqa", "sciq", "winogrande")
"""Where the harness keeps the tasks below: reading these alone takes a moment, all of its 14,000 many seconds."""

Row = dict[str, Any]


@dataclass(frozen=True)
class LocalTask:
    """Files of one task below the data folder."""

    documents: str
    examples: str
    row: Callable[[Row], Row] = dict
    """A line of the file as the hub has it."""
    keep: Callable[[Row], bool] = lambda row: True
    overrides: dict[str, Any] = field(default_factory=dict)
    """Of the harness's configuration of the task."""


def arc_row(row: Row) -> Row:
    choices = row["choices"]
    if isinstance(choices, list):
        labels = [chr(ord("A") + place) for place in range(len(choices))]
        return {
            "question": row["question"],
            "choices": {"text": choices, "label": labels},
            "answerKey": labels[row["gold"]],
        }
    return {name: row[name] for name in ("question", "choices", "answerKey")}


def hellaswag_row(row: Row) -> Row:
    """What the harness makes of a row of the hub; a cleaned one is that already."""
    if "context" in row:
        return {"query": row["context"], "choices": row["endings"], "label": str(row["gold"])}
    from lm_eval.tasks.hellaswag.utils import preprocess

    context = row["ctx_a"] + " " + row["ctx_b"].capitalize()
    return {
        "query": preprocess(row["activity_label"] + ": " + context),
        "choices": [preprocess(ending) for ending in row["endings"]],
        "label": str(row["label"]),
    }


def mmlu_redux_row(row: Row) -> Row:
    return {name: row[name] for name in ("subject", "question", "choices", "answer")}


LOCAL = {
    "arc_challenge": LocalTask("arc/ARC-Challenge-test.jsonl", "arc/ARC-Challenge-validation.jsonl", arc_row),
    "arc_easy": LocalTask("arc/ARC-Easy-test.jsonl", "arc/ARC-Easy-validation.jsonl", arc_row),
    "commonsense_qa": LocalTask("commonsense_qa/validation.jsonl", "commonsense_qa/train.jsonl"),
    "hellaswag": LocalTask(
        *("hellaswag/hellaswag_val.jsonl", "hellaswag/train.jsonl"), hellaswag_row, overrides={"process_docs": None}
    ),
    "card_mmlu_redux": LocalTask(
        *("mmlu_redux/mmlu_redux.jsonl", "mmlu_redux/dev.jsonl"),
        mmlu_redux_row,
        lambda row: row.get("error_type", "ok") == "ok",
    ),
    "piqa": LocalTask("piqa/validation_with_labels.jsonl", "piqa/train.jsonl"),
    "sciq": LocalTask("sciq/test.jsonl", "sciq/validation.jsonl"),
    "winogrande": LocalTask("winogrande/validation.jsonl", "winogrande/train.jsonl"),
    "lambada_openai": LocalTask("lambada/lambada_test.jsonl", "lambada/train.jsonl"),
}


@dataclass
class Loaded:
    """Tasks that can be run, and those that were asked for and cannot."""

    tasks: list[Any]
    missing: dict[str, Path] = field(default_factory=dict)
    """Members of a group whose local files are not there."""


def paper_shots() -> dict[str, int]:
    """The paper's tasks and their numbers of examples."""
    import yaml

    group = yaml.safe_load((FOLDER / f"{PAPER}.yaml").read_text(encoding="utf-8"))
    return {member["task"]: member["num_fewshot"] for member in group["task"]}


def load_tasks(names: Sequence[str], data: Path | None = None) -> Loaded:
    """The harness's task objects; refuses names that nobody knows, and data that is not there."""
    if not names:
        raise ConfigError(f"no task is given; --tasks names some, such as {PAPER} or arc_easy,hellaswag")
    if data is not None:
        return local_tasks(names, data)
    manager = task_manager(names)
    refuse_unknown(names, manager.all_tasks)
    try:
        loaded = manager.load(list(names))
    except Exception as error:  # whatever a data set's loading raises, the hub's own errors among it
        raise ConfigError(
            f"{', '.join(names)}: the data could not be loaded ({type(error).__name__}: {error}); "
            "without the hub, --data DIR reads local files"
        ) from error
    return Loaded([*loaded["groups"].values()] or [*loaded["tasks"].values()])


def local_tasks(names: Sequence[str], data: Path) -> Loaded:
    shots: dict[str, int | None] = {}
    missing: dict[str, Path] = {}
    for name in names:
        if name == PAPER:
            for member, count in paper_shots().items():
                if (data / LOCAL[member].documents).is_file():
                    shots[member] = count
                else:
                    missing[member] = data / LOCAL[member].documents
        else:
            refuse_unknown([name], [PAPER, *LOCAL])
            shots[name] = None
    members = [local_member(name, LOCAL[name], data, count) for name, count in shots.items()]
    if not members:
        raise ConfigError(
            f"{data} has no file of {', '.join(names)}; the first would be {next(iter(missing.values()))}"
        )
    manager = task_manager(list(shots))
    return Loaded([*manager.load({"group": "local", "task": members})["tasks"].values()], missing)


def local_member(name: str, task: LocalTask, data: Path, shots: int | None) -> dict[str, Any]:
    """A member of a group: the harness's own configuration of the task, with our documents."""
    if not (data / task.documents).is_file():
        raise ConfigError(f"task {name}: {data / task.documents} is not there; see `card eval --help` for the layout")
    examples = read_rows(data / task.examples, task) if (data / task.examples).is_file() else None
    # examples are said to come from the documents' own split: then none is shown to the document that it is
    sampling: dict[str, Any] = {"split": "test", "process_docs": partial(_examples, examples)}
    if name == "card_mmlu_redux":
        from card_megatron.evaluation.mmlu_redux import SubjectSampler

        sampling["sampler"] = SubjectSampler
    return {
        "task": name,
        "custom_dataset": partial(_documents, data / task.documents, task),
        **{"training_split": None, "validation_split": None, "test_split": "test", "fewshot_split": "test"},
        "fewshot_config": sampling,
        **({} if shots is None else {"num_fewshot": shots}),
        **task.overrides,
    }


def _documents(path: Path, task: LocalTask, **unused: Any) -> dict[str, Any]:
    import datasets

    return {"test": datasets.Dataset.from_list(read_rows(path, task))}


def _examples(examples: list[Row] | None, documents: Any) -> Any:
    return documents if examples is None else examples


def read_rows(path: Path, task: LocalTask) -> list[Row]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):  # and no other line end
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if task.keep(row):
                rows.append(task.row(row))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}:{number} is no document of this task ({type(error).__name__}: {error})"
            ) from error
    if not rows:
        raise ConfigError(f"{path} has no documents")
    return rows


def task_manager(names: Sequence[str]) -> Any:
    """An index of tasks that has all of these, if any has."""
    import lm_eval.tasks

    stock = Path(lm_eval.tasks.__file__).parent
    few = lm_eval.tasks.TaskManager(
        include_path=[*(stock / folder for folder in STOCK_FOLDERS), FOLDER], include_defaults=False
    )
    if set(names) <= set(few.all_tasks):
        return few
    return lm_eval.tasks.TaskManager(include_path=[FOLDER])


def refuse_unknown(names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
            hint = f"did you mean {', '.join(near)}?" if near else f"{PAPER} is the paper's list"
            raise ConfigError(f"unknown task {name!r}; {hint}")
