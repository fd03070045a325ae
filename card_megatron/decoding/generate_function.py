"""`generate` for plain transformers: model.generate(ids, custom_generate=FOLDER, trust_remote_code=True, ...).

Exported folders carry this file, with those that it needs, as custom_generate/generate.py. Beside the arguments of
transformers' own generate (max_new_tokens, do_sample, temperature, top_k, top_p, min_p, repetition_penalty,
eos_token_id, pad_token_id) it takes:

    strategy     verify (exactly the text of one token a pass), confidence (the paper's), ar (one token a pass)
    block_size, tau, max_passes, commit, min_fill      of confidence
    drafts, adaptive, branches                         of verify
    seed         of the first row; the next row has the next. Sampling is a function of it, not of torch's generator
    batch_size   rows that grow side by side (default: all)
    return_stats also return what it cost
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from card_megatron.decoding.block import Confidence, Strategy, autoregressive
from card_megatron.decoding.engine import Request, decode
from card_megatron.decoding.hf_backend import HFBackend
from card_megatron.decoding.sampling import SamplingParams
from card_megatron.decoding.verify import Verify

NO_EFFECT = {"use_cache", "synced_gpus", "trust_remote_code", "custom_generate", "transformers_version", "bos_token_id"}
"""Arguments of transformers that may be given and change nothing here."""


def generate(
    model: Any,
    inputs: Any = None,
    generation_config: Any = None,
    *,
    input_ids: Any = None,
    attention_mask: Any = None,
    strategy: str = "verify",
    block_size: int = 16,
    tau: float = 0.9,
    max_passes: int = 16,
    commit: str = "block",
    min_fill: int = 1,
    drafts: int = 8,
    adaptive: bool = True,
    branches: bool = False,
    seed: int = 0,
    batch_size: int | None = None,
    mask_token_id: int | None = None,
    return_stats: bool = False,
    **given: Any,
) -> Any:
    """[rows, length]: each prompt as it was given, its continuation behind it, padding behind that."""
    ids = inputs if input_ids is None else input_ids
    if ids is None:
        raise ValueError("no prompt: give input_ids; an empty text begins with the end-of-text token")
    option = _options(model, generation_config, given)
    mask = mask_token_id if mask_token_id is not None else getattr(model.config, "mask_token_id", None)
    if mask is None:
        raise ValueError("the model's config.json names no mask_token_id; give mask_token_id")
    known: dict[str, Callable[[], Strategy]] = {
        "ar": autoregressive,
        "confidence": lambda: Confidence(block_size, tau, max_passes, commit, min_fill),
        "verify": lambda: Verify(drafts, adaptive, branches),
    }
    if strategy not in known:
        raise ValueError(f"strategy={strategy!r} must be one of {', '.join(known)}")
    eos = option("eos_token_id", ())
    eos_ids = tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
    real = torch.ones_like(ids) if attention_mask is None else attention_mask
    prompts = [row[keep.bool()].tolist() for row, keep in zip(ids, real, strict=True)]
    longest = option("max_length", None)
    limits = [int(option("max_new_tokens", None) or (longest - len(prompt) if longest else 20)) for prompt in prompts]
    temperature = float(option("temperature", 1.0)) if option("do_sample", False) else 0.0
    requests = [
        Request(
            prompt,
            limit,
            sampling=SamplingParams(
                temperature=temperature,
                top_k=int(option("top_k", 0)) if temperature else 0,
                top_p=float(option("top_p", 1.0)) if temperature else 1.0,
                min_p=float(option("min_p", 0.0)) if temperature else 0.0,
                repetition_penalty=float(option("repetition_penalty", 1.0)),
                seed=seed + number,
            ),
            eos_ids=eos_ids,
        )
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    pad = option("pad_token_id", None)
    never = [int(token) for token in option("suppress_tokens", ()) if token not in eos_ids]
    if pad is not None and pad not in eos_ids:
        never.append(int(pad))
    pad = pad if pad is not None else (eos_ids[0] if eos_ids else 0)
    results, stats = decode(
        HFBackend(model),
        requests,
        known[strategy](),
        mask_id=mask,
        forbidden=never,
        batch_size=batch_size or len(requests),
    )
    width = max(len(result.tokens) for result in results)
    rows = [result.tokens + [pad] * (width - len(result.tokens)) for result in results]
    texts = torch.cat([ids, torch.tensor(rows, dtype=ids.dtype, device=ids.device)], dim=1)
    return (texts, stats) if return_stats else texts


def _options(model: Any, generation_config: Any, given: dict[str, Any]) -> Any:
    """Looks an option up: what was given, then the call's generation_config, then the model's. Refuses the unknown."""
    known = {"max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "min_p"}
    known |= {"repetition_penalty", "eos_token_id", "pad_token_id", "suppress_tokens"}
    asked = dict(given) if generation_config is None else {**generation_config.to_diff_dict(), **given}
    for name, value in asked.items():
        private = name.startswith("_")
        if name not in known | NO_EFFECT and not private and value is not None and value is not False:
            raise ValueError(f"{name}={value!r} is not supported by CARD decoding; known: {', '.join(sorted(known))}")

    def look(name: str, default: Any) -> Any:
        for place in (given.get(name), *(getattr(c, name, None) for c in (generation_config, model.generation_config))):
            if place is not None:
                return place
        return default

    return look
