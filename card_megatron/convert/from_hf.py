"""A Hugging Face folder of the Llama family -> a checkpoint that any layout starts from, a tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import yaml

from card_megatron.checkpoint.manifest import MANIFEST, Manifest, describe_file
from card_megatron.checkpoint.source import open_source
from card_megatron.config.derived import parameter_count
from card_megatron.config.errors import CheckpointError, ConfigError
from card_megatron.config.schema import DataConfig, ModelConfig, PrecisionConfig, RunConfig
from card_megatron.convert.dcp_folder import write_checkpoint
from card_megatron.convert.hf_config import from_hf_config
from card_megatron.convert.mapping import Sizes, Weight, refuse_misfits, weights_of
from card_megatron.convert.output import whole_folder
from card_megatron.convert.safetensors_folder import SafetensorsFolder
from card_megatron.convert.to_hf import TORCH_DTYPES
from card_megatron.convert.verify import Comparison, compare
from card_megatron.data.tokenizer_training import copy_with_mask
from card_megatron.data.tokenizers import facts_of, gpt2_files, load_tokenizer

RUN_FILE = "run.yaml"
"""In the output: the fields that a run which starts from it needs."""
START = (RUN_FILE, ".metadata")
"""What a folder has that an import may replace."""


@dataclass(frozen=True)
class Imported:
    """What was written, and what was added."""

    model: ModelConfig
    mask: int | None
    mask_is_new: bool
    new_rows: int
    """Rows that the embedding gained."""
    comparison: Comparison | None


def from_hf(
    source: Path,
    output: Path,
    *,
    tokenizer: str | None = None,
    dtype: str | None = None,
    verify: bool = True,
    force: bool = False,
    progress: Callable[[int, int], object] = lambda done, total: None,
    say: Callable[[str], object] = print,
) -> Imported:
    """Write OUTPUT, whole or not at all. A tokenizer without [MASK] gets one, and the model a row for it."""
    hf_config = read_json(source / "config.json")
    theirs = from_hf_config(hf_config)
    assert theirs.vocab_size is not None
    lacking = output_biases(theirs) if "Qwen2ForCausalLM" in hf_config["architectures"] else []
    tensors = Tensors(source, {name: (theirs.hidden_size,) for name in lacking})
    tensors.refuse_misfits(theirs, source)
    with whole_folder(output, source, force=force, may_replace=START) as folder:
        name, known = _tokenizer_with_mask(source, tokenizer, folder)
        added = known is not None and known.new_mask
        mask = known.facts["mask"] if known is not None else hf_config.get("mask_token_id")
        model = replace(theirs, vocab_size=max(theirs.vocab_size, -1 if mask is None else mask + 1))
        weights, sizes = weights_of(model), Sizes.of(model)
        chosen = None if dtype is None else TORCH_DTYPES[dtype]

        def dtype_of(weight: Weight) -> torch.dtype:
            return chosen or tensors.dtype(weight.hf[0])

        total = sum(torch.Size(weight.megatron_shape).numel() * dtype_of(weight).itemsize for weight in weights)
        done = 0

        def make(weight: Weight) -> torch.Tensor:
            parts = [tensors.read(hf) for hf in weight.hf]
            if added and _is_vocabulary(weight):
                parts = [_with_mask_row(parts[0], mask)]
            try:
                return weight.transform.join(parts, sizes)
            except CheckpointError as error:
                raise CheckpointError(f"{source}: {', '.join(weight.hf)}: {error}") from error

        def count(written: int) -> None:
            nonlocal done
            done += written
            progress(done, total)

        write_checkpoint(folder, weights, model.num_layers, dtype_of, make, count)
        half = dtype_of(weights[0]) == torch.bfloat16
        config = RunConfig(
            run_dir=output.name,
            model=model,
            data=DataConfig(tokenizer=None if name is None else str(output.absolute() / name)),
            precision=PrecisionConfig(preset="bf16" if half else "fp32"),
        )
        unknown = {"mask": mask, "eod": hf_config.get("eos_token_id")} if mask is not None else None
        describe_checkpoint(folder, config, unknown if known is None else known.facts)
        comparison = None
        if verify:
            say("comparing with transformers ...")
            # a new [MASK] is a token that the source does not know
            tokens = torch.arange(theirs.vocab_size)
            tokens, known_mask = (tokens[tokens != mask], None) if added else (tokens, mask)
            comparison = compare(open_source(folder), source, ema=False, dtype=chosen, tokens=tokens, mask=known_mask)
    return Imported(model, mask, added, (model.vocab_size or 0) - theirs.vocab_size, comparison)


class Tensors(SafetensorsFolder):
    """The folder's tensors, and zeros in the place of those that its class lacks and Llama has."""

    def __init__(self, folder: Path, zeros: dict[str, tuple[int, ...]]):
        super().__init__(folder)
        self.zeros = zeros

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        yield from self.zeros

    def shape(self, name: str) -> tuple[int, ...]:
        return self.zeros[name] if name in self.zeros else super().shape(name)

    def read(self, name: str) -> torch.Tensor:
        return torch.zeros(self.zeros[name]) if name in self.zeros else super().read(name)

    def refuse_misfits(self, model: ModelConfig, source: Path) -> None:
        """Raise with the names that are missing or unknown, or the first shape that is not what config.json says."""
        weights = weights_of(model)
        found = [name for name in self if not is_ignored(name, model)]
        refuse_misfits([name for weight in weights for name in weight.hf], found, str(source))
        for weight in weights:
            for name, shape in zip(weight.hf, weight.hf_shapes, strict=True):
                if self.shape(name) != shape:
                    raise CheckpointError(
                        f"{source}: {name} has shape {list(self.shape(name))}; config.json says {list(shape)}"
                    )


def is_ignored(name: str, model: ModelConfig) -> bool:
    """Buffers that old versions saved, and a tied output layer that was saved all the same."""
    tied = name == "lm_head.weight" and model.share_embeddings_and_output_weights
    return name.endswith("rotary_emb.inv_freq") or tied


def output_biases(model: ModelConfig) -> list[str]:
    """Names of the biases of attention's output, which Qwen2 does not have."""
    return [name for weight in weights_of(model) for name in weight.hf if name.endswith("o_proj.bias")]


def _is_vocabulary(weight: Weight) -> bool:
    return weight.layer is None and len(weight.megatron_shape) == 2


def _with_mask_row(table: torch.Tensor, mask: int) -> torch.Tensor:
    """The table with a row for [MASK]: the mean of the others, as close to every token as one row can be."""
    mean = table.float().mean(dim=0).to(table.dtype)
    if mask >= len(table):
        table = torch.cat([table, table.new_zeros(mask + 1 - len(table), table.shape[1])])
    table = table.clone()
    table[mask] = mean
    return table


@dataclass(frozen=True)
class Known:
    """A tokenizer that was copied into the output."""

    facts: dict[str, Any]
    new_mask: bool


def _tokenizer_with_mask(source: Path, override: str | None, folder: Path) -> tuple[str | None, Known | None]:
    """(its file in the output, what is known of it); None where the source has no tokenizer."""
    if override is None and not any(source.glob("tokenizer.*")) and not gpt2_files(source):
        return None, None
    path, new = copy_with_mask(override or source, folder)
    tokenizer = load_tokenizer(path)
    if new and tokenizer.mask in (taken := _added_tokens(source)):
        raise ConfigError(
            f"id {tokenizer.mask} of a new [MASK] belongs to {taken[tokenizer.mask]!r}, which {source} adds to its "
            "tokenizer outside of the file; save the tokenizer by transformers (its tokenizer.json has all), and give "
            "it: --tokenizer"
        )
    return path.name, Known(facts_of(tokenizer), new)


def _added_tokens(source: Path) -> dict[int, str]:
    """Tokens that a folder of transformers adds beside its tokenizer's own file."""
    found: dict[int, str] = {}
    if (source / "added_tokens.json").is_file():
        found |= {int(number): token for token, number in read_json(source / "added_tokens.json").items()}
    if (source / "tokenizer_config.json").is_file():
        added = read_json(source / "tokenizer_config.json").get("added_tokens_decoder") or {}
        found |= {int(number): str(token.get("content", token)) for number, token in added.items()}
    return found


def describe_checkpoint(folder: Path, config: RunConfig, tokenizer: dict[str, Any] | None) -> None:
    """The files that make the folder a checkpoint of ours, the manifest last."""
    from card_megatron.platform import install

    install()
    from card_megatron.checkpoint.saver import versions
    from card_megatron.checkpoint.writer import plain_files

    for name, data in plain_files({}).items():
        (folder / name).write_bytes(data)
    fields: dict[str, Any] = {"model": asdict(config.model), "data": {"tokenizer": config.data.tokenizer}}
    if config.data.tokenizer is None:
        del fields["data"]
    (folder / RUN_FILE).write_text(yaml.safe_dump(fields, sort_keys=False), encoding="utf-8")
    names = ["world_size", "tensor", "pipeline", "virtual_pipeline", "context", "expert"]
    manifest = Manifest(
        step=0,
        consumed_samples=0,
        parameters=parameter_count(config.model),
        layout=dict.fromkeys(names, 1),
        config=asdict(config),
        versions=versions(),
        tokenizer=tokenizer,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        files={path.name: describe_file(path) for path in sorted(folder.iterdir())},
    )
    (folder / MANIFEST).write_bytes(manifest.dump())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give the folder of a Hugging Face model") from error
