"""Small models and folders that the tests of evaluation share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def bytes_llama(seed: int = 0, positions: int = 32) -> Any:
    """A small transformers model of bytes, with sharper outputs than new weights have."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.5,
        eos_token_id=256,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def judge_folder(folder: Path) -> Path:
    """Another model with a tokenizer of its own, whose tokens are not bytes: a GPT-2 with merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "b"), ("ab", "c"), ("o", "w")]
    pieces = [*alphabet, *("".join(merge) for merge in merges)]
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(folder)
    torch.manual_seed(1)
    end = len(pieces)
    config = GPT2Config(
        vocab_size=end + 1,
        n_positions=48,
        n_embd=16,
        n_layer=1,
        n_head=2,
        initializer_range=0.5,
        bos_token_id=end,
        eos_token_id=end,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def write_documents(folder: Path) -> Path:
    """HellaSwag's layout, with six questions about the corpus's own subject; a folder for eval.tasks_data."""
    rows = [
        {
            "context": f"Return the {name} of",
            "endings": ["the file.", "a list of values.", "None", f"its {name} or"],
            "gold": number % 4,
        }
        for number, name in enumerate(["name", "type", "length", "value", "path", "index"])
    ]
    (folder / "hellaswag").mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "hellaswag" / "hellaswag_val.jsonl").write_text(text)
    return folder


def scores_of(checkpoint: Path, documents: Path) -> dict[str, Any]:
    """What an evaluation of its own says of a checkpoint."""
    from card_megatron.decoding.model import open_model
    from card_megatron.evaluation.runner import evaluate_tasks

    with open_model(checkpoint) as model:
        found = evaluate_tasks(model, ["hellaswag"], data=documents)
    assert found is not None
    return found["results"]


def records(run_dir: Path, key: str) -> list[dict[str, Any]]:
    """Records of metrics.jsonl that have a key."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if key in record]


def train_with_tasks(corpus: Path, run_dir: Path, overrides: list[str]) -> None:
    """As one of the ranks that are there; imports nothing of Megatron before it is called."""
    from card_megatron.evaluation.during import DuringTraining
    from card_megatron.platform import ranks_from_environment
    from card_megatron.training.run import train_run
    from tests.curves import tiny_config

    config = tiny_config(corpus, run_dir, *overrides)
    train_run(config, ranks_from_environment(), console=False, score_tasks=DuringTraining(config))
