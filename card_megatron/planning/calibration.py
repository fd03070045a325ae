"""The speed model against published figures: fitted on one half, judged on the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from card_megatron.config.derived import padded_vocab_size
from card_megatron.config.schema import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from card_megatron.planning.gpus import GPUS
from card_megatron.planning.speed import SLOWDOWN, Cluster, cost, work

PRECISION: dict[str, dict[str, Any]] = {"bridge": dict(first_last_layers_bf16=False, grad_reduce_in_fp32=False)}
"""What the source's own recipes set beside the preset (Megatron-Bridge: perf_recipes/_common.py)."""

OLD_ATTENTION = "attention_of_2023"
OLD = {OLD_ATTENTION: 6.811}
"""Fitted beside SLOWDOWN, so that old kernels do not spoil the rest; the planner has no use for it."""

ASSUMED = "exposed"
"""The one slowdown that published figures cannot tell."""

PUBLISHED = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True)
class Figure:
    """One published throughput, and the run that it is of."""

    source: str
    model: str
    config: RunConfig
    cluster: Cluster
    tokens_per_second: float
    """Of one GPU."""
    held_out: bool

    @property
    def work(self) -> dict[str, float]:
        if not self.source.startswith("llm_foundry"):
            return work(self.config, self.cluster)
        # FSDP gathers and scatters layer by layer; the attention kernel is one of 2023, with a slowdown of its own
        ideal = work(self.config, self.cluster, buckets=self.config.model.num_layers)
        return ideal | {OLD_ATTENTION: ideal["attention"], "attention": 0.0}

    @property
    def step_seconds(self) -> float:
        tokens = self.config.train.global_batch_size * self.config.data.sequence_length
        return tokens / self.tokens_per_second / self.cluster.gpus

    @property
    def error(self) -> float:
        """Predicted over published throughput, less 1."""
        return self.step_seconds / cost(self.work, SLOWDOWN | OLD) - 1


def sources() -> dict[str, dict[str, str]]:
    return _read()["sources"]


def figures() -> list[Figure]:
    """All of published.yaml; every second row of a table is held out."""
    data = _read()
    models = {name: _model(*values) for name, values in data["models"].items()}
    return [
        _figure(source, models, row, held_out=bool(number % 2))
        for source, rows in data["rows"].items()
        for number, row in enumerate(rows)
    ]


def describe() -> Iterator[str]:
    """The slowdowns fitted anew beside those in use, and the error of every figure; held-out ones last."""
    given = figures()
    for name, source in sources().items():
        yield f"{name}: {source['title']}\n  {source['url']}" + (f"\n  {source['note']}" if "note" in source else "")
    yield ""
    fitted = fit([figure for figure in given if not figure.held_out])
    yield "slowdown, fitted now and in use: " + ", ".join(
        f"{kind} {value:.3f} {(SLOWDOWN | OLD)[kind]:.3f}" for kind, value in fitted.items()
    )
    for held_out, title in ((False, "fitted"), (True, "held out")):
        part = [figure for figure in given if figure.held_out == held_out]
        yield (
            f"\n{title:<18} {'model':<14}{'GPUs':>5} {'TP PP VPP CP':<13}{'mbs':>4}{'sequence':>9} {'precision':<15}"
            + (f"{'published':>10}{'predicted':>10}{'error':>8}")
        )
        yield from (_line(figure) for figure in part)
        errors = [abs(figure.error) for figure in part]
        yield f"{len(part)} {title}: mean error {np.mean(errors):.1%}, largest {max(errors):.1%}"


def _line(figure: Figure) -> str:
    parallel, config = figure.config.parallel, figure.config
    layout = " ".join(
        str(size or 1)
        for size in (
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            parallel.virtual_pipeline_model_parallel_size,
            parallel.context_parallel_size,
        )
    )
    return (
        f"{figure.source:<18} {figure.model:<14}{figure.cluster.gpus:>5} {layout:<13}{config.train.micro_batch_size:>4}"
        f"{config.data.sequence_length:>9} {config.precision.preset:<15}{figure.tokens_per_second:>10,.0f}"
        f"{figure.tokens_per_second * (1 + figure.error):>10,.0f}{figure.error:>+8.1%}"
    )


def fit(given: list[Figure]) -> dict[str, float]:
    """Slowdowns, none negative, with the least sum of squared relative errors of the step's time."""
    kinds = [kind for kind in (*SLOWDOWN, OLD_ATTENTION) if kind != ASSUMED]
    shares = np.array([[it.work.get(kind, 0.0) / it.step_seconds for kind in kinds] for it in given])
    known = np.array([SLOWDOWN[ASSUMED] * it.work[ASSUMED] / it.step_seconds for it in given])
    return dict(zip(kinds, _non_negative_least_squares(shares, 1.0 - known).tolist(), strict=True))


def _non_negative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Coordinate descent: each coefficient in turn at its best, or at 0. Convex, so it ends at the one minimum."""
    solution, squares = np.zeros(matrix.shape[1]), (matrix**2).sum(0)
    residual = target.copy()
    for _ in range(20_000):
        before = solution.copy()
        for column in np.flatnonzero(squares):
            best = max(0.0, solution[column] + matrix[:, column] @ residual / squares[column])
            residual -= matrix[:, column] * (best - solution[column])
            solution[column] = best
        if np.abs(solution - before).max() < 1e-10:
            break
    return solution


def _read() -> dict[str, Any]:
    return yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))


def _model(layers, hidden, ffn, heads, groups, vocabulary, activation, tied) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        vocab_size=vocabulary,
        activation=activation,
        share_embeddings_and_output_weights=tied,
        max_position_embeddings=131072,
    )


def _figure(source: str, models: dict[str, ModelConfig], row: list[Any], *, held_out: bool) -> Figure:
    name, gpus, batch, micro_batch, sequence, tp, pp, cp, vpp, preset, figure = row
    config = RunConfig(
        model=models[name],
        data=DataConfig(sequence_length=sequence),
        train=TrainConfig(global_batch_size=batch, micro_batch_size=micro_batch),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tp,
            sequence_parallel=tp > 1,
            tp_comm_overlap=tp > 1,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            context_parallel_size=cp,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        ),
        precision=PrecisionConfig(preset=preset, **PRECISION.get(source, {})),
    )
    rate = figure * 1e12 / megatron_lm_flops(config) if source == "megatron_lm" else float(figure)
    return Figure(source, name, config, Cluster(GPUS["h100-80gb"], gpus), rate, held_out)


def megatron_lm_flops(config: RunConfig) -> float:
    """FLOPs of a token as Megatron-LM counts them: attention over the whole square, causal or not."""
    model = config.model
    groups = (model.num_query_groups or model.num_attention_heads) / model.num_attention_heads
    gated = 1.5 if model.activation == "swiglu" else 1.0
    attention = 1 + groups + config.data.sequence_length / model.hidden_size
    mlp = model.ffn_hidden_size / model.hidden_size * gated
    output = padded_vocab_size(model) / (2 * model.num_layers * model.hidden_size)
    return 12 * model.num_layers * model.hidden_size**2 * (attention + mlp + output)
