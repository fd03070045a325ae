"""A checkpoint of any layout -> a Hugging Face folder, in one process, a tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from card_megatron.checkpoint.manifest import problems_of
from card_megatron.checkpoint.source import Source
from card_megatron.config.errors import CheckpointError, ConfigError
from card_megatron.convert.custom_generate import write_custom_generate
from card_megatron.convert.hf_config import DTYPES, to_hf_config
from card_megatron.convert.mapping import Sizes, Weight, weights_of
from card_megatron.convert.model_card import model_card
from card_megatron.convert.output import whole_folder
from card_megatron.convert.reader import WeightReader
from card_megatron.convert.safetensors_folder import Group, write_folder
from card_megatron.convert.tokenizer import encoding_differences, export_tokenizer
from card_megatron.convert.verify import Comparison, compare
from card_megatron.data.tokenizers import Tokenizer, never_text
from card_megatron.objectives import OBJECTIVES

EXPORT = ("config.json", "*.safetensors")
"""What a folder has that an export may replace."""
TORCH_DTYPES = {name: getattr(torch, theirs) for name, theirs in DTYPES.items()}


@dataclass(frozen=True)
class Exported:
    """What was written."""

    bytes: int
    comparison: Comparison | None
    """None where nothing was compared."""


def to_hf(
    source: Source,
    output: Path,
    tokenizer: Tokenizer | None,
    *,
    ema: bool = False,
    dtype: str | None = None,
    shard_bytes: int = 4_000_000_000,
    verify: bool = True,
    force: bool = False,
    progress: Callable[[int, int], object] = lambda done, total: None,
    say: Callable[[str], object] = print,
) -> Exported:
    """Write OUTPUT, whole or not at all. `dtype` None keeps what the checkpoint has; progress() counts in bytes."""
    refuse_not_causal(source)
    model, prefix = source.config.model, source.prefix(ema=ema)
    weights, sizes = weights_of(model), Sizes.of(model)
    reader = WeightReader(source.path, weights, prefix)
    if verify:
        refuse_damaged(source)
    chosen = None if dtype is None else TORCH_DTYPES[dtype]
    config = to_hf_config(
        model,
        dtype=dtype or name_of(reader.dtype(weights[0])),
        eos=None if tokenizer is None else tokenizer.eod,
        mask=mask_of(source, tokenizer),
        pad=None if tokenizer is None else tokenizer.pad,
    )

    def make(weight: Weight) -> list[torch.Tensor]:
        return weight.transform.split(reader.read(weight), sizes)

    groups = [
        Group(weight.hf, weight.hf_shapes, chosen or reader.dtype(weight), lambda weight=weight: make(weight))  # type: ignore[misc]
        for weight in weights
    ]
    total, done = sum(group.bytes for group in groups), 0

    def count(written: int) -> None:
        nonlocal done
        done += written
        progress(done, total)

    with whole_folder(output, source.path, force=force, may_replace=EXPORT) as folder:
        write_folder(folder, groups, shard_bytes, count)
        write_json(folder / "config.json", config)
        write_json(folder / "generation_config.json", generation_config(config, tokenizer))
        if "mask_token_id" in config:
            write_custom_generate(folder)
        if tokenizer is not None:
            export_tokenizer(tokenizer, folder, model_max_length=model.max_position_embeddings)
            if differences := encoding_differences(tokenizer, folder):
                raise CheckpointError("the exported tokenizer encodes otherwise:\n  - " + "\n  - ".join(differences))
        comparison = None
        if verify:
            say("comparing with transformers ...")
            comparison = compare(
                source,
                folder,
                ema=ema,
                dtype=chosen,
                tokens=torch.arange(sizes.vocab),
                mask=config.get("mask_token_id"),
            )
        card = model_card(source, config, output.name, ema=ema, comparison=comparison)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return Exported(total, comparison)


def generation_config(config: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What ends a text, and what never stands in one: transformers' own generate then leaves that out, too."""
    known = {name: config[name] for name in ("eos_token_id", "pad_token_id") if config[name] is not None}
    never = {config["mask_token_id"]} if "mask_token_id" in config else set()
    never |= set() if tokenizer is None else set(never_text(tokenizer, config["vocab_size"]))
    return known | ({"suppress_tokens": sorted(never)} if never else {})


def mask_of(source: Source, tokenizer: Tokenizer | None) -> int | None:
    """The id of [MASK]: the tokenizer's, or the one that the checkpoint remembers."""
    if tokenizer is not None:
        return tokenizer.mask
    return None if source.tokenizer is None else source.tokenizer.get("mask")


def name_of(dtype: torch.dtype) -> str:
    for name, known in TORCH_DTYPES.items():
        if dtype == known:
            return name
    raise ConfigError(f"weights of type {dtype} need --dtype, one of {', '.join(DTYPES)}")


def refuse_not_causal(source: Source) -> None:
    """Every program that reads the folder would take the weights for a causal model's."""
    if OBJECTIVES[source.config.objective.name].attention != "causal":
        raise ConfigError(
            f"{source.path} was trained with objective.name={source.config.objective.name}, whose attention is not "
            "causal; a Hugging Face folder of this kind has no other. Keep it as a Megatron checkpoint"
        )


def refuse_damaged(source: Source) -> None:
    """Compare the checkpoint's files with its manifest, where it has one."""
    if source.manifest is not None and (problems := problems_of(source.path, source.manifest)):
        raise CheckpointError(f"{source.path} is damaged:\n  - " + "\n  - ".join(problems))


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
