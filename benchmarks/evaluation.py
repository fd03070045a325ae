"""Speed of evaluation: `card` beside the harness's own `hf` model on the same weights, and two ranks beside one.

    python benchmarks/evaluation.py [--model CHECKPOINT_OR_FOLDER] [--data DIR] [--rounds 3] [--check]

HellaSwag (1,000 items) and ARC-E, zero-shot. Without --model a small model of random weights is made, without --data
documents of the same shape from the documentation that every Python ships: the time does not depend on what the
weights know. A process has one thread; the time is that of the harness's call for all likelihoods, texts in and numbers
out. The three take turns in every round, and ratios are medians over the rounds. Other work on the machine shows in the
ratio of two ranks to one first: leave both cores free.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from card_megatron.config.errors import ConfigError
from card_megatron.platform import install
from card_megatron.testing import run_distributed

BARS = {"card / hf, one rank": 2.0, "card, two ranks / one": 1.7}
WORST_DIFFERENCE = 1e-4
"""Of a log-likelihood."""
TASKS = ("hellaswag", "arc_easy")
ITEMS = {"hellaswag": 1000, "arc_easy": 2376}
MODEL: dict[str, Any] = {
    **{"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True},
}
VOCAB = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="run directory, checkpoint or exported folder")
    parser.add_argument("--data", type=Path, help="folder of local task files (see card_megatron/evaluation/tasks.py)")
    parser.add_argument("--build", type=Path, default=Path("build/evaluation_benchmark"), help="where things are made")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--items", type=int, help="documents of each task (default: 1,000 and all 2,376)")
    parser.add_argument("--hf-batch-size", type=int, default=16)
    parser.add_argument("--check", action="store_true", help="exit with an error where a bar is missed")
    options = parser.parse_args()
    install()
    model = options.model or random_model(options.build / "model")
    exported = exported_folder(model, options.build)
    data = options.data or python_data(options.build / "data")
    items = {task: min(count, options.items or count) for task, count in ITEMS.items()}
    rounds = []
    for number in range(options.rounds):
        rounds.append(
            {
                "hf": run_distributed(measure, 1, "hf", exported, data, items, options.hf_batch_size, timeout=3600)[0],
                "card": run_distributed(measure, 1, "card", exported, data, items, 0, timeout=3600)[0],
                "card, two ranks": run_distributed(measure, 2, "card", exported, data, items, 0, timeout=3600)[0],
            }
        )
        seconds = ", ".join(f"{name} {found['seconds']:.1f} s" for name, found in rounds[-1].items())
        print(f"round {number + 1} of {options.rounds}: {seconds}", flush=True)
    report(rounds, exported, check=options.check)


def measure(kind: str, folder: Path, data: Path, items: dict[str, int], batch_size: int) -> dict[str, Any]:
    """One evaluation in the ranks that are there: seconds of the likelihoods, every one of them, and the metrics."""
    import lm_eval
    import torch
    import torch.distributed as dist

    from card_megatron.decoding.model import open_model
    from card_megatron.evaluation.harness import CardLM
    from card_megatron.evaluation.tasks import load_tasks

    torch.set_num_threads(1)
    with open_model(folder) as opened:
        lm: Any
        if kind == "hf":
            from lm_eval.models.huggingface import HFLM

            lm = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=batch_size)
        else:
            lm = CardLM(model=opened)
        seconds, answers, ask = [], [], lm.loglikelihood

        def timed(requests: list[Any]) -> list[tuple[float, bool]]:
            dist.barrier()
            began = time.perf_counter()
            answers.extend(ask(requests, disable_tqdm=True))
            seconds.append(time.perf_counter() - began)
            return answers

        lm.loglikelihood = timed
        tasks = load_tasks(TASKS, data).tasks
        samples = {task.task_name: list(range(min(items[task.task_name], len(task.eval_docs)))) for task in tasks}
        found = lm_eval.simple_evaluate(lm, tasks=tasks, samples=samples, bootstrap_iters=0, log_samples=False)
        return {
            "seconds": sum(seconds),
            "answers": answers,
            "metrics": None if found is None else {name: values_of(found["results"][name]) for name in TASKS},
            "forwarded": None if kind == "hf" else lm.scorer.forwarded,
        }


def values_of(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name in ("acc,none", "acc_norm,none")}


def report(rounds: list[dict[str, dict[str, Any]]], folder: Path, *, check: bool) -> None:
    def seconds(name: str) -> float:
        return statistics.median(found[name]["seconds"] for found in rounds)

    def ratio(slow: str, fast: str) -> float:
        return statistics.median(found[slow]["seconds"] / found[fast]["seconds"] for found in rounds)

    first = rounds[0]
    requests = len(first["hf"]["answers"])
    ratios = {"card / hf, one rank": ratio("hf", "card"), "card, two ranks / one": ratio("card", "card, two ranks")}
    differences = {
        name: max(
            abs(ours[0] - theirs[0])
            for ours, theirs in zip(first[name]["answers"], first["hf"]["answers"], strict=True)
        )
        for name in ("card", "card, two ranks")
    }
    flags = sum(
        ours[1] != theirs[1] for ours, theirs in zip(first["card"]["answers"], first["hf"]["answers"], strict=True)
    )
    same = all(first[name]["metrics"] == first["hf"]["metrics"] for name in differences)
    table = Table(title=f"{requests:,} requests of {' and '.join(TASKS)}, {folder}; medians of {len(rounds)} rounds")
    for column in ("", "seconds", "requests / s", "tokens fed by the first rank", "largest difference to hf"):
        table.add_column(column, justify="left" if not column else "right")
    for name in ("hf", "card", "card, two ranks"):
        fed, worst = first[name]["forwarded"], differences.get(name)
        table.add_row(
            *(name, f"{seconds(name):.1f}", f"{requests / seconds(name):,.0f}"),
            *("" if fed is None else f"{fed:,}", "" if worst is None else f"{worst:.1e}"),
        )
    Console().print(table)
    for name, found in first["hf"]["metrics"].items():
        print(f"{name}: " + ", ".join(f"{metric.partition(',')[0]} {value:.4f}" for metric, value in found.items()))
    print(f"metrics are the same: {same}; greedy flags that differ: {flags}")
    missed = [name for name, value in ratios.items() if value < BARS[name]]
    for name, value in ratios.items():
        print(f"{name}: {value:.2f} x (bar: {BARS[name]})")
    if not same or max(differences.values()) > WORST_DIFFERENCE:
        missed.append("same scores")
    print(f"missed: {', '.join(missed)}" if missed else "every bar is met")
    if check and missed:
        sys.exit(1)


# ---------------------------------------------------------------- what is measured on


def exported_folder(model: Path, build: Path) -> Path:
    from card_megatron.checkpoint.source import open_source
    from card_megatron.convert.to_hf import to_hf
    from card_megatron.data.tokenizers import load_tokenizer
    from card_megatron.decoding.model import is_hf_folder

    if is_hf_folder(model):
        return model
    source = open_source(model)
    if source.config.data.tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer, so no text can be scored; give an exported folder")
    to_hf(source, build / "exported", load_tokenizer(source.config.data.tokenizer), force=True)
    return build / "exported"


def random_model(folder: Path) -> Path:
    """A small Llama of random weights with a tokenizer of its own."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from card_megatron.convert.tokenizer import export_tokenizer
    from card_megatron.data.python_docs import python_documents
    from card_megatron.data.tokenizer_training import train_sentencepiece
    from card_megatron.data.tokenizers import load_tokenizer

    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    texts = [text[:2000] for text in python_documents()]
    tokenizer = load_tokenizer(train_sentencepiece(texts, folder / "bpe.model", vocab_size=VOCAB))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, initializer_range=0.05, eos_token_id=tokenizer.eod, bos_token_id=None, **MODEL
    )
    config.mask_token_id = tokenizer.mask
    export_tokenizer(tokenizer, folder, model_max_length=MODEL["max_position_embeddings"])
    (folder / "bpe.model").unlink()
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def python_data(folder: Path) -> Path:
    """Documents of about the lengths of HellaSwag's and ARC-E's, in tokens: these words are long ones."""
    from card_megatron.data.python_docs import python_documents

    rng = random.Random(0)
    words = " ".join(python_documents()).split()

    def text(shortest: int, longest: int) -> str:
        start = rng.randrange(len(words) - longest)
        return " ".join(words[start : start + rng.randint(shortest, longest)])

    swag = [
        {"context": text(5, 35), "endings": [text(2, 12) for _ in range(4)], "gold": rng.randrange(4)}
        for _ in range(ITEMS["hellaswag"])
    ]
    easy = [
        {"question": text(4, 25), "choices": [text(1, 5) for _ in range(4)], "gold": rng.randrange(4)}
        for _ in range(ITEMS["arc_easy"])
    ]
    for name, rows in (("hellaswag/hellaswag_val.jsonl", swag), ("arc/ARC-Easy-test.jsonl", easy)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


if __name__ == "__main__":
    main()
