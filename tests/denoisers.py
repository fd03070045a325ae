"""Small untrained models of masked diffusion, and whole forward passes of training's own path: the slow twins."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.configs import load

MASK, EOD, PAD, VOCAB = 99, 2, 98, 120
POSITIONS = 48
SMALL = (
    f"model.vocab_size={VOCAB}; model.num_layers=2; model.hidden_size=32; model.ffn_hidden_size=48; "
    f"data.sequence_length=48; model.num_query_groups=2; model.max_position_embeddings={POSITIONS}; "
    "model.init_method_std=0.4; objective.name={name}"
)


def built(name: str, block_size: int = 4) -> Any:
    """Equal weights for every objective: the initialisation is keyed."""
    from card_megatron.model import build_model, build_transformer_config

    config = load(SMALL.format(name=name) + (f"; objective.block_size={block_size}" if name == "bd3lm" else ""))
    (model,) = build_model(config, build_transformer_config(config), mask_id=MASK)
    return model.eval().requires_grad_(False)


def opened(name: str, block_size: int = 4) -> Any:
    from card_megatron.decoding.megatron_backend import MegatronBackend
    from card_megatron.decoding.model import OpenModel

    tokenizer: Any = SimpleNamespace(mask=MASK, eod=EOD, vocab_size=VOCAB)
    backend = MegatronBackend(built(name, block_size))
    return OpenModel(backend, tokenizer, name, Path(name), block_size if name == "bd3lm" else None)


def whole_logits(model: Any, noisy: np.ndarray, clean: np.ndarray) -> torch.Tensor:
    """[S, V] of one text by GPTModel's own forward: no cache. bd3lm gets [noisy ; clean], padded to whole blocks."""
    length = len(noisy)
    if model.block_size is not None:
        more = np.full(-length % model.block_size, MASK)
        noisy = np.concatenate([noisy, more, clean, more])
    with torch.no_grad():
        logits = model.backend.model(torch.as_tensor(noisy)[None], None, None)[0, :length, :VOCAB].float()
    logits[:, MASK] = float("-inf")
    return logits


def nll_of(model: Any, tokens: np.ndarray, masked: np.ndarray) -> np.ndarray:
    """nll of every token, where those of `masked` are hidden."""
    logprobs = whole_logits(model, np.where(masked, MASK, tokens), tokens).log_softmax(-1)
    return -logprobs[torch.arange(len(tokens)), torch.as_tensor(tokens)].double().numpy()


def enumerated_bound(model: Any, tokens: np.ndarray, first: int) -> float:
    """The bound of tokens[first:], every set of masks of every block by its probability: nothing is sampled."""
    from tests.unit.test_diffusion import exact_bound

    size = model.block_size or len(tokens)
    total = 0.0
    for start in range(first - first % size, len(tokens), size):
        scored = np.arange(max(start, first), min(start + size, len(tokens)))
        table = {}
        for masks in itertools.product([False, True], repeat=len(scored)):
            masked = np.zeros(len(tokens), bool)
            masked[scored] = masks
            table[masks] = nll_of(model, tokens, masked)[scored]
        total += exact_bound(lambda masks, table=table: table[tuple(masks.tolist())], len(scored))
    return total


def slow_denoise(
    model: Any, prompt: list[int], new: int, *, block: int | None, steps: int | None, order: list[float] | None
) -> tuple[list[int], list[int]]:
    """The definition, greedy: a whole forward a pass; tokens and the pass that decided each. `order`: of positions."""
    text = np.array([*prompt, *[MASK] * new])
    first, passes, decided_in = len(prompt), 0, np.zeros(len(text), int)
    while first < len(text):
        size = block or len(text)
        end = first + size if model.block_size is None else (first // size + 1) * size
        stop = min(end, len(text))
        count, done = stop - first, 0
        planned = min(count, steps or count)
        for step in range(1, planned + 1):
            passes += 1
            fed = text if model.block_size is None else text[:stop]
            logits = whole_logits(model, fed, fed)
            logits[:, PAD] = float("-inf")
            places = [place for place in range(first, stop) if text[place] == MASK]
            sure = logits.softmax(-1).amax(-1)
            places.sort(key=lambda place: -float(sure[place]) if order is None else order[place])
            due = int(np.ceil(count * step / planned - 1e-9))
            for place in places[: due - done]:
                text[place], decided_in[place] = int(logits[place].argmax()), passes
            done = due
        if EOD in text[first:stop]:
            stop = first + text[first:stop].tolist().index(EOD) + 1
            text = text[:stop]
        first = stop
    return text[len(prompt) :].tolist(), decided_in[len(prompt) : len(text)].tolist()
