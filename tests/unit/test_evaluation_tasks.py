"""Tasks by name: the paper's list, local files with the harness's own prompts, and names that nobody knows."""

from __future__ import annotations

import datasets
import pytest
from lm_eval.tasks.hellaswag.utils import process_docs

from card_megatron.config.errors import ConfigError
from card_megatron.evaluation.tasks import LOCAL, PAPER, load_tasks, paper_shots, task_manager
from tests.scoring import write_lines

HUB_HELLASWAG = {"activity_label": "Roof", "ctx_b": "he", "endings": ["[x] a [title] b"] * 4, "label": "2"}
CHOICES = {"text": ["red", "blue", "green", "grey", "pink"], "label": list("ABCDE")}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Every task's files but SciQ's; in both forms where there are two."""
    folder = tmp_path_factory.mktemp("data")
    for kind in ("Challenge", "Easy"):
        plain = [{"question": f"{kind} {n}?", "choices": CHOICES["text"][:4], "gold": n % 4} for n in range(3)]
        write_lines(folder / f"arc/ARC-{kind}-test.jsonl", plain)
        examples = [{"question": f"example {n}?", "choices": CHOICES, "answerKey": "B"} for n in range(40)]
        write_lines(folder / f"arc/ARC-{kind}-validation.jsonl", examples)
    questions = [{"question": f" question {n}? ", "choices": CHOICES, "answerKey": "C"} for n in range(12)]
    write_lines(folder / "commonsense_qa/validation.jsonl", questions)
    cleaned = [{"context": f"Roof: man {n}", "endings": ["a", "b", "c", "d"], "gold": 1} for n in range(3)]
    hub = HUB_HELLASWAG
    write_lines(
        folder / "hellaswag/hellaswag_val.jsonl", [*cleaned, *({**hub, "ctx_a": f"Man {n}."} for n in range(4))]
    )
    mmlu = [
        {"subject": subject, "question": f"{subject} {n}?\u2028", "choices": CHOICES["text"][:4], "answer": n % 4}
        for n in range(8)
        for subject in ("anatomy", "world_religions")
    ]
    faulty = {**mmlu[0], "question": "a faulty one", "error_type": "wrong groundtruth"}
    write_lines(folder / "mmlu_redux/mmlu_redux.jsonl", [faulty, *({**row, "error_type": "ok"} for row in mmlu)])
    write_lines(
        folder / "piqa/validation_with_labels.jsonl",
        [{"goal": f"goal {n}", "sol1": "one", "sol2": "two", "label": n % 2} for n in range(3)],
    )
    write_lines(
        folder / "winogrande/validation.jsonl",
        [{"sentence": f"Ann {n} saw _ there.", "option1": "Bo", "option2": "Cy", "answer": "2"} for n in range(8)],
    )
    write_lines(folder / "lambada/lambada_test.jsonl", [{"text": "one two three"}])
    return folder


def requests_of(name, data, shots=None):
    (task,) = [task for task in load_tasks([name], data).tasks if task.task_name == name]
    task.set_config("num_fewshot", shots or 0)
    task.set_fewshot_seed(1234)
    task.build_all_requests(rank=0, world_size=1)
    return [instance.args for instance in task.instances]


def test_the_papers_list_has_its_shots():
    assert paper_shots() == {
        **{"arc_challenge": 25, "arc_easy": 25, "commonsense_qa": 7, "hellaswag": 3},
        **{"card_mmlu_redux": 5, "piqa": 0, "sciq": 0, "winogrande": 5},
    }
    manager = task_manager([PAPER])
    assert {PAPER, *paper_shots()} <= set(manager.all_tasks) and len(manager.all_tasks) < 200


def test_the_papers_list_runs_from_local_files_and_says_what_is_missing(data):
    loaded = load_tasks([PAPER], data)
    assert {task.task_name: task.config.num_fewshot for task in loaded.tasks} == {
        name: shots for name, shots in paper_shots().items() if name != "sciq"
    }
    assert loaded.missing == {"sciq": data / "sciq/test.jsonl"}


def test_prompts_are_the_harness_own(data):
    easy = requests_of("arc_easy", data)
    assert easy[:2] == [("Question: Easy 0?\nAnswer:", " red"), ("Question: Easy 0?\nAnswer:", " blue")]
    assert len(easy) == 12
    assert requests_of("piqa", data)[1] == ("Question: goal 0\nAnswer:", " two")
    choice = "A. red\nB. blue\nC. green\nD. grey\nE. pink\nAnswer:"
    assert requests_of("commonsense_qa", data)[2] == (f"Question: question 0?\n{choice}", " C")
    swag = requests_of("hellaswag", data)
    assert swag[1] == ("Roof: man 0", " b")
    theirs = process_docs(datasets.Dataset.from_list([{**HUB_HELLASWAG, "ctx_a": "Man 0."}]))[0]
    assert swag[12] == (theirs["query"], f" {theirs['choices'][0]}") and swag[12][0] == "Roof: Man 0. He"
    assert requests_of("winogrande", data)[:2] == [("Ann 0 saw Bo", " there."), ("Ann 0 saw Cy", " there.")]
    assert requests_of("lambada_openai", data) == [("one two", " three")]


def test_examples_are_other_documents_of_the_right_kind(data):
    context = requests_of("arc_challenge", data, 25)[0][0]
    assert context.count("Question: example") == 25 and context.endswith("Question: Challenge 0?\nAnswer:")
    for number, (context, _) in enumerate(requests_of("commonsense_qa", data, 7)[::5]):
        assert context.count("Question:") == 8 and context.count(f"Question: question {number}?") == 1
    contexts = [context for context, _ in requests_of("card_mmlu_redux", data, 5)[::4]]
    assert len(contexts) == 16 and not any("faulty" in context for context in contexts)
    for number, context in enumerate(contexts):
        subject = ("anatomy", "world religions")[number % 2]
        assert context.startswith(f"The following are multiple choice questions (with answers) about {subject}.\n\n")
        own = context.splitlines()[-6]
        assert context.count(subject.replace(" ", "_")) == (7 if number % 2 == 0 else 6) and context.count(own) == 1


def test_what_is_not_there_is_named(data, tmp_path):
    with pytest.raises(ConfigError, match=r"task sciq: .*sciq/test\.jsonl is not there"):
        load_tasks(["sciq"], data)
    with pytest.raises(ConfigError, match=r"has no file of card_paper; the first would be .*ARC-Challenge-test"):
        load_tasks([PAPER], tmp_path)
    with pytest.raises(ConfigError, match=r"unknown task 'arc_esy'; did you mean arc_easy"):
        load_tasks(["arc_esy"], data)
    with pytest.raises(ConfigError, match="no task is given"):
        load_tasks([], data)
    write_lines(tmp_path / LOCAL["piqa"].documents, [{"goal": "g"}])
    (tmp_path / LOCAL["winogrande"].documents).parent.mkdir()
    (tmp_path / LOCAL["winogrande"].documents).write_text('{"sentence": ')
    with pytest.raises(ConfigError, match=r"validation\.jsonl:1 is no document of this task \(JSONDecodeError"):
        load_tasks(["winogrande"], tmp_path)
