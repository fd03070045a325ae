"""Seconds of a training step: work at the hardware's peak, by kind, times how far from the peak that kind runs.

The slowdowns are fitted on published H100 figures by non-negative least squares and tested on others
(planning/calibration.py, `card plan --calibration`). So the model is a sum that can be read: nothing is hidden
in a curve, and no overlap is assumed that the published runs do not show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from card_megatron.config.derived import data_parallel_size, flops_per_token
from card_megatron.config.precision import BYTES, Precision, resolve_precision
from card_megatron.config.schema import RunConfig
from card_megatron.planning.gpus import Gpu
from card_megatron.planning.memory import parameters
from card_megatron.planning.sizes import Sizes, Stage, stages

SLOWDOWN = {
    "matrices": 1.602,
    "fp8_matrices": 1.665,
    "attention": 3.046,
    "traffic": 1.069,
    "links": 0.188,
    "hops": 2.387,
    "exposed": 1.25,
}
"""Measured over ideal seconds of each kind of work. `card plan --calibration` fits all but the last anew, and lists the
errors. The last, four fifths of a link's bandwidth where nothing hides it, is assumed: published runs hide it."""


@dataclass(frozen=True)
class Cluster:
    """GPUs of a run, and how they are joined."""

    gpu: Gpu
    gpus: int
    gpus_per_node: int = 8

    @property
    def nodes(self) -> float:
        return max(1.0, self.gpus / self.gpus_per_node)

    def link(self, span: int) -> float:
        """Bytes a second between neighbours among `span` consecutive ranks."""
        return self.gpu.nvlink if span <= self.gpus_per_node else self.gpu.network


def step_seconds(config: RunConfig, cluster: Cluster) -> float:
    """Seconds of one step at the full global batch."""
    return cost(work(config, cluster))


def cost(ideal: dict[str, float], slowdown: dict[str, float] = SLOWDOWN) -> float:
    """Seconds that this work takes."""
    return sum(slowdown[kind] * seconds for kind, seconds in ideal.items())


def tokens_per_second_per_gpu(config: RunConfig, cluster: Cluster) -> float:
    tokens = config.train.global_batch_size * config.data.sequence_length
    return tokens / step_seconds(config, cluster) / cluster.gpus


def mfu(config: RunConfig, cluster: Cluster, tokens_per_second: float) -> float:
    """Share of the bf16 peak, as the training log counts it; FP8 can go beyond the peak of bf16."""
    return tokens_per_second * flops_per_token(config.model, config.data.sequence_length) / cluster.gpu.bf16_flops


def work(config: RunConfig, cluster: Cluster, *, buckets: float | None = None) -> dict[str, float]:
    """Ideal seconds of one step, by kind of work, along the busiest pipeline stage.

    `buckets`: parts that gradients are reduced in, where they are not Megatron's.
    """
    parallel, precision, sizes = config.parallel, resolve_precision(config.precision), Sizes.of(config)
    replicas = data_parallel_size(parallel, cluster.gpus)
    micro_batches = config.train.global_batch_size // (config.train.micro_batch_size * replicas)
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    slots = micro_batches + (pp - 1) / vpp  # the pipeline fills and drains once a step
    pipeline = stages(config.model, parallel, micro_batches)
    busiest = max((_micro_batch(config, sizes, stage, precision, cluster) for stage in pipeline), key=_ideal)
    step = {kind: slots * seconds for kind, seconds in busiest.items()}
    ranks = replicas * parallel.context_parallel_size
    held = max(sum(parameters(config.model, sizes, stage, pipelined=pp > 1)) for stage in pipeline)
    # Adam reads gradients, main weights and moments, writes the latter and the weights; buffers are zeroed and normed
    step["traffic"] += held * (30 / ranks + 8) / cluster.gpu.memory_bandwidth
    reduction = _reduction(precision, held, ranks, parallel.tensor_model_parallel_size, cluster)
    if parallel.overlap_grad_reduce:  # behind the last micro-batch's backward pass and the first one's forward
        reduction = max(0.0, reduction - cost(busiest) / SLOWDOWN["exposed"])
    step["exposed"] += reduction
    if buckets is None:  # Megatron's default: few enough that a ring's latency does not grow with its ranks
        buckets = math.ceil(held / max(40e6, 1e6 * ranks)) if parallel.overlap_grad_reduce else 1
    step["hops"] = 2 * buckets * (ranks - 1) * HOP
    return step


def _ideal(seconds: dict[str, float]) -> float:
    return sum(seconds.values())


HOP = 1e-6
"""Seconds from one rank of a ring to the next, ideally."""


def _micro_batch(
    config: RunConfig, sizes: Sizes, stage: Stage, precision: Precision, cluster: Cluster
) -> dict[str, float]:
    """Ideal seconds of one micro-batch, forwards and backwards, through one pipeline stage."""
    gpu, model, tokens = cluster.gpu, config.model, sizes.tokens
    number, layers = BYTES[precision.params_dtype], len(stage.layers)
    in_fp8 = sum(precision.hardware_fp8 and precision.in_fp8(layer, model.num_layers) for layer in stage.layers)
    peak = gpu.bf16_flops if precision.params_dtype == "bf16" else gpu.fp32_flops
    again = (
        1 + _recomputed(config, layers) / max(1, layers) / 3
    )  # passes over a layer: a forward is a third of its work
    around_attention = (2 * sizes.query + 2 * sizes.key) * (1 + TILE / sizes.query)
    around_activation = (sizes.gate + 1) * sizes.ffn * (1 + TILE / sizes.ffn)
    matrices = 6 * tokens * sizes.hidden * (1 + TILE / sizes.hidden) * (around_attention + around_activation) * again
    head = 6 * tokens * sizes.hidden * sizes.vocab if stage.last else 0.0
    causal = 6 * tokens * sizes.query * sizes.sequence * again  # queries see half of all keys; a sixth of it is forward
    around_matrices, ring = _link_seconds(sizes, number, cluster)
    # without tp_comm_overlap only the backward pass of the matrices before attention and activation hides anything
    hidden = around_matrices if config.parallel.tp_comm_overlap else 0.4 * around_matrices
    bytes_moved = again * (layers * layer_traffic(sizes, number) + in_fp8 * fp8_traffic(sizes))
    # a weight is read forwards and backwards, its gradient read and written, whatever the micro-batch's size
    linear, other = parameters(model, sizes, stage, pipelined=config.parallel.pipeline_model_parallel_size > 1)
    bytes_moved += linear * 2 * (precision.grad_bytes + (1 if in_fp8 else number)) + other * 2 * precision.grad_bytes
    if stage.last:
        bytes_moved += tokens * sizes.vocab * LOGIT_PASSES
    return dict(
        matrices=((layers - in_fp8) * matrices + head) / peak,
        fp8_matrices=in_fp8 * matrices / (gpu.fp8_flops or peak),
        attention=layers * causal / peak,
        traffic=bytes_moved / gpu.memory_bandwidth,
        links=layers * again * (hidden + ring) + _pipeline_seconds(config, sizes, number, cluster),
        exposed=layers * again * (around_matrices - hidden),
    )


TILE = 256
"""Columns that a matrix product's kernel works on at once: the narrower a matrix, the more of the last tile is idle."""

LOGIT_PASSES = 50
"""Bytes that go through memory for one logit: Megatron's cross entropy in fp32, unfused, forwards and backwards."""


def layer_traffic(sizes: Sizes, number: int) -> float:
    """Bytes through the GPU's memory between the matrices of one layer: norms, residuals, rotary positions, the MLP's
    activation; each operand read and each result written once, forwards and backwards."""
    residuals = 22 * sizes.shared_tokens * sizes.hidden
    rotary = 12 * sizes.tokens * (sizes.query + sizes.key)
    activation = (8 if sizes.gate == 2 else 5) * sizes.tokens * sizes.ffn
    return number * (residuals + rotary + activation)


def fp8_traffic(sizes: Sizes) -> float:
    """Bytes of casting what the matrices of one layer see: bf16 read twice (its largest value first), FP8 written
    twice (as it is and transposed), for inputs and for gradients."""
    inputs = 2 * sizes.hidden + sizes.query + sizes.ffn
    gradients = 2 * sizes.hidden + sizes.query + 2 * sizes.key + sizes.gate * sizes.ffn
    return 6 * sizes.tokens * (inputs + gradients)


def _recomputed(config: RunConfig, layers: int) -> int:
    """Layers of a stage whose forward runs twice."""
    model = config.model
    if model.recompute_granularity != "full":
        return 0
    if model.recompute_method == "block":
        chunks = config.parallel.virtual_pipeline_model_parallel_size or 1
        return min(layers, (model.recompute_num_layers or 1) * chunks)
    return layers


def _link_seconds(sizes: Sizes, number: int, cluster: Cluster) -> tuple[float, float]:
    """(tensor, context) parallelism of one layer, forwards and backwards: ten gathers and scatters around its matrices;
    keys and values around the ring."""
    tp, cp = sizes.tensor, sizes.context
    around_matrices = 10 * sizes.tokens * sizes.hidden * number * (tp - 1) / tp / cluster.link(tp)
    return around_matrices, 6 * sizes.tokens * sizes.key * number * (cp - 1) / cluster.link(tp * cp)


def _pipeline_seconds(config: RunConfig, sizes: Sizes, number: int, cluster: Cluster) -> float:
    """Activations and their gradients between the stages."""
    parallel = config.parallel
    if parallel.pipeline_model_parallel_size == 1:
        return 0.0
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    # Megatron's rank order is tensor, context, data, pipeline: stages lie far apart
    return 2 * chunks * sizes.shared_tokens * sizes.hidden * number / cluster.link(cluster.gpus)


def _reduction(precision: Precision, held: float, ranks: int, tp: int, cluster: Cluster) -> float:
    """Gradients scattered and weights gathered once a step, over data- and context-parallel ranks."""
    bytes_sent = held * (precision.grad_bytes + precision.linear_weight_bytes)
    inside = max(1, cluster.gpus_per_node // tp)
    if ranks <= inside:
        return bytes_sent * (ranks - 1) / ranks / cluster.gpu.nvlink
    # the ranks of a node send different parts, each through its own card
    return bytes_sent * (1 - inside / ranks) / (inside * cluster.gpu.network)
