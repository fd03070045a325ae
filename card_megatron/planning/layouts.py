"""Layouts that a run can have on these GPUs, with its memory and its speed, fastest first."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from card_megatron.config.derived import data_parallel_size
from card_megatron.config.layout_checks import batch_problems, layout_problems
from card_megatron.config.precision_checks import precision_problems
from card_megatron.config.schema import ModelConfig, RunConfig
from card_megatron.planning.memory import Memory, memory
from card_megatron.planning.sizes import chunks_of_layers
from card_megatron.planning.speed import Cluster, mfu, tokens_per_second_per_gpu

USABLE = 0.95
"""Share of a GPU's memory that a plan may fill."""

FIELDS = (
    "parallel.tensor_model_parallel_size",
    "parallel.sequence_parallel",
    "parallel.pipeline_model_parallel_size",
    "parallel.virtual_pipeline_model_parallel_size",
    "parallel.pipeline_model_parallel_layout",
    "parallel.context_parallel_size",
    "parallel.overlap_grad_reduce",
    "parallel.overlap_param_gather",
    "parallel.tp_comm_overlap",
    "train.micro_batch_size",
    "model.recompute_granularity",
    "model.recompute_method",
    "model.recompute_num_layers",
)
"""What a layout decides, and `--write` writes."""


@dataclass(frozen=True)
class Layout:
    """One way to run, and what it is expected to take."""

    config: RunConfig
    cluster: Cluster
    memory: Memory
    tokens_per_second: float
    """Of one GPU."""

    @property
    def fits(self) -> bool:
        return self.memory.total <= USABLE * self.cluster.gpu.memory

    @property
    def mfu(self) -> float:
        return mfu(self.config, self.cluster, self.tokens_per_second)

    @property
    def data_parallel_size(self) -> int:
        return data_parallel_size(self.config.parallel, self.cluster.gpus)

    @property
    def recompute(self) -> str:
        model = self.config.model
        if model.recompute_granularity == "full" and model.recompute_method == "block":
            return f"{model.recompute_num_layers} a chunk"
        return model.recompute_granularity or "none"


@dataclass(frozen=True)
class Search:
    """What there was to choose from."""

    fitting: list[Layout]
    """The fastest recompute choice of every layout that fits, fastest layout first."""
    too_large: list[Layout]
    """Layouts that do not fit even when everything is recomputed, the smallest first."""
    refused: Counter[str]
    """Rules that forbid a layout -> how many they forbid."""


def estimate(config: RunConfig, cluster: Cluster) -> Layout:
    """A run as it is configured. Layers are Transformer Engine's, unless the configuration wants local ones."""
    engine = config.model.spec != "local"
    return Layout(
        config,
        cluster,
        memory(config, cluster.gpus, engine=engine),
        tokens_per_second_per_gpu(config, cluster),
    )


def search(config: RunConfig, cluster: Cluster) -> Search:
    """All candidates, judged."""
    fitting, too_large, refused = [], [], Counter[str]()
    for candidate in candidates(config, cluster):
        problems = layout_rules(candidate, cluster.gpus)
        if problems:
            refused[_rule(problems[0])] += 1
            continue
        choice = None
        for model in recompute_choices(candidate):  # from the fastest to the smallest
            choice = estimate(replace(candidate, model=model), cluster)
            if choice.fits:
                fitting.append(choice)
                break
        else:
            assert choice is not None
            too_large.append(choice)
    fitting.sort(key=lambda layout: (-layout.tokens_per_second, layout.memory.total))
    too_large.sort(key=lambda layout: layout.memory.total)
    return Search(fitting, too_large, refused)


def layout_rules(config: RunConfig, gpus: int) -> list[str]:
    """The rules of `card train` that a layout can break: those of ranks, of batches, and of FP8's sizes per rank."""
    return [*layout_problems(config, gpus), *batch_problems(config, gpus), *precision_problems(config)]


def candidates(config: RunConfig, cluster: Cluster) -> Iterator[RunConfig]:
    """Layouts to ask the rules about; overlap and sequence parallelism are taken wherever they can be."""
    tensor, pipeline = _divisors(cluster.gpus_per_node), _divisors(cluster.gpus, config.model.num_layers)
    context = _divisors(cluster.gpus, 16)
    micro = [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size <= config.train.global_batch_size]
    for tp, pp, cp, rows in itertools.product(tensor, pipeline, context, micro):
        if cluster.gpus % (tp * pp * cp):
            continue
        virtual: list[int | None] = [None]
        if pp > 1:
            virtual += [size for size in range(2, 13) if config.model.num_layers >= pp * size]
        for vpp in virtual:
            yield replace(
                config,
                train=replace(config.train, micro_batch_size=rows),
                parallel=replace(
                    config.parallel,
                    tensor_model_parallel_size=tp,
                    sequence_parallel=tp > 1,
                    tp_comm_overlap=config.parallel.tp_comm_overlap and tp > 1,
                    pipeline_model_parallel_size=pp,
                    virtual_pipeline_model_parallel_size=vpp,
                    pipeline_model_parallel_layout=None,
                    context_parallel_size=cp,
                    overlap_grad_reduce=True,
                    overlap_param_gather=True,
                ),
            )


def _divisors(number: int, at_most: int | None = None) -> list[int]:
    return [size for size in range(1, min(number, at_most or number) + 1) if number % size == 0]


def recompute_choices(config: RunConfig) -> list[ModelConfig]:
    """Nothing, the attention core, a quarter, a half and three quarters of the layers, all of them."""
    longest = max(len(chunk) for chunk in chunks_of_layers(config.model, config.parallel))
    some = sorted({-(-longest * quarters // 4) for quarters in (1, 2, 3)} - {longest})
    choices: list[tuple[Any, Any, int | None]] = [(None, None, None), ("selective", None, None)]
    choices += [("full", "block", count) for count in some]
    return [
        replace(config.model, recompute_granularity=kind, recompute_method=method, recompute_num_layers=count)
        for kind, method, count in [*choices, ("full", "uniform", 1)]
    ]


def _rule(problem: str) -> str:
    """The rule without the values that broke it, so that equal rules count together."""
    words = {
        " FP8 (": "a rank's sizes are no multiple of what FP8 needs",  # first, as it names sizes too
        "num_attention_heads": "heads do not divide among tensor-parallel ranks",
        "ffn_hidden_size": "the MLP does not divide among tensor-parallel ranks",
        "padded vocabulary": "the vocabulary does not divide among tensor-parallel ranks",
        "num_query_groups": "key/value heads do not divide among tensor-parallel ranks",
        "sequence_length": "the sequence does not divide among context- and sequence-parallel ranks",
        "interleaved pipeline": "micro-batches are no multiple of the interleaved pipeline's ranks",
        "global_batch_size": "the global batch is no multiple of micro-batch x replicas",
    }
    return next((rule for sign, rule in words.items() if sign in problem), problem)
