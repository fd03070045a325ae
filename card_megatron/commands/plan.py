"""`card plan`: memory, speed and cost of a run's layouts, before any GPU is asked for."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from card_megatron.config.checks import check, check_sizes
from card_megatron.config.errors import ConfigError
from card_megatron.config.load import config_parser, load_config, option_pairs
from card_megatron.config.precision import resolve_precision
from card_megatron.config.schema import DataConfig, ParallelConfig, RunConfig
from card_megatron.objectives import OBJECTIVES
from card_megatron.planning import report
from card_megatron.planning.goodput import GPU_MTBF_HOURS, Failures
from card_megatron.planning.gpus import GPUS
from card_megatron.planning.layouts import FIELDS, Layout, estimate, layout_rules, search
from card_megatron.planning.speed import Cluster
from card_megatron.planning.write import edited, read_file, replace_file

DESCRIPTION = """Rank the legal layouts of a run on these GPUs by expected speed, with the memory of the fullest GPU
by item, MFU, hours and GPU-hours of the token budget. Nothing is started, no GPU is needed. docs/scaling.md says what
the numbers rest on."""


def run(arguments: Sequence[str]) -> None:
    parser = config_parser("card plan", DESCRIPTION)
    parser.add_argument("--gpus", type=count, help="GPUs of the run.")
    parser.add_argument("--gpu", choices=list(GPUS), default="h100-80gb", help="Which GPU.")
    parser.add_argument("--gpus-per-node", type=count, default=8, help="GPUs that NVLink joins.")
    parser.add_argument("--top", type=count, default=10, help="Layouts to show.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of tables.")
    parser.add_argument("--write", action="store_true", help="Write the fastest layout into the file of --config.")
    parser.add_argument("--goodput", action="store_true", help="Checkpoint interval against failures, instead.")
    parser.add_argument("--gpu-mtbf-hours", type=positive, default=GPU_MTBF_HOURS, help="Between failures of one GPU.")
    parser.add_argument("--save-seconds", type=positive, default=10.0, help="Training time that one save costs.")
    parser.add_argument("--restart-minutes", type=positive, default=10.0, help="From a failure to the next step.")
    parser.add_argument(
        "--calibration", action="store_true", help="Fit on published figures, list the errors on others."
    )
    config, options = load_config(arguments, parser)
    if options.calibration:
        from card_megatron.planning.calibration import describe

        print("\n".join(describe()))
        return
    if options.gpus is None:
        raise ConfigError("--gpus is missing: say how many GPUs the run may have, e.g. --gpus 64")
    # what was parsed holds the contents of a file with short forms: the path is on the command line alone
    files = [Path(str(value)) for option, value in option_pairs(arguments) if option == "--config"]
    if options.write and len(files) != 1:
        raise ConfigError("--write needs one --config FILE to write the layout into")
    config = plannable(config, options.gpu)
    cluster = Cluster(GPUS[options.gpu], options.gpus, options.gpus_per_node)
    found = search(config, cluster)
    report.refuse_empty(found, cluster, options.gpu)
    best, shown = found.fitting[0], found.fitting[: options.top]
    if options.goodput:
        failures = Failures.of(
            options.gpus,
            restart=60 * options.restart_minutes,
            save=options.save_seconds,
            gpu_mtbf_hours=options.gpu_mtbf_hours,
        )
        lines = [*report.head(config, cluster, options.gpu), "", *report.goodput(best, failures)]
    elif options.json:
        lines = [json.dumps(_as_json(found, shown, options), indent=2)]
    else:
        lines = [*report.head(config, cluster, options.gpu), "", *report.table(shown), ""]
        lines += [*report.count(found), "", "the first layout:", *(f"  {line}" for line in report.details(best))]
        lines += [f"as configured: {line}" for line in _as_configured(config, cluster)]
        lines += [f"advice: {line}" for line in report.advice(config, best)]
    print("\n".join(lines))
    if options.write:
        changed = write_layout(files[0], best)
        said = ", ".join(f"{key}={value}" for key, value in changed.items())
        said = f"{files[0]}: {said}" if changed else f"{files[0]} has this layout already"
        print(said, file=sys.stderr if options.json else sys.stdout)


def count(value: str | int) -> int:
    """The type of numbers of things; jsonargparse also asks it about a value that is an integer already."""
    if not str(value).isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number; give 1 or more")
    return int(value)


def positive(value: str | float) -> float:
    """The type of times; jsonargparse also asks it about a value that is a number already."""
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{value!r} is not a positive number")
    return number


def plannable(config: RunConfig, gpu: str) -> RunConfig:
    """The run with its vocabulary known; refuses what no layout could mend. Data need not be here, nor be named."""
    from card_megatron.training.preflight import resolve_vocabulary

    if config.model.vocab_size is None:
        config, _ = resolve_vocabulary(config)
    if config.model.vocab_size is None:
        raise ConfigError("model.vocab_size is not known without data.tokenizer; give either")
    if OBJECTIVES[config.objective.name].attention != "causal":
        raise ConfigError(
            f"objective.name={config.objective.name}: card plan counts one causal pass over a sample; plan card or "
            "arm, whose model is the same, and take the ratio of steps from benchmarks/objectives.py"
        )
    if config.model.num_moe_experts is not None:
        raise ConfigError(
            f"model.num_moe_experts={config.model.num_moe_experts}: card plan knows dense models only; leave it out"
        )
    if config.parallel.expert_model_parallel_size > 1:
        raise ConfigError(
            f"parallel.expert_model_parallel_size={config.parallel.expert_model_parallel_size} shares experts, and "
            "card plan knows dense models only; leave it out"
        )
    check_sizes(config)
    precision = resolve_precision(config.precision)
    if precision.emulate:
        raise ConfigError(
            "precision.emulate=true studies FP8 on local layers and is many times slower than what it emulates; plan "
            "with precision.emulate=false"
        )
    if precision.hardware_fp8 and (GPUS[gpu].fp8_flops is None or precision.fp8_recipe == "mxfp8"):
        raise ConfigError(
            f"precision.preset={config.precision.preset} does not run on {gpu}; use "
            + ("bf16" if GPUS[gpu].fp8_flops is None else "fp8_tensorwise: mxfp8 is for Blackwell")
        )
    length = config.data.sequence_length
    alone = replace(
        config,
        data=DataConfig(mock=True, sequence_length=length),
        parallel=ParallelConfig(),
        # as many rows as may help FP8, whose tokens are counted in powers of two up to this one
        train=replace(
            config.train, micro_batch_size=math.gcd(config.train.global_batch_size, 128), rampup_batch_size=None
        ),
        eval=replace(config.eval, tasks=[], tasks_interval=0),
        logging=replace(config.logging, wandb_project=None),
    )
    check(alone, world_size=1, cuda=True, transformer_engine=True)
    return config


def _as_configured(config: RunConfig, cluster: Cluster) -> Iterator[str]:
    problems = layout_rules(config, cluster.gpus)
    if problems:
        yield f"not legal on {cluster.gpus} GPUs: {problems[0]}"
        return
    layout = estimate(config, cluster)
    verdict = "" if layout.fits else ", which does not fit"
    yield f"{layout.tokens_per_second:,.0f} tokens/s/GPU, {layout.mfu:.1%} MFU, {report.needs(layout)}{verdict}"


def _as_json(found: Any, shown: list[Layout], options: Any) -> dict[str, Any]:
    return dict(
        gpu=options.gpu,
        gpus=options.gpus,
        gpus_per_node=options.gpus_per_node,
        **report.numbers(shown[0].config),
        layouts=[report.as_json(layout) for layout in shown],
        fitting=len(found.fitting),
        too_large=len(found.too_large),
        refused=dict(found.refused),
    )


def write_layout(path: Path, layout: Layout) -> dict[str, Any]:
    """Set the layout's fields in a YAML file and return those that changed; the file is whole at any time."""
    before, _ = load_config([f"--config={path}"])
    changes = {key: _field(layout.config, key) for key in FIELDS if _field(before, key) != _field(layout.config, key)}
    text = edited(read_file(path), changes)
    draft = path.with_name(f".{path.name}.draft.yaml")
    try:
        draft.write_text(text, encoding="utf-8", newline="")
        after, _ = load_config([f"--config={draft}"])
    finally:
        draft.unlink(missing_ok=True)
    problems = [*_differences(after, layout.config)] or layout_rules(after, layout.cluster.gpus)
    if problems:
        raise ConfigError(
            f"{path} is left as it was: {', '.join(problems)}; options that the layout was planned with belong into "
            "the file too"
        )
    if changes:
        replace_file(path, text)
    return changes


def _differences(file: RunConfig, planned: RunConfig) -> Iterator[str]:
    """Fields that a plan depends on and that a file does not have as they were planned."""
    from card_megatron.training.preflight import resolve_vocabulary

    if file.model.vocab_size is None:
        file, _ = resolve_vocabulary(file)
    for section in ("model", "objective", "train", "parallel", "precision", "ema", "data"):
        held, wanted = asdict(getattr(file, section)), asdict(getattr(planned, section))
        for name in ("sequence_length",) if section == "data" else held:
            if held[name] != wanted[name]:
                yield f"{section}.{name}={held[name]} there and {wanted[name]} in this plan"


def _field(config: RunConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
