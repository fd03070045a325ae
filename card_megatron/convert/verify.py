"""Is the inference format the same model? Log-probabilities of Megatron and of transformers, side by side."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from card_megatron.checkpoint.source import Source
from card_megatron.config.errors import CheckpointError
from card_megatron.platform import Ranks, install, model_parallel

TOLERANCE = 1e-4
ROWS, LONGEST = 2, 64


@dataclass(frozen=True)
class Comparison:
    """Largest absolute difference of a log-probability, on clean and on masked inputs."""

    clean: float
    masked: float | None
    """None where the model has no [MASK]."""
    positions: int

    @property
    def worst(self) -> float:
        return max(self.clean, self.masked or 0.0)

    def __str__(self) -> str:
        masked = "no [MASK] to try" if self.masked is None else f"masked {self.masked:.1e}"
        return f"log-probabilities at {self.positions} positions differ by at most: clean {self.clean:.1e}, {masked}"


def compare(
    source: Source, folder: Path, *, ema: bool, dtype: torch.dtype | None, tokens: torch.Tensor, mask: int | None
) -> Comparison:
    """Run both in fp32, from weights rounded to `dtype` where one is given; one model is in memory at a time.

    `tokens`: ids that both know. Raises CheckpointError above the tolerance, or where tensors do not match.
    """
    inputs = make_inputs(tokens, source.config.model.max_position_embeddings, mask)
    ours = megatron_scores(source, inputs, tokens, ema=ema, dtype=dtype)
    gc.collect()
    theirs = transformers_scores(folder, inputs, tokens, dtype)
    worst = [float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True)]
    comparison = Comparison(worst[0], worst[1] if mask is not None else None, inputs[0].numel())
    if not all(bool(scores.isfinite().all()) for scores in (*ours, *theirs)):
        raise CheckpointError(
            "the weights give log-probabilities that are not finite: nothing can be compared. Look at the run's "
            "metrics, or --no-verify to convert them as they are"
        )
    if not comparison.worst <= TOLERANCE:
        raise CheckpointError(
            f"the conversion is wrong: {comparison}; {TOLERANCE:.0e} is allowed. Nothing was written; please report it"
        )
    return comparison


def make_inputs(tokens: torch.Tensor, longest: int, mask: int | None) -> list[torch.Tensor]:
    """Random tokens and, where there is a [MASK], the same with a partly masked tail."""
    generator = torch.Generator().manual_seed(0)
    clean = tokens[torch.randint(len(tokens), (ROWS, min(LONGEST, longest)), generator=generator)]
    if mask is None:
        return [clean]
    tail = torch.arange(clean.shape[1]) >= clean.shape[1] // 2
    masked = tail & (torch.rand(clean.shape, generator=generator) < 0.7)
    return [clean, clean.masked_fill(masked, mask)]


@torch.inference_mode()
def megatron_scores(
    source: Source, inputs: list[torch.Tensor], tokens: torch.Tensor, *, ema: bool, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Log-probabilities [B, S, V] of a checkpoint, by Megatron's own loader and model."""
    install()
    from card_megatron.inference import inference_config, load_model

    config = inference_config(source.config)
    with model_parallel(Ranks(), config.parallel):
        model = load_model(source, config, ema=ema)
        _round(model, dtype)
        device = next(model.parameters()).device
        return [_scores(model(batch.to(device), None, None), tokens) for batch in inputs]


@torch.inference_mode()
def transformers_scores(
    folder: Path, inputs: list[torch.Tensor], tokens: torch.Tensor, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """The same by transformers, as any user would load it."""
    transformers = import_transformers()
    transformers.utils.logging.disable_progress_bar()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    if problems := {kind: sorted(map(str, names)) for kind, names in info.items() if names}:
        raise CheckpointError(f"transformers finds the tensors of {folder.name} wrong: {problems}")
    _round(model, dtype)
    return [_scores(model.eval()(batch).logits, tokens) for batch in inputs]


def _round(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Parameters as they are once they were stored as `dtype`."""
    if dtype is not None:
        for param in model.parameters():
            param.copy_(param.to(dtype))


def _scores(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.cpu()[..., tokens].float(), dim=-1)


def import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError(
            "checking a conversion needs transformers: pip install -e '.[hf]' in the checkout, or give --no-verify"
        ) from error
    return transformers
