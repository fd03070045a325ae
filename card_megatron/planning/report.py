"""What `card plan` says: the run, its layouts from the fastest down, and the best one in detail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from card_megatron.config.derived import flops_per_token, parameter_count, total_samples, total_steps
from card_megatron.config.errors import ConfigError
from card_megatron.config.precision import resolve_precision
from card_megatron.config.schema import RunConfig
from card_megatron.planning.goodput import Failures, best_interval, expected_goodput, progresses, simulated_goodput
from card_megatron.planning.layouts import USABLE, Layout, Search, estimate, layout_rules, recompute_choices
from card_megatron.planning.memory import GIB
from card_megatron.planning.speed import SLOWDOWN, Cluster, work

KINDS = {
    "matrices": "matrix products",
    "fp8_matrices": "matrix products in FP8",
    "attention": "attention",
    "traffic": "memory traffic",
    "links": "communication, hidden",
    "hops": "latency of reductions",
    "exposed": "communication, exposed",
}


def total_tokens(config: RunConfig) -> int:
    return total_samples(config) * config.data.sequence_length


def hours(layout: Layout) -> float:
    """Of the whole token budget, without failures."""
    return total_tokens(layout.config) / (layout.tokens_per_second * layout.cluster.gpus) / 3600


def head(config: RunConfig, cluster: Cluster, gpu: str) -> Iterator[str]:
    """The numbers that no layout changes."""
    flops, tokens = flops_per_token(config.model, config.data.sequence_length), total_tokens(config)
    count = parameter_count(config.model)
    yield f"model    {count:,} parameters, {flops / 1e9:.2f} GFLOPs a token, forwards and backwards"
    batch = config.train.global_batch_size * config.data.sequence_length
    yield f"run      {tokens:,} tokens in {total_steps(config):,} steps of {batch:,}: {tokens * flops:.2e} FLOPs"
    yield (
        f"cluster  {cluster.gpus} x {gpu}, {cluster.gpus_per_node} a node; "
        f"precision {config.precision.preset}; {cluster.gpu.memory / GIB:.1f} GiB each, {USABLE:.0%} usable"
    )


COLUMNS = ("TP", "PP", "VPP", "CP", "DP", "mbs", "recompute", "GiB", "tokens/s/GPU", "MFU", "hours", "GPU-hours")


def table(layouts: list[Layout]) -> Iterator[str]:
    """One line a layout; MFU is of the bf16 peak."""
    widths = (3, 4, 4, 4, 5, 4, 11, 6, 13, 6, 10, 11)
    yield "  #" + "".join(f"{name:>{width}}" for name, width in zip(COLUMNS, widths, strict=True))
    for number, layout in enumerate(layouts, 1):
        yield f"{number:>3}" + "".join(f"{value:>{width}}" for value, width in zip(_row(layout), widths, strict=True))


def _row(layout: Layout) -> tuple[str, ...]:
    parallel = layout.config.parallel
    return (
        str(parallel.tensor_model_parallel_size),
        str(parallel.pipeline_model_parallel_size),
        str(parallel.virtual_pipeline_model_parallel_size or "-"),
        str(parallel.context_parallel_size),
        str(layout.data_parallel_size),
        str(layout.config.train.micro_batch_size),
        layout.recompute,
        f"{layout.memory.total / GIB:.1f}",
        f"{layout.tokens_per_second:,.0f}",
        f"{layout.mfu:.1%}",
        f"{hours(layout):,.1f}",
        f"{hours(layout) * layout.cluster.gpus:,.0f}",
    )


def count(found: Search) -> Iterator[str]:
    """How many layouts there were, and why the others are not in the table."""
    legal = len(found.fitting) + len(found.too_large)
    yield f"{legal:,} legal layouts, {len(found.fitting):,} fit, {found.refused.total():,} refused"
    if found.too_large:
        smallest = found.too_large[0]
        yield (
            f"  {len(found.too_large):,} do not fit even when every layer is recomputed: {needs(smallest)} and up, "
            f"mostly {largest_item(smallest)}"
        )
    for rule, layouts in found.refused.most_common(4):
        yield f"  {layouts:,} refused: {rule}"


def needs(layout: Layout) -> str:
    return f"{layout.memory.total / GIB:.1f} GiB"


def largest_item(layout: Layout) -> str:
    items = asdict(layout.memory)
    return max(items, key=lambda name: items[name])


def details(layout: Layout) -> Iterator[str]:
    """Where the bytes and the seconds of one layout go."""
    items = {**asdict(layout.memory), "KV cache": 0.0}
    yield "bytes of the fullest GPU, GiB: " + ", ".join(f"{name} {value / GIB:.1f}" for name, value in items.items())
    yield "with recompute: " + ", ".join(
        f"{choice.recompute} {needs(choice)} at {choice.tokens_per_second:,.0f} tokens/s"
        for choice in recomputed(layout)
    )
    ideal = work(layout.config, layout.cluster)
    seconds = {kind: SLOWDOWN[kind] * value for kind, value in ideal.items()}
    step = sum(seconds.values())
    shares = sorted(seconds.items(), key=lambda item: -item[1])
    yield f"a step takes {step:.3f} s: " + ", ".join(
        f"{KINDS[kind]} {value / step:.0%}" for kind, value in shares if value >= 0.005 * step
    )


def recomputed(layout: Layout) -> list[Layout]:
    """The layout with each of the three recompute choices: none, selective, full."""
    choices = [model for model in recompute_choices(layout.config) if model.recompute_method != "block"]
    return [estimate(replace(layout.config, model=model), layout.cluster) for model in choices]


def advice(config: RunConfig, best: Layout) -> Iterator[str]:
    """What else would make the run faster, with what it is expected to bring: only what is legal and fits."""

    def gain(words: str, changed: RunConfig) -> Iterator[str]:
        if layout_rules(changed, best.cluster.gpus):
            return
        layout = estimate(changed, best.cluster)
        if layout.fits:
            faster = layout.tokens_per_second
            yield f"{words}: {faster:,.0f} tokens/s/GPU, {faster / best.tokens_per_second - 1:+.0%}"

    precision, parallel, train = resolve_precision(config.precision), best.config.parallel, best.config.train
    if precision.params_dtype == "fp32" and not precision.emulate:
        bf16 = replace(best.config, precision=replace(config.precision, preset="bf16"))
        yield from gain("precision.preset=bf16 uses the tensor cores", bf16)
    elif precision.params_dtype == "bf16" and not precision.fp8 and best.cluster.gpu.fp8_flops:
        fp8 = replace(best.config, precision=replace(config.precision, preset="fp8_tensorwise"))
        yield from gain("precision.preset=fp8_tensorwise", fp8)
    engine = config.model.spec != "local"
    if parallel.tensor_model_parallel_size > 1 and not parallel.tp_comm_overlap and engine:
        overlapped = replace(best.config, parallel=replace(parallel, tp_comm_overlap=True))
        yield from gain("parallel.tp_comm_overlap=true (Transformer Engine)", overlapped)
    if not (config.parallel.overlap_grad_reduce and config.parallel.overlap_param_gather) and best.cluster.gpus > 1:
        yield "the table takes parallel.overlap_grad_reduce and overlap_param_gather as true; --write sets them"
    rows = train.global_batch_size // best.data_parallel_size
    if rows <= 2:
        larger = replace(best.config, train=replace(train, global_batch_size=2 * train.global_batch_size))
        wider = replace(larger, train=replace(larger.train, micro_batch_size=2 * train.micro_batch_size))
        yield from gain(
            f"a replica has only {rows} sample{'s' if rows > 1 else ''} a step; "
            f"train.global_batch_size={2 * train.global_batch_size} with twice the micro-batch",
            wider,
        )


def goodput(layout: Layout, failures: Failures) -> Iterator[str]:
    """Share of the time that is progress, by checkpoint interval: simulated, and expected by Daly's formula."""
    best = best_interval(failures)
    yield (
        f"a failure every {failures.mtbf / 3600:,.1f} hours; a save costs {failures.save:g} s of training, "
        f"a restart {failures.restart / 60:g} minutes"
    )
    yield f"best interval by Young and Daly: {best / 60:.1f} minutes"
    configured = configured_interval(layout)
    yield (
        f"as configured, at {layout.tokens_per_second:,.0f} tokens/s/GPU: "
        + (f"a save every {configured / 60:.1f} minutes" if configured else "no save but at the end")
    )
    yield ""
    yield f"{'minutes':>8}{'simulated':>11}{'expected':>10}{'hours of the run':>18}"
    intervals = {60.0 * minutes for minutes in (5, 10, 15, 30, 60, 120, 240)} | {best}
    for interval in sorted(intervals | ({configured} if configured else set())):
        marks = [mark for mark, at in ((" best", best), (" configured", configured)) if at == interval]
        if not progresses(interval, failures):
            yield f"{interval / 60:>8.1f}{'no progress: under 2%':>29}" + "".join(marks)
            continue
        share = simulated_goodput(interval, failures)
        yield (
            f"{interval / 60:>8.1f}{share:>11.2%}{expected_goodput(interval, failures):>10.2%}"
            f"{hours(layout) / share:>18,.1f}" + "".join(marks)
        )


def configured_interval(layout: Layout) -> float | None:
    """Seconds between saves, by steps or by minutes, whichever comes first."""
    checkpoint, config = layout.config.checkpoint, layout.config
    step = config.train.global_batch_size * config.data.sequence_length / layout.tokens_per_second / layout.cluster.gpus
    given = [checkpoint.interval * step] if checkpoint.interval else []
    given += [checkpoint.interval_minutes * 60] if checkpoint.interval_minutes else []
    return min(given, default=None)


def refuse_empty(found: Search, cluster: Cluster, gpu: str) -> None:
    """Raise, with what would help, where no layout can run."""
    if found.fitting:
        return
    if found.too_large:
        smallest, usable = found.too_large[0], USABLE * cluster.gpu.memory / GIB
        raise ConfigError(
            f"none of {len(found.too_large):,} layouts fits {cluster.gpus} x {gpu}: the smallest needs "
            f"{needs(smallest)} of {usable:.1f} GiB usable, mostly {largest_item(smallest)}; take more GPUs "
            "(--gpus), larger ones (--gpu h200-141gb), a shorter data.sequence_length or a smaller model"
        )
    rule, layouts = found.refused.most_common(1)[0]
    remedy = (
        "change --gpus or train.global_batch_size so that one divides the other"
        if "batch" in rule
        else "change --gpus, or the sizes that this rule is about"
    )
    raise ConfigError(
        f"none of the {found.refused.total():,} layouts searched is legal on {cluster.gpus} GPUs: {rule} ({layouts:,} "
        f"of them); {remedy}"
    )


def numbers(config: RunConfig) -> dict[str, Any]:
    """What head() says, as numbers."""
    return dict(
        parameters=parameter_count(config.model),
        flops_per_token=flops_per_token(config.model, config.data.sequence_length),
        tokens=total_tokens(config),
        steps=total_steps(config),
    )


def as_json(layout: Layout) -> dict[str, Any]:
    """One layout as numbers: bytes, tokens a second, hours."""
    parallel = layout.config.parallel
    return dict(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        data_parallel_size=layout.data_parallel_size,
        micro_batch_size=layout.config.train.micro_batch_size,
        recompute=layout.recompute,
        fits=layout.fits,
        bytes={**asdict(layout.memory), "total": layout.memory.total},
        bytes_by_recompute={choice.recompute: choice.memory.total for choice in recomputed(layout)},
        tokens_per_second_per_gpu=layout.tokens_per_second,
        mfu=layout.mfu,
        hours=hours(layout),
        gpu_hours=hours(layout) * layout.cluster.gpus,
    )
