"""Models to decode with, and slow decoders that have no cache and no batch: what the fast ones are compared with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

VOCAB, PAD, EOS, MASK = 64, 61, 62, 63
POSITIONS = 256


def untrained(kind: str = "llama"):
    """A small transformers model; grouped queries, sharper than random weights would be."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    classes = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    make_config, make_model = classes[kind]
    torch.manual_seed(3)
    config = make_config(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        pad_token_id=PAD,
        eos_token_id=EOS,
    )
    return make_model(config).eval().requires_grad_(False)


def cycles(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Text that repeats a pattern of 2 to 5 tokens, with a wrong token here and there: guessable, and not always."""
    text = np.empty((rows, length), dtype=np.int64)
    for row in text:
        pattern = rng.integers(0, 40, rng.integers(2, 6))
        row[:] = np.resize(pattern, length)
        wrong = rng.random(length) < 0.08
        row[wrong] = rng.integers(0, 40, wrong.sum())
    return text


def trained_on_cycles(steps: int = 120):
    """A Llama that has learned to go on with a cycle, with masked tails as CARD has them."""
    model = untrained("llama")
    model.apply(lambda module: module.weight.data.mul_(0.2) if isinstance(module, torch.nn.Linear) else None)
    model.train().requires_grad_(True)
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=5e-3), np.random.default_rng(0)
    for _ in range(steps):
        text = torch.from_numpy(cycles(rng, 24, 40))
        inputs = text[:, :-1].clone()
        tail = torch.arange(39) >= 39 - torch.from_numpy(rng.integers(0, 20, (24, 1)))
        inputs[tail & torch.from_numpy(rng.random((24, 39)) < 0.8)] = MASK
        loss = torch.nn.functional.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)


def some_prompts(count: int, shortest: int = 1, longest: int = 200, seed: int = 5) -> list[list[int]]:
    """Beginnings of cycles, of many lengths; the longest and the shortest among them."""
    rng = np.random.default_rng(seed)
    lengths = [longest, shortest, *rng.integers(shortest, longest + 1, count)][:count]
    return [cycles(rng, 1, length)[0].tolist() for length in lengths]


Logits = Callable[[list[int]], torch.Tensor]
"""The logits [S, V] of a whole row of tokens, computed from nothing."""


def whole_forward(model) -> Logits:
    """transformers' own forward pass, without any cache."""

    @torch.no_grad()
    def logits(tokens: list[int]) -> torch.Tensor:
        return allowed(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0])

    return logits


def allowed(logits: torch.Tensor, forbidden: tuple[int, ...] = (MASK, PAD), vocab_size: int = VOCAB) -> torch.Tensor:
    logits = logits[:, :vocab_size].float().clone()
    logits[:, list(forbidden)] = float("-inf")
    return logits


def slow_ar(logits: Logits, prompt: list[int], new: int, eos: int = EOS) -> list[int]:
    """Greedy, one whole forward a token."""
    text = list(prompt)
    while len(text) < len(prompt) + new and (len(text) == len(prompt) or text[-1] != eos):
        text.append(int(logits(text)[-1].argmax()))
    return text[len(prompt) :]


def slow_confidence(
    logits: Logits, prompt: list[int], new: int, *, block: int, tau: float, max_passes: int, commit: str, min_fill: int
) -> tuple[list[int], list[int]]:
    """The definition, one slot at a time; tokens and the pass that filled each."""
    known, filled_in, entered = dict(enumerate(prompt)), {}, {}
    limit, end, passes = len(prompt) + new, len(prompt), 0
    while True:
        first = next(position for position in range(limit + 1) if position not in known)
        if first >= limit:
            break
        if commit == "prefix" or first >= end:
            end = min(first + block, limit)
        open_slots = [position for position in range(first, end) if position not in known]
        for position in open_slots:
            entered.setdefault(position, passes)
        passes += 1
        outputs = logits([known.get(position, MASK) for position in range(end - 1)])
        sure = [p for p in open_slots if outputs[p - 1].softmax(0).max() > tau]
        waited = [p for p in open_slots if passes - entered[p] >= max_passes]
        for position in set(sure + waited) or open_slots[:min_fill]:
            known[position] = int(outputs[position - 1].argmax())
            filled_in[position] = passes
        ends = [p for p in filled_in if p < limit and known[p] == EOS]
        if ends:  # what stands behind the end of the text is no text
            limit = min(ends) + 1
            end = min(end, limit)
            known = {position: token for position, token in known.items() if position < limit}
    positions = range(len(prompt), limit)
    return [known[p] for p in positions], [filled_in[p] for p in positions]


class MarkovBackend:
    """The next token depends on the last one alone, so that every probability is known; [MASK] has a row of its own."""

    max_positions = 64

    def __init__(self, table: torch.Tensor):
        self.table, self.vocab_size = table, table.shape[1]
        self.calls: list[tuple[int, int]] = []
        self.moves: list[tuple[int, int, int]] = []

    def reserve(self, slots: int, capacity: int) -> int:
        return 0

    def forward(self, tokens_BW, starts_B, first_slot, wanted, branches=None):
        self.calls.append(tokens_BW.shape)
        flat = tokens_BW.reshape(-1)
        chosen = flat if wanted is None else flat[wanted]
        return self.table[torch.from_numpy(chosen)].clone() if len(chosen) else None

    def move(self, source, target, length):
        self.moves.append((source, target, length))

    def agree(self, value):
        return value
