"""A small trained model in both formats, and small tasks of every kind, for the tests of evaluation."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

WORDS = (
    "the",
    "a",
    "of",
    "to",
    "in",
    "file",
    "name",
    "list",
    "value",
    "object",
    "string",
    "returns",
    "is",
    "not",
    "for",
)


def trained_model(corpus: Path, folder: Path) -> tuple[Path, Path]:
    """(run directory, exported folder) of a model that was hardly trained, and whose texts are not all the same."""
    from card_megatron.checkpoint.source import open_source
    from card_megatron.convert.to_hf import to_hf
    from card_megatron.data.tokenizers import load_tokenizer
    from card_megatron.platform import Ranks
    from card_megatron.training.run import train_run
    from tests.curves import tiny_config

    options = ["--train.train_iters=2", "--optimizer.lr_warmup_iters=0", "--model.init_method_std=0.5"]
    train_run(
        tiny_config(corpus, folder / "run", *options, "--model.max_position_embeddings=96"), Ranks(), console=False
    )
    source = open_source(folder / "run")
    to_hf(source, folder / "hf", load_tokenizer(corpus / "tokenizer.model"), verify=False, say=lambda text: None)
    return folder / "run", folder / "hf"


def trained_diffusion(corpus: Path, folder: Path, *also: str) -> dict[str, Path]:
    """Run directories of mdlm and bd3lm (and others), hardly trained, with outputs that are not all alike."""
    from card_megatron.platform import Ranks
    from card_megatron.training.run import train_run
    from tests.curves import tiny_config

    options = ["--train.train_iters=2", "--optimizer.lr_warmup_iters=0", "--model.init_method_std=0.5"]
    own: dict[str, list[str]] = {"mdlm": [], "bd3lm": ["--objective.block_size=8"], **{name: [] for name in also}}
    for name, more in own.items():
        config = tiny_config(corpus, folder / name, *options, *more, f"--objective.name={name}")
        train_run(config, Ranks(), console=False)
    return {name: folder / name for name in own}


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tasks(folder: Path, documents: int = 12) -> list[str]:
    """YAML files of the harness: multiple choice (with few-shot examples), rolling likelihood, generated text."""
    rng = random.Random(0)
    write_lines(
        folder / "choice.jsonl",
        [
            {
                "question": sentence(rng, rng.randrange(3, 30)) + " " * (number % 2),  # white space at its end
                "endings": [sentence(rng, rng.randrange(1, 9)) for _ in range(4)],
                "label": rng.randrange(4),
            }
            for number in range(documents)
        ],
    )
    # longer than the model's context, shorter, and one without a context at all
    write_lines(folder / "text.jsonl", [{"text": sentence(rng, words)} for words in (3, 150, 40, 1)])
    bodies = {
        "tiny_choice": ("choice", "multiple_choice", ["acc", "acc_norm"], "{{question}}", "{{label}}"),
        "tiny_empty": ("choice", "multiple_choice", ["acc"], "", "{{label}}"),
        "tiny_rolling": ("text", "loglikelihood_rolling", ["word_perplexity", "byte_perplexity"], "", "{{text}}"),
        "tiny_generate": ("choice", "generate_until", ["exact_match"], "{{question}}", "{{endings[0]}}"),
    }
    for name, (data, kind, metrics, text, target) in bodies.items():
        body = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / f"{data}.jsonl")}},
            "test_split": "test",
            "fewshot_split": "test",
            "output_type": kind,
            "doc_to_text": text,
            "doc_to_target": target,
            "metric_list": [{"metric": metric} for metric in metrics],
            "num_fewshot": 2 if name == "tiny_choice" else 0,
            **({"doc_to_choice": "{{endings}}"} if kind == "multiple_choice" else {}),
        }
        if kind == "generate_until":
            body["generation_kwargs"] = {"until": ["\n\n", " of"], "max_gen_toks": 24, "do_sample": False}
        (folder / f"{name}.yaml").write_text(json.dumps(body), encoding="utf-8")  # JSON is YAML
    return [str(folder / f"{name}.yaml") for name in bodies]


def some_pairs(vocab_size: int, longest: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Endings of one context, contexts with a common beginning, equal pairs, and some that are too long."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    shots, pairs = tokens(longest // 3), []
    for number in range(12):
        context = (shots if number % 2 else []) + tokens(rng.randrange(1, longest // 3))
        endings = [tokens(rng.randrange(1, longest // 6)) for _ in range(4)]
        pairs += [(context, ending) for ending in endings]
        pairs.append((context, endings[0]))
        pairs.append((context, endings[1][:1]))
        pairs.append((context + endings[2], endings[3]))
    pairs += [(tokens(longest), tokens(5)), (tokens(longest - 5), tokens(5)), (tokens(longest - 4), tokens(5))]
    pairs += [(tokens(3 * longest), tokens(longest)), (tokens(1), tokens(longest))]
    rng.shuffle(pairs)
    return pairs


@torch.no_grad()
def whole_forward_scores(model: Any, pairs: Any, max_length: int, vocab_size: int) -> list[tuple[np.ndarray, bool]]:
    """(log-probability of each token, greedy) by transformers alone: no cache, no batch, no sharing."""
    found = []
    for context, continuation in pairs:
        tokens = [*context, *continuation][-(max_length + 1) :]
        logits = model(torch.tensor([tokens[:-1]])).logits[0, -len(continuation) :, :vocab_size].float()
        targets = torch.tensor(continuation)
        of_tokens = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        found.append((of_tokens.double().numpy(), bool((logits.argmax(-1) == targets).all())))
    return found
