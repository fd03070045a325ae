"""The lengths that memory and time are made of: of the model, of one rank's share, of the pipeline's stages."""

from __future__ import annotations

from dataclasses import dataclass

from card_megatron.config.derived import (
    GATED_ACTIVATIONS,
    padded_vocab_size,
    pipeline_chunks,
    pipeline_layout,
    unrolled_layout,
)
from card_megatron.config.schema import ModelConfig, ParallelConfig, RunConfig


@dataclass(frozen=True)
class Sizes:
    """One rank's share of a layer and of a micro-batch."""

    hidden: int
    ffn: float
    """Width of the MLP's inner layer on this rank."""
    gate: int
    """2 where the activation is gated: the first matrix of the MLP is twice as wide."""
    query: float
    """Width of all queries on this rank."""
    key: float
    """Width of all keys, or of all values, on this rank."""
    head: int
    vocab: float
    """Rows of the embedding on this rank."""
    sequence: int
    """Positions of a sample."""
    rows: int
    """Samples of a micro-batch."""
    tokens: float
    """Tokens of a micro-batch that this rank's matrices see: context parallelism shares them."""
    shared_tokens: float
    """Tokens that its norms and residuals see: sequence parallelism shares them too."""
    context: int
    tensor: int

    @classmethod
    def of(cls, config: RunConfig) -> Sizes:
        model, parallel = config.model, config.parallel
        tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        head = model.kv_channels or model.hidden_size // model.num_attention_heads
        tokens = config.train.micro_batch_size * config.data.sequence_length / cp
        return cls(
            hidden=model.hidden_size,
            ffn=model.ffn_hidden_size / tp,
            gate=2 if model.activation in GATED_ACTIVATIONS else 1,
            query=model.num_attention_heads * head / tp,
            key=(model.num_query_groups or model.num_attention_heads) * head / tp,
            head=head,
            vocab=padded_vocab_size(model) / tp,
            sequence=config.data.sequence_length,
            rows=config.train.micro_batch_size,
            tokens=tokens,
            shared_tokens=tokens / tp if parallel.sequence_parallel else tokens,
            context=cp,
            tensor=tp,
        )


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank holds."""

    layers: tuple[int, ...]
    """Its layers, counted from 0 over the whole model."""
    first: bool
    """Holds the embedding."""
    last: bool
    """Holds the final norm, the output layer and the loss."""
    in_flight: float
    """Micro-batches whose activations it keeps at once, at most; parts of one count for parts of its layers."""


def stages(model: ModelConfig, parallel: ParallelConfig, micro_batches: int) -> list[Stage]:
    """The pipeline, by rank."""
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    chunks = chunks_of_layers(model, parallel)
    return [
        Stage(
            layers=tuple(layer for chunk in chunks[rank::pp] for layer in chunk),
            first=rank == 0,
            last=rank == pp - 1,
            in_flight=_in_flight(rank, pp, vpp, micro_batches),
        )
        for rank in range(pp)
    ]


def chunks_of_layers(model: ModelConfig, parallel: ParallelConfig) -> list[range]:
    """Layers of every pipeline chunk in the order that a token passes them; rank r holds chunks r, r + pp, ..."""
    layout, count = pipeline_layout(model, parallel), pipeline_chunks(parallel)
    if layout is None:
        lengths = [model.num_layers // count] * count
    else:
        lengths = [chunk.count("t") for chunk in unrolled_layout(layout).split("|")]
    starts = [sum(lengths[:number]) for number in range(count)]
    return [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def _in_flight(rank: int, pp: int, vpp: int, micro_batches: int) -> float:
    """Megatron's 1F1B schedules: forwards that a rank has done before its first backward ends."""
    if vpp == 1:
        return min(pp - rank, micro_batches)
    return min((pp - rank - 1) * 2 + (vpp - 1) * pp + 1, micro_batches * vpp) / vpp
