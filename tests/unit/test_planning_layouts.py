"""Layouts: all that are legal and no other, judged by memory and speed; parameters add up to the whole model."""

from __future__ import annotations

import pytest

from card_megatron.config.checks import check
from card_megatron.config.derived import padded_vocab_size, parameter_count
from card_megatron.config.errors import ConfigError
from card_megatron.planning.gpus import GPUS
from card_megatron.planning.layouts import FIELDS, USABLE, candidates, estimate, search
from card_megatron.planning.memory import CONTEXT, memory_by_stage, parameters
from card_megatron.planning.report import advice, refuse_empty
from card_megatron.planning.sizes import Sizes, chunks_of_layers, stages
from card_megatron.planning.speed import Cluster
from tests.configs import load

RUN = (
    "model.num_layers=12; model.hidden_size=768; model.ffn_hidden_size=2048; model.num_attention_heads=12; "
    "model.vocab_size=50368; data.sequence_length=512; train.global_batch_size=48; model.max_position_embeddings=8192; "
    "precision.preset=bf16"
)


def cluster(gpus: int, gpu: str = "h100-80gb") -> Cluster:
    return Cluster(GPUS[gpu], gpus)


@pytest.mark.parametrize("gpus", [1, 8, 24])
def test_a_search_finds_what_the_checks_of_a_run_allow_and_nothing_else(gpus):
    config, legal, refused = load(RUN), 0, 0
    for candidate in candidates(config, cluster(gpus)):
        try:
            check(candidate, world_size=gpus, cuda=True, transformer_engine=True)
            legal += 1
        except ConfigError:
            refused += 1
    found = search(config, cluster(gpus))
    assert len(found.fitting) + len(found.too_large) == legal > 0
    assert found.refused.total() == refused
    for layout in found.fitting:
        check(layout.config, world_size=gpus, cuda=True, transformer_engine=True)
        assert layout.memory.total <= USABLE * GPUS["h100-80gb"].memory
    speeds = [layout.tokens_per_second for layout in found.fitting]
    assert speeds == sorted(speeds, reverse=True)


def test_a_layout_is_told_by_the_fields_that_are_written():
    found = search(load(RUN), cluster(8)).fitting
    told = {
        tuple(str(getattr(getattr(it.config, key.split(".")[0]), key.split(".")[1])) for key in FIELDS) for it in found
    }
    assert len(told) == len(found)


@pytest.mark.parametrize("text", ["", "TP=2; SP=true; PP=3", "PP=2; VPP=3", "TP=4; PP=4; model.num_layers=13"])
@pytest.mark.parametrize(
    "model",
    [
        "",
        "model.share_embeddings_and_output_weights=false",
        "model.add_bias_linear=true; model.normalization=LayerNorm; model.activation=gelu; model.qk_layernorm=true",
    ],
)
def test_parameters_of_all_stages_are_the_whole_models(text, model):
    config = load("; ".join(part for part in (RUN, text, model) if part))
    sizes, pipeline = Sizes.of(config), stages(config.model, config.parallel, 8)
    tp, pipelined = sizes.tensor, len(pipeline) > 1
    held = tp * sum(sum(parameters(config.model, sizes, stage, pipelined=pipelined)) for stage in pipeline)
    copies = padded_vocab_size(config.model) * config.model.hidden_size if (
        pipelined and config.model.share_embeddings_and_output_weights
    ) else 0  # fmt: skip
    # tensor-parallel ranks share matrices; what they do not share (norms, biases of rows) is small
    assert held == pytest.approx(parameter_count(config.model) + copies, rel=2e-3 if tp > 1 else 1e-12)
    assert [layer for chunk in chunks_of_layers(config.model, config.parallel) for layer in chunk] == list(
        range(config.model.num_layers)
    )


def test_bf16_takes_18_bytes_a_parameter_on_one_gpu_and_replicas_share_12_of_them():
    config = load(f"{RUN}; train.micro_batch_size=1; ema.decay=0.99")
    count = parameter_count(config.model)
    alone, shared = (memory_by_stage(config, gpus, engine=True)[0] for gpus in (1, 8))
    assert (alone.weights, alone.gradients, alone.optimizer, alone.average) == tuple(count * it for it in (2, 4, 12, 4))
    assert (shared.weights, shared.gradients, shared.optimizer) == (2 * count, 4 * count, 12 * count / 8)


def test_fp8_keeps_each_linear_weight_twice_in_a_byte_and_inputs_in_one():
    bf16 = memory_by_stage(load(RUN), 4, engine=True)[0]
    gathered = memory_by_stage(load(f"{RUN}; precision.preset=fp8_tensorwise"), 4, engine=True)[0]
    cast = memory_by_stage(load(f"{RUN}; precision.preset=fp8_blockwise"), 4, engine=True)[0]
    assert gathered.weights == pytest.approx(bf16.weights)
    assert cast.weights > bf16.weights
    assert gathered.activations < bf16.activations


def test_a_model_that_fits_nowhere_is_refused_with_what_would_help():
    large = f"{RUN}; model.num_layers=80; model.hidden_size=12288; model.ffn_hidden_size=49152"
    with pytest.raises(ConfigError, match=r"none of .* layouts fits 8 x h100-80gb: the smallest needs .* GiB .*--gpus"):
        refuse_empty(search(load(large), cluster(8)), cluster(8), "h100-80gb")


def test_a_batch_that_no_layout_divides_is_refused_with_the_rule():
    with pytest.raises(
        ConfigError, match=r"none of the .* is legal on 68 GPUs: .*global batch.*train.global_batch_size"
    ):
        refuse_empty(search(load(f"{RUN}; train.global_batch_size=5"), cluster(68)), cluster(68), "h100-80gb")


def test_pipelines_of_all_divisors_are_searched():
    pipelines = {it.config.parallel.pipeline_model_parallel_size for it in search(load(RUN), cluster(24)).fitting}
    assert {1, 2, 3, 4, 6, 12} <= pipelines


def test_local_layers_on_a_gpu_take_workspace_too():
    assert estimate(load(f"{RUN}; model.spec=local"), cluster(8)).memory.workspace > CONTEXT


def test_advice_is_legal_and_fits():
    """FP8 does not take heads of 22, nor has a local layer Transformer Engine's overlap."""
    for text in ("model.num_attention_heads=12; model.kv_channels=22", "model.spec=local"):
        config = load(f"{RUN}; {text}")
        assert not [line for line in advice(config, search(config, cluster(8)).fitting[0]) if "fp8" in line]
    assert [line for line in advice(load(RUN), search(load(RUN), cluster(8)).fitting[0]) if "fp8" in line]
