"""Other people's models as judges of texts: plain transformers, their own tokenizers, the text in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from card_megatron.config.errors import ConfigError

LOGITS_OF_A_PASS = 2**26
"""Most logits that a pass may make: 256 MB of them, and as much again for their softmax."""


@dataclass(frozen=True)
class Judged:
    """What a judge thinks of one continuation."""

    nll: float
    tokens: int
    """In the judge's own tokens."""
    truncated: bool
    """The text was longer than the judge's context: tokens on its left were not seen, or not scored."""


class Judge:
    """A causal language model in a Hugging Face folder, whole on every rank."""

    def __init__(self, folder: Path, *, gpu: int = 0):
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise ConfigError("a --scorer needs transformers: pip install -e '.[hf]' in the checkout") from error
        self.folder = folder
        cuda = torch.cuda.is_available()
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            kind: Any = "auto" if cuda else torch.float32
            model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=kind, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--scorer {folder} is no causal language model with a tokenizer: {error}") from error
        self.model = model.eval().requires_grad_(False).to(f"cuda:{gpu}" if cuda else "cpu")
        self.first = first_token(self.tokenizer, folder)
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.longest: int = positions or 2048
        self.vocab_size: int = self.model.get_output_embeddings().weight.shape[0]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def pair(self, prefix: str, continuation: str) -> tuple[list[int], int, bool]:
        """(ids, how many of them are context, whether some were cut) of a text.

        The text is tokenised whole. What it shares with the prefix's own ids is context; so a token that reaches
        over the seam belongs to the continuation.
        """
        alone, whole = self.ids(prefix), self.ids(prefix + continuation)
        shared = next((place for place, (a, b) in enumerate(zip(alone, whole, strict=False)) if a != b), None)
        context = 1 + (min(len(alone), len(whole)) if shared is None else shared)
        ids = [self.first, *whole]
        beyond = max(0, len(ids) - 1 - self.longest)  # the last is predicted and not fed
        return ids[beyond:], max(1, context - beyond), beyond > 0

    def score(
        self, texts: Sequence[tuple[str, str]], progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[Judged]:
        """Of each (prefix, continuation), in order; a continuation without a token of its own has 0 of them."""
        rows = [self.pair(*text) for text in texts]
        found: list[Judged] = [Judged(0.0, 0, cut) for _, _, cut in rows]
        order = sorted(
            (index for index, (ids, context, _) in enumerate(rows) if len(ids) > context),
            key=lambda index: -len(rows[index][0]),
        )
        done = 0
        while done < len(order):
            longest = len(rows[order[done]][0])
            batch = order[done : done + max(1, LOGITS_OF_A_PASS // (longest * self.vocab_size))]
            for index, nll in zip(batch, self._nlls([rows[index][:2] for index in batch]), strict=True):
                ids, context, cut = rows[index]
                found[index] = Judged(nll, len(ids) - context, cut)
            done += len(batch)
            progress(done, len(order))
        return found

    @torch.inference_mode()
    def _nlls(self, rows: list[tuple[list[int], int]]) -> list[float]:
        """Padding stands on the right: a causal model does not see it from what stands before."""
        width = max(len(ids) for ids, _ in rows) - 1
        inputs, seen = torch.full((len(rows), width), self.first), torch.zeros((len(rows), width), dtype=torch.int64)
        for row, (ids, _) in enumerate(rows):
            inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1])
            seen[row, : len(ids) - 1] = 1
        device = self.model.device
        logits = self.model(input_ids=inputs.to(device), attention_mask=seen.to(device), use_cache=False).logits
        nlls = []
        for row, (ids, context) in enumerate(rows):
            logprobs = logits[row, context - 1 : len(ids) - 1].float().log_softmax(1)
            targets = torch.tensor(ids[context:], device=device)
            nlls.append(-float(logprobs.gather(1, targets[:, None]).double().sum()))
        return nlls


def first_token(tokenizer: Any, folder: Path) -> int:
    """What stands before a text: what the tokenizer itself puts there, else the end of the text before."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and tokenizer("a")["input_ids"][:1] == [bos]:
        return bos
    if eos is None and bos is None:
        raise ConfigError(f"--scorer {folder}: its tokenizer has no beginning and no end of text to begin a text with")
    return bos if eos is None else eos
