"""A checkpoint as a model that runs: built in any layout, its weights loaded, ready for forward passes.

Conversion checks exports with it, decoding and evaluation run on it. Layers are always the local ones: checkpoints of
Transformer Engine's layers have the same names, and local attention can be given a cache.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.core.models.gpt import GPTModel

from card_megatron.checkpoint.contents import load_weights
from card_megatron.checkpoint.source import Source
from card_megatron.config.errors import ConfigError
from card_megatron.config.layout_checks import layout_problems
from card_megatron.config.schema import ParallelConfig, PrecisionConfig, RunConfig
from card_megatron.model import build_model, build_transformer_config, unwrap


def load_model(source: Source, config: RunConfig, *, ema: bool = False) -> GPTModel:
    """This rank's part of the model, in the layout of `config` (see inference_config), in evaluation mode.

    Megatron's groups must be there already (platform.model_parallel). All ranks must call this.
    """
    transformer_config = build_transformer_config(config)
    transformer_config.perform_initialization = False  # the checkpoint has every weight
    chunks = build_model(config, transformer_config)
    load_weights(chunks, source.path, source.prefix(ema=ema))
    (model,) = unwrap(chunks)
    return model.eval().requires_grad_(False)


def inference_config(
    config: RunConfig, *, world_size: int = 1, tensor: int = 1, pipeline: int = 1, dtype: str = "fp32"
) -> RunConfig:
    """The configuration of a trained model, laid out for forward passes alone; refuses what cannot be laid out."""
    parallel = ParallelConfig(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline)
    model = replace(
        config.model,
        spec="local",
        init="megatron",  # which load_model turns off
        recompute_granularity=None,
        recompute_method=None,
        recompute_num_layers=None,
    )
    resolved = replace(config, model=model, parallel=parallel, precision=PrecisionConfig(preset=dtype))  # type: ignore[arg-type]
    if problems := list(layout_problems(resolved, world_size)):
        raise ConfigError("; ".join(problems))
    return resolved
