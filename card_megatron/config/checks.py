"""What cannot run, said before any process group exists: the value, the rule, the remedy.

Each check yields messages; all of them are shown at once, so that a user does not meet them one by one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from card_megatron.config.errors import ConfigError
from card_megatron.config.layout_checks import batch_problems, layout_problems, machine_problems, nearest_multiples
from card_megatron.config.objective_checks import objective_problems
from card_megatron.config.precision_checks import precision_problems
from card_megatron.config.schema import RunConfig


def check(config: RunConfig, *, world_size: int, cuda: bool, transformer_engine: bool = False) -> None:
    """Raise ConfigError with every rule that this run breaks on this many ranks of this machine."""
    problems = [
        *_sizes(config),
        *objective_problems(config),
        *_data(config),
        *_optimizer(config),
        *_reliability(config),
        *_tasks(config),
        *_measuring(config),
    ]
    # the rules below divide by sizes: they are only asked once the sizes make sense
    if not problems:
        problems += [*layout_problems(config, world_size), *batch_problems(config, world_size)]
        problems += [*precision_problems(config)]
        problems += [*machine_problems(config, cuda=cuda, transformer_engine=transformer_engine)]
    _refuse(problems)


def check_sizes(config: RunConfig) -> None:
    """Raise ConfigError unless the sizes make sense, so that others may divide by them."""
    _refuse([*_sizes(config)])


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems[0] if len(problems) == 1 else "\n  - ".join(["this run cannot start:", *problems]))


def _positive(config: RunConfig, section: str, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(getattr(config, section), name)
        if value is not None and value < 1:
            yield f"{section}.{name}={value} must be at least 1"


def _above_zero(config: RunConfig, section: str, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(getattr(config, section), name)
        if not 0 < value < math.inf:
            yield f"{section}.{name}={value} must be positive and finite"


def _sizes(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not 0 <= config.seed < 2**31:
        yield f"seed={config.seed} must lie in [0, 2**31): epochs and ranks add to it"
    if not config.run_dir.strip():
        yield f"run_dir={config.run_dir!r} names no folder; give one, e.g. runs/card"
    yield from _positive(
        config,
        "model",
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("vocab_size", "make_vocab_size_divisible_by", "max_position_embeddings", "num_moe_experts"),
        *("recompute_num_layers", "rotary_base"),
    )
    yield from _above_zero(config, "model", "layernorm_epsilon", "init_method_std")
    if model.rope_scaling is not None:
        yield from _above_zero(config, "model", "rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor")
        yield from _positive(config, "model", "rope_original_max_position_embeddings")
        if not model.rope_low_freq_factor < model.rope_high_freq_factor:
            yield (
                f"model.rope_low_freq_factor={model.rope_low_freq_factor} must be less than "
                f"model.rope_high_freq_factor={model.rope_high_freq_factor}"
            )
    yield from _above_zero(config, "parallel", "distributed_timeout_minutes")
    yield from _positive(
        config,
        "parallel",
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    )
    yield from _positive(config, "train", "train_iters", "train_tokens", "global_batch_size", "micro_batch_size")
    yield from _positive(config, "data", "sequence_length")
    yield from _positive(config, "eval", "samples", "draft_samples")
    if not 0 <= config.eval.drafts < config.data.sequence_length - 1:
        yield (
            f"eval.drafts={config.eval.drafts} must lie between 0 (none) and data.sequence_length - 2 = "
            f"{config.data.sequence_length - 2}"
        )
    yield from _positive(config, "logging", "interval")
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= getattr(model, name) < 1:
            yield f"model.{name}={getattr(model, name)} must lie in [0, 1)"
    if config.data.num_workers < 0:
        yield f"data.num_workers={config.data.num_workers} must be 0 or more"
    if config.eval.interval < 0:
        yield f"eval.interval={config.eval.interval} must be 0 (at the end only) or more"
    if (config.train.train_iters is None) == (config.train.train_tokens is None):
        given = "both" if config.train.train_iters is not None else "neither"
        yield (
            f"{given} of train.train_iters and train.train_tokens given; give exactly one "
            "(a preset's can be taken back with --train.train_tokens null)"
        )
    heads, groups = model.num_attention_heads, model.num_query_groups
    if heads >= 1 and model.kv_channels is None and model.hidden_size % heads:
        yield (
            f"model.hidden_size={model.hidden_size} is not a multiple of model.num_attention_heads={heads}; "
            f"try {nearest_multiples(model.hidden_size, heads)}, or set model.kv_channels"
        )
    if groups is not None and groups >= 1 and heads % groups:
        yield (
            f"model.num_attention_heads={heads} is not a multiple of model.num_query_groups={groups}; "
            f"try {nearest_multiples(heads, groups)} heads, or fewer groups"
        )
    if not 0 <= model.rotary_percent <= 1:
        yield f"model.rotary_percent={model.rotary_percent} must lie in [0, 1]"
    elif heads >= 1:
        width = model.kv_channels or model.hidden_size // heads
        if int(width * model.rotary_percent) % 2:
            yield (
                f"heads of width {width} rotate model.rotary_percent={model.rotary_percent} of it, an odd number; "
                "rotary positions come in pairs: make model.kv_channels or hidden_size / num_attention_heads even"
            )
    if model.recompute_granularity != "full" and (model.recompute_method or model.recompute_num_layers):
        yield (
            f"model.recompute_method={model.recompute_method} and recompute_num_layers={model.recompute_num_layers} "
            "do nothing without model.recompute_granularity=full; set it, or remove them"
        )
    if config.data.sequence_length > model.max_position_embeddings:
        yield (
            f"data.sequence_length={config.data.sequence_length} is longer than "
            f"model.max_position_embeddings={model.max_position_embeddings}; raise the latter"
        )


def _reliability(config: RunConfig) -> Iterator[str]:
    yield from _positive(config, "checkpoint", "interval", "max_pending", "keep_last", "keep_every")
    yield from _positive(config, "guard", "max_bad_steps", "spike_window")
    if config.checkpoint.interval_minutes is not None:
        yield from _above_zero(config, "checkpoint", "interval_minutes")
    for name in ("spike_sigma", "hang_minutes"):
        value = getattr(config.guard, name)
        if not 0 <= value < math.inf:
            yield f"guard.{name}={value} must be 0 (never) or a positive number"
    if config.ema.decay is not None and not 0 <= config.ema.decay < 1:
        yield f"ema.decay={config.ema.decay} must lie in [0, 1), e.g. 0.9999; null keeps no average"
    if config.ema.validate and config.ema.decay is None:
        yield "ema.validate=true has no average to validate with; set ema.decay, e.g. 0.9999"


def _measuring(config: RunConfig) -> Iterator[str]:
    profile, factor = config.profile, config.logging.straggler_factor
    yield from _positive(config, "train", "manual_gc_interval")
    yield from _positive(config, "profile", "step_start")
    if config.guard.flight_recorder < 0:
        yield f"guard.flight_recorder={config.guard.flight_recorder} must be 0 (remember nothing) or more"
    if factor and not 1 < factor < math.inf:
        yield f"logging.straggler_factor={factor} must be more than 1, e.g. 1.25, or 0 (look for none)"
    if profile.step_end < profile.step_start:
        yield f"profile.step_end={profile.step_end} must not be less than profile.step_start={profile.step_start}"
    if profile.tool and (not profile.ranks or min(profile.ranks) < 0):
        yield f"profile.ranks={profile.ranks} must name at least one rank, from 0 on"
    if config.train.deterministic and config.model.transformer.get("cross_entropy_loss_fusion"):
        yield (
            "train.deterministic=true does not go with model.transformer.cross_entropy_loss_fusion=true, whose sums "
            "have no fixed order; drop one of them"
        )


def _tasks(config: RunConfig) -> Iterator[str]:
    given, parallel = config.eval, config.parallel
    yield from _positive(config, "eval", "tasks_limit")
    if given.tasks_interval < 0:
        yield f"eval.tasks_interval={given.tasks_interval} must be 0 (never) or more"
    if bool(given.tasks) != bool(given.tasks_interval):
        yield (
            f"eval.tasks={given.tasks} and eval.tasks_interval={given.tasks_interval} need each other: set both, or "
            "neither and evaluate beside the run (`card eval watch`)"
        )
    if given.tasks and config.data.mock:
        yield "eval.tasks are texts, and data.mock=true has none; drop eval.tasks"
    # the model that scores lives in the run's own groups, and must be laid out as they are
    for name in ("context_parallel_size", "expert_model_parallel_size", "virtual_pipeline_model_parallel_size"):
        if given.tasks and (getattr(parallel, name) or 1) > 1:
            yield (
                f"eval.tasks cannot be evaluated by the ranks of a run with parallel.{name}={getattr(parallel, name)}; "
                "drop them and evaluate beside the run: `card eval watch RUN_DIR --tasks ...`"
            )


def _data(config: RunConfig) -> Iterator[str]:
    data = config.data
    if data.mock and data.train:
        yield "data.mock=true and data.train are both given; mock data needs no files: drop one of them"
    if data.mock and config.model.vocab_size is None:
        yield "data.mock=true has no tokenizer to take the vocabulary from; set model.vocab_size"
    if data.mock and config.model.vocab_size in (1, 2):
        yield (
            f"model.vocab_size={config.model.vocab_size} leaves no token to data.mock=true, which keeps two for [MASK] "
            "and end of document; set 3 or more"
        )
    if not data.mock and not data.train:
        yield "data.train is empty; give prefixes of .bin/.idx files (`card data build` makes them) or data.mock=true"
    if not data.mock and data.tokenizer is None:
        yield "data.tokenizer is not set; give the tokenizer that made data.train"
    for entry in data.train:
        words = entry.split()
        if len(words) not in (1, 2) or (len(words) == 2 and not _is_weight(words[0])):
            yield f"data.train entry {entry!r} is not 'PREFIX' or 'WEIGHT PREFIX' with a positive weight"
    if len({len(entry.split()) for entry in data.train}) > 1:
        yield f"data.train={data.train} mixes entries with and without a weight; give all of them one, or none"
    prefixes = [entry.split()[-1] for entry in data.train if entry.split()]
    for prefix in sorted({prefix for prefix in prefixes if prefixes.count(prefix) > 1}):
        yield f"data.train names {prefix} more than once: both would give the same samples; name it once, with a weight"
    for name, entries in [*data.validation.items(), *data.test.items()]:
        if not entries or any(len(entry.split()) != 1 for entry in entries):
            yield f"held-out set {name}={entries} must be a list of prefixes, without weights: each is read once"
    if data.split is not None:
        share = r"\s*(\d+\.?\d*|\.\d+)\s*"
        if not re.fullmatch(f"{share},{share},{share}", data.split):
            yield f"data.split={data.split!r} is not three shares such as '98,1,1'"
        elif float(data.split.split(",")[0]) <= 0:
            yield f"data.split={data.split!r} leaves nothing to train on"
        if data.validation or data.test:
            yield "data.split and data.validation/data.test are both given; held-out sets come from one of them"


def _is_weight(word: str) -> bool:
    try:
        return 0 < float(word) < math.inf
    except ValueError:
        return False


def _optimizer(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    yield from _above_zero(config, "optimizer", "lr", "adam_eps")
    yield from _positive(config, "optimizer", "lr_decay_iters", "lr_wsd_decay_iters")
    if not 0 <= optimizer.min_lr <= optimizer.lr:
        yield f"optimizer.min_lr={optimizer.min_lr} must lie between 0 and optimizer.lr={optimizer.lr}"
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(optimizer, name) < 1:
            yield f"optimizer.{name}={getattr(optimizer, name)} must lie in [0, 1)"
    for name in ("weight_decay", "clip_grad", "lr_warmup_iters"):
        if not 0 <= getattr(optimizer, name) < math.inf:
            yield f"optimizer.{name}={getattr(optimizer, name)} must be 0 or more, and finite"
    if config.train.train_iters is not None and optimizer.lr_warmup_iters >= config.train.train_iters:
        yield (
            f"optimizer.lr_warmup_iters={optimizer.lr_warmup_iters} does not end within the run's "
            f"train.train_iters={config.train.train_iters}; warm up for fewer steps"
        )
    if optimizer.lr_decay_iters is not None and optimizer.lr_decay_iters <= optimizer.lr_warmup_iters:
        yield (
            f"optimizer.lr_decay_iters={optimizer.lr_decay_iters} must be more than "
            f"optimizer.lr_warmup_iters={optimizer.lr_warmup_iters}"
        )
