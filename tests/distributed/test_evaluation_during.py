"""Tasks that a run evaluates on its own ranks, in a layout that evaluation alone would not have."""

from __future__ import annotations

from card_megatron.checkpoint import folder
from card_megatron.testing import run_distributed
from tests.evaluation import records, scores_of, train_with_tasks, write_documents


def test_ranks_of_a_layout_evaluate_together(corpus, tmp_path):
    documents, run_dir = write_documents(tmp_path), tmp_path / "run"
    options = ["--train.train_iters=4", "--eval.tasks_interval=4", "--eval.tasks=[hellaswag]"]
    options += [f"--eval.tasks_data={documents}", "--parallel.tensor_model_parallel_size=2"]
    options += ["--parallel.sequence_parallel=true", "--parallel.pipeline_model_parallel_size=2"]
    run_distributed(train_with_tasks, 4, corpus, run_dir, options, timeout=240)
    (found,) = records(run_dir, "tasks")
    assert found == {"step": 4, "tasks": scores_of(folder.final_path(run_dir, 4), documents)}
