"""MMLU-redux as multiple choice: questions of MMLU that were looked through by hand, those without a fault.

The harness gives a sampler the document only where examples come from the documents' own split; so they do here, in
name, and `examples_from_hub` puts MMLU's own examples in their place.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import datasets
from lm_eval.api.samplers import ContextSampler

QUESTIONS = "fxmarty/mmlu-redux-2.0-ok"
"""The hub's set that the harness itself uses, one configuration a subject."""
EXAMPLES = "cais/mmlu"
"""Its split `dev` has five examples of each subject."""


def from_hub(**unused: Any) -> dict[str, datasets.Dataset]:
    questions = [
        {"subject": subject, **{name: row[name] for name in ("question", "choices", "answer")}}
        for subject in datasets.get_dataset_config_names(QUESTIONS)
        for row in datasets.load_dataset(QUESTIONS, subject, split="test")
    ]
    return {"test": datasets.Dataset.from_list(questions)}


def examples_from_hub(unused: datasets.Dataset) -> datasets.Dataset:
    return datasets.load_dataset(EXAMPLES, "all", split="dev")


class SubjectSampler(ContextSampler):
    """The first examples of the document's own subject, the document aside; so all of a subject share a prefix."""

    def sample(self, n: int, eval_doc: Any = None, df: Any = None, **kwargs: Any) -> list[Any]:
        if not hasattr(self, "by_subject"):
            self.by_subject: dict[str, list[Any]] = defaultdict(list)
            for example in self.df:
                self.by_subject[example["subject"]].append(example)
        pool = [example for example in self.by_subject[eval_doc["subject"]] if example != eval_doc]
        if len(pool) < n:
            raise ValueError(f"{eval_doc['subject']} has {len(pool)} examples, and {n} are asked for")
        return pool[:n]
