"""A model by its path: a Megatron checkpoint on the ranks that are there, or an exported folder; ready for passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from card_megatron.checkpoint.source import open_source
from card_megatron.config.errors import ConfigError
from card_megatron.config.precision import resolve_precision
from card_megatron.config.schema import ObjectiveConfig
from card_megatron.data.tokenizers import MockTokenizer, Tokenizer, load_tokenizer, never_text, tokenizer_of
from card_megatron.decoding.engine import Backend
from card_megatron.objectives import OBJECTIVES
from card_megatron.platform import Ranks, install, model_parallel, ranks_from_environment
from card_megatron.platform.ranks import gpu_of, init_process_group


@dataclass(frozen=True)
class OpenModel:
    """A model, its tokenizer, and this rank's place among the replicas that share out work."""

    backend: Backend
    tokenizer: Tokenizer
    objective: str
    """Of its training; an exported folder does not say, and is taken for card where it has a [MASK]."""
    path: Path
    """The checkpoint or folder that was opened."""
    block_size: int | None = None
    """Of block diffusion: the blocks that the model was trained to denoise."""
    replica: int = 0
    replicas: int = 1
    speaks: bool = True
    """True on one rank of all: the one that prints and writes."""
    leads: bool = True
    """True on one rank of each replica."""

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Ids that no text may contain, beside [MASK]: padding, and those that the tokenizer does not have."""
        return never_text(self.tokenizer, self.backend.vocab_size)


def block_size_of(objective: ObjectiveConfig) -> int | None:
    return objective.block_size if OBJECTIVES[objective.name].attention == "block" else None


def is_hf_folder(path: Path) -> bool:
    return (path / "config.json").is_file()


@contextlib.contextmanager
def open_model(
    path: str | Path,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    ema: bool = False,
    dtype: str | None = None,
    tokenizer: str | None = None,
) -> Iterator[OpenModel]:
    """Every rank opens its part; ranks beyond tensor x pipeline are further replicas. dtype None: fp32 on a CPU, and
    what the model was trained in on a GPU."""
    install()
    ranks, folder = ranks_from_environment(), Path(path)
    if is_hf_folder(folder):
        if ema or tensor * pipeline > 1:
            raise ConfigError(
                f"{folder} is an exported folder: whole on every rank, without averaged weights; "
                "leave out --ema and the tensor and pipeline sizes, or give a Megatron checkpoint"
            )
        with _joined(ranks):
            yield _open_hf(folder, ranks, dtype, tokenizer)
    else:
        yield from _open_megatron(folder, ranks, tensor, pipeline, ema, dtype, tokenizer)


def _open_megatron(
    path: Path, ranks: Ranks, tensor: int, pipeline: int, ema: bool, dtype: str | None, tokenizer: str | None
) -> Iterator[OpenModel]:
    from megatron.core import parallel_state

    from card_megatron.decoding.megatron_backend import MegatronBackend
    from card_megatron.inference import inference_config, load_model

    source = open_source(path, None if tokenizer is None else load_tokenizer(tokenizer).vocab_size)
    dtype = dtype or (resolve_precision(source.config.precision).params_dtype if torch.cuda.is_available() else "fp32")
    config = inference_config(source.config, world_size=ranks.world_size, tensor=tensor, pipeline=pipeline, dtype=dtype)
    known = tokenizer_of(source.config, tokenizer, source.tokenizer)
    if known is None and not source.config.data.mock:
        raise ConfigError(f"{path} does not say which tokenizer its model has; give it: --tokenizer")
    known = known or MockTokenizer(source.config.model.vocab_size or 0)
    with model_parallel(ranks, config.parallel):
        model = load_model(source, config, ema=ema)
        in_replica = parallel_state.get_tensor_model_parallel_rank() + parallel_state.get_pipeline_model_parallel_rank()
        yield OpenModel(
            MegatronBackend(model),
            known,
            source.config.objective.name,
            source.path,
            block_size_of(source.config.objective),
            replica=parallel_state.get_data_parallel_rank(),
            replicas=parallel_state.get_data_parallel_world_size(),
            speaks=ranks.rank == 0,
            leads=in_replica == 0,
        )


def _open_hf(folder: Path, ranks: Ranks, dtype: str | None, tokenizer: str | None) -> OpenModel:
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError("an exported folder needs transformers: pip install -e '.[hf]' in the checkout") from error
    from card_megatron.decoding.hf_backend import HFBackend

    logging.disable_progress_bar()
    kinds: dict[str | None, Any] = {"fp32": torch.float32, "bf16": torch.bfloat16}
    kind = kinds.get(dtype, "auto" if torch.cuda.is_available() else torch.float32)
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=kind, local_files_only=True).eval()
    if torch.cuda.is_available():
        model = model.to(f"cuda:{gpu_of(ranks)}")
    known = load_tokenizer(tokenizer or folder)
    if known.vocab_size > model.config.vocab_size:
        raise ConfigError(
            f"tokenizer {tokenizer or folder} has {known.vocab_size} pieces and the model {model.config.vocab_size} "
            "rows; give the tokenizer that the model was trained with: --tokenizer"
        )
    try:
        backend = HFBackend(model)
    except ValueError as error:
        raise ConfigError(f"{folder}: {error}") from error
    objective = "card" if getattr(model.config, "mask_token_id", None) is not None else "arm"
    return OpenModel(backend, known, objective, folder, None, ranks.rank, ranks.world_size, ranks.rank == 0, leads=True)


@contextlib.contextmanager
def _joined(ranks: Ranks) -> Iterator[None]:
    """Ranks that share out work must be able to put it together again."""
    there_before = torch.distributed.is_initialized()
    init_process_group(ranks)
    try:
        yield
    finally:
        if not there_before:
            torch.distributed.destroy_process_group()
