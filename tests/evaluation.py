"""Small models and folders that the tests of evaluation share."""

from __future__ import annotations

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
