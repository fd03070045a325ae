"""Objectives that cannot be trained as asked: values out of range, fields that the objective does not have."""

from __future__ import annotations

import math
from collections.abc import Iterator

from card_megatron.config.schema import ObjectiveConfig, RunConfig

NOISE_LEVELS = {"t_sampler", "t_min", "t_max"}
FIELDS = {
    "arm": {"normalize"},
    "card": {*vars(ObjectiveConfig())} - {"block_size", "masks"},
    "mdlm": {*NOISE_LEVELS, "masks"},
    "bd3lm": {*NOISE_LEVELS, "masks", "block_size"},
}
"""What each objective reads; another field that is set would do nothing, without a word."""
BOUNDS = ("mdlm", "bd3lm")
"""Objectives whose likelihood is a bound."""
WRITTEN_BEFORE = {"t_sampler": "uniform"}
"""Defaults of earlier versions, which stand in the config.yaml of their runs: there they count as not set."""


def objective_problems(config: RunConfig) -> Iterator[str]:
    """Rules of the objective that the run breaks."""
    objective = config.objective
    yield from _values(objective)
    name, defaults = objective.name, vars(ObjectiveConfig())
    for field, value in vars(objective).items():
        unset = value in (defaults[field], WRITTEN_BEFORE.get(field))
        if field != "name" and field not in FIELDS[name] and not unset:
            users = " and ".join(other for other, fields in FIELDS.items() if field in fields)
            yield f"objective.{field}={value} means nothing to objective.name={name} (only to {users}); leave it out"
    if name in BOUNDS:
        yield from _bounds(config)


def _values(objective: ObjectiveConfig) -> Iterator[str]:
    if not objective.tail_factor >= 1:
        yield f"objective.tail_factor={objective.tail_factor} must be at least 1 (the strict tail); inf is random"
    if not 0 <= objective.decay <= 1:
        yield f"objective.decay={objective.decay} (the paper's p) must lie in [0, 1]"
    if not (objective.beta > 0 and math.isfinite(objective.beta)):
        yield f"objective.beta={objective.beta} must be positive and finite: a clean context has weight 1/beta"
    if not 0 <= objective.t_min <= objective.t_max <= 1:
        yield f"objective.t_min={objective.t_min} and t_max={objective.t_max} must satisfy 0 <= t_min <= t_max <= 1"
    if not 0 <= objective.clean_fraction <= 1:
        yield f"objective.clean_fraction={objective.clean_fraction} must lie in [0, 1]"


def _bounds(config: RunConfig) -> Iterator[str]:
    name, block_size, length = config.objective.name, config.objective.block_size, config.data.sequence_length
    if config.eval.drafts:
        yield (
            f"eval.drafts={config.eval.drafts} drafts by causal prediction, which objective.name={name} does not "
            "learn; set it to 0"
        )
    t_range = config.objective.t_min, config.objective.t_max
    if config.objective.masks == "count" and t_range not in ((0, 1), (1, 1)):
        yield (
            f"objective.t_min={t_range[0]} and t_max={t_range[1]} with masks=count: t is a count over a block's "
            "tokens, rounded up, which leaves the range; set objective.masks=bernoulli"
        )
    if config.data.eod_mask_loss:
        yield (
            f"data.eod_mask_loss=true leaves out predictions from an end-of-document input; objective.name={name} "
            "predicts a token from all the others, and would never mask the first of a document; leave it out"
        )
    window = config.model.transformer.get("window_size")
    if window is not None:
        yield (
            f"model.transformer.window_size={window} is a window of causal attention, which objective.name={name} "
            "does not have; leave it out"
        )
    if name != "bd3lm":
        return
    if not 1 <= block_size <= length or length % block_size:
        divisors = [size for size in range(1, length + 1) if length % size == 0]
        near = min(divisors, key=lambda size: abs(size - block_size), default=1)
        yield (
            f"objective.block_size={block_size} does not divide data.sequence_length={length} into whole blocks; "
            f"try {near}"
        )
    if config.parallel.context_parallel_size > 1:
        yield (
            f"parallel.context_parallel_size={config.parallel.context_parallel_size} cannot cut the [noisy ; clean] "
            "input of objective.name=bd3lm; use tensor with sequence parallelism, and a context size of 1"
        )
    if config.model.attention_dropout:
        yield (
            f"model.attention_dropout={config.model.attention_dropout}: FlexAttention, which objective.name=bd3lm uses "
            "on a GPU, drops nothing; set it to 0 (model.hidden_dropout works)"
        )
