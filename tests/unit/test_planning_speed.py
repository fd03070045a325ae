"""The speed model: fitted on half of the published figures, judged on the others, sound where it is not fitted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from card_megatron.config.derived import flops_per_token
from card_megatron.planning.calibration import (
    OLD,
    _non_negative_least_squares,
    figures,
    fit,
    megatron_lm_flops,
    sources,
)
from card_megatron.planning.gpus import GPUS
from card_megatron.planning.speed import SLOWDOWN, Cluster, step_seconds, tokens_per_second_per_gpu, work
from card_megatron.platform.capabilities import PEAK_BF16_FLOPS
from tests.configs import load

H100 = GPUS["h100-80gb"]
RUN = (
    "model.num_layers=32; model.hidden_size=4096; model.ffn_hidden_size=11008; model.num_attention_heads=32; "
    "model.vocab_size=32000; model.max_position_embeddings=4096; data.sequence_length=4096; "
    "train.global_batch_size=256; train.micro_batch_size=1; precision.preset=bf16; "
    "parallel.overlap_grad_reduce=true; parallel.overlap_param_gather=true"
)


def test_the_slowdowns_in_use_are_those_that_the_fit_gives():
    fitted = fit([figure for figure in figures() if not figure.held_out])
    assert fitted == pytest.approx({kind: (SLOWDOWN | OLD)[kind] for kind in fitted}, rel=2e-3)
    assert set(SLOWDOWN) - set(fitted) == {"exposed"}


def test_held_out_figures_are_met_as_the_documentation_says():
    errors = [abs(figure.error) for figure in figures() if figure.held_out]
    assert len(errors) == 23
    assert np.mean(errors) < 0.045 and max(errors) < 0.12


def test_every_second_row_of_every_cited_table_is_held_out():
    given = figures()
    assert {figure.source for figure in given} == set(sources())
    for source, cited in sources().items():
        assert cited["url"].startswith("https://github.com/")
        held = [figure.held_out for figure in given if figure.source == source]
        assert held == [bool(number % 2) for number in range(len(held))]


def test_published_teraflops_and_tokens_agree_where_both_are_printed():
    """NeMo prints both: 23,406 tokens/s are 765 TFLOP/s by the formula that turns Megatron-LM's figures into tokens."""
    gpt = next(figure for figure in figures() if figure.model == "GPT3-5B")
    assert gpt.tokens_per_second * megatron_lm_flops(gpt.config) / 1e12 == pytest.approx(765, rel=0.002)


def test_non_negative_least_squares_is_the_minimum():
    rng = np.random.default_rng(0)
    matrix, target = rng.random((20, 4)), rng.random(20) - 0.3
    found = _non_negative_least_squares(matrix, target)
    gradient = matrix.T @ (matrix @ found - target)
    assert (found >= 0).all()  # Karush, Kuhn and Tucker: no way down from here
    assert gradient[found > 0] == pytest.approx(0, abs=1e-8)
    assert (gradient[found == 0] >= 0).all()


def test_peaks_are_those_that_the_training_log_divides_by():
    for name, gpu in GPUS.items():
        assert gpu.bf16_flops == PEAK_BF16_FLOPS[name.partition("-")[0].upper()]


def rate(text: str, gpus: int = 64, gpu=H100) -> float:
    return tokens_per_second_per_gpu(load(f"{RUN}; {text}" if text else RUN), Cluster(gpu, gpus))


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ("model.recompute_granularity=full; model.recompute_method=uniform; model.recompute_num_layers=1", ""),
        ("model.recompute_granularity=full; model.recompute_method=block; model.recompute_num_layers=8", ""),
        ("parallel.overlap_grad_reduce=false; parallel.overlap_param_gather=false", ""),
        ("TP=2; SP=true", "TP=2; SP=true; parallel.tp_comm_overlap=true"),
        ("PP=4", "PP=4; VPP=4"),
        ("", "precision.preset=fp8_tensorwise"),
        ("precision.preset=fp32", ""),
        ("precision.preset=fp8_tensorwise; precision.emulate=true", "precision.preset=fp8_tensorwise"),
    ],
)
def test_what_must_be_slower_is(slower, faster):
    assert rate(slower) < rate(faster)


def test_a_pipeline_fills_and_drains_once_a_step():
    """Work that a step repeats for every micro-batch grows by (pp - 1) / (vpp * micro-batches)."""
    cluster, kind = Cluster(H100, 64), "matrices"
    pipelined = work(load(f"{RUN}; PP=4"), cluster)[kind]  # 16 replicas of 16 micro-batches
    interleaved = work(load(f"{RUN}; PP=4; VPP=4"), cluster)[kind]
    assert pipelined / interleaved == pytest.approx((16 + 3) / (16 + 3 / 4))


def test_a_layer_has_the_flops_of_its_matrices(monkeypatch):
    """Where nothing else is counted, a step takes its FLOPs over the peak."""
    monkeypatch.setattr("card_megatron.planning.speed.TILE", 0)
    config = load(RUN)
    ideal = work(config, Cluster(H100, 64))
    tokens = config.train.global_batch_size * 4096 / 64
    # norms and biases are parameters, but multiply nothing in a matrix
    assert (ideal["matrices"] + ideal["attention"]) * H100.bf16_flops == pytest.approx(
        tokens * flops_per_token(config.model, 4096), rel=1e-3
    )


def test_a_reduction_that_no_micro_batch_hides_is_paid_for():
    config = load(f"{RUN}; train.global_batch_size=64; data.sequence_length=256; train.micro_batch_size=1")
    assert work(config, Cluster(H100, 64))["exposed"] > 0
    assert work(load(RUN), Cluster(H100, 64))["exposed"] == 0
    apart = replace(config.parallel, overlap_grad_reduce=False, overlap_param_gather=False)
    assert step_seconds(config, Cluster(H100, 64)) < step_seconds(replace(config, parallel=apart), Cluster(H100, 64))
