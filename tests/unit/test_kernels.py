"""The resolved choice of every kernel: what Megatron takes, told before it is taken."""

from __future__ import annotations

import dataclasses
import json

import pytest

from card_megatron.objectives import OBJECTIVES
from card_megatron.platform import capabilities
from card_megatron.platform.kernels import BLOCK_ATTENTION, kernels_line, resolve_kernels
from tests.configs import load
from tests.unit.test_machine_checks import A100, H100

WITHOUT_ENGINE = dataclasses.replace(H100, transformer_engine=None)
WITH_APEX = dataclasses.replace(WITHOUT_ENGINE, apex="0.1", wgrad_fusion=True)


@pytest.mark.parametrize(
    ("overrides", "machine", "expected"),
    [
        ("", H100, {"norm": "TE", "Adam": "TE", "attention": "TE fused", "linear": "TE", "fp8": "none"}),
        ("precision=fp8_tensorwise", H100, {"fp8": "TE tensorwise hybrid"}),
        ("EMULATED", H100, {"fp8": "emulated tensorwise hybrid", "linear": "torch", "norm": "torch", "Adam": "TE"}),
        ("model.spec=local", H100, {"norm": "torch", "attention": "torch SDPA", "Adam": "TE"}),
        ("", WITHOUT_ENGINE, {"norm": "torch", "Adam": "torch fused", "attention": "torch SDPA"}),
        ("transformer.gradient_accumulation_fusion=true", WITH_APEX, {"Adam": "apex", "wgrad fusion": "apex"}),
        ("transformer.gradient_accumulation_fusion=true", A100, {"wgrad fusion": "TE"}),
        ("", dataclasses.replace(H100, flash_attention="2.8.3"), {"attention": "TE fused or flash"}),
        ("transformer.attention_backend=flash", H100, {"attention": "TE flash"}),
        ("transformer.cross_entropy_loss_fusion=true", H100, {"cross entropy": "Megatron fused"}),
        (
            "transformer.cross_entropy_loss_fusion=true; transformer.cross_entropy_fusion_impl=te",
            H100,
            {"cross entropy": "TE"},
        ),
        (
            "parallel.overlap_grad_reduce=true; TP=2; SP=true; parallel.tp_comm_overlap=true",
            H100,
            {"overlap": "gradients with backward, tensor parallelism with products"},
        ),
        ("objective.name=bd3lm; objective.masks=bernoulli", H100, {"attention": "torch FlexAttention", "linear": "TE"}),
        ("model.activation=gelu", H100, {"activation": "torch"}),
        ("model.activation=gelu; model.add_bias_linear=true", H100, {"activation": "fused"}),
        ("model.activation=swiglu", H100, {"activation": "fused"}),
        ("transformer.bias_activation_fusion=false", H100, {"activation": "torch"}),
        ("transformer.cuda_graph_impl=local", H100, {"CUDA graphs": "local"}),
    ],
)
def test_kernels_of_machines(overrides, machine, expected):
    kernels = resolve_kernels(load(overrides), machine)
    assert {part: kernels[part] for part in expected} == expected


def test_block_attention_is_told_of_the_objectives_that_have_it():
    assert set(BLOCK_ATTENTION) == {name for name, kind in OBJECTIVES.items() if kind.attention == "block"}


def test_here_megatron_takes_what_is_told(build):
    """The modules and the optimizer of a real state, against the record."""
    import torch

    from card_megatron.model import unwrap
    from card_megatron.model.attention import TorchAttention

    state = build()
    kernels = resolve_kernels(state.config, capabilities())
    layer = unwrap(state.model)[0].decoder.layers[0]
    assert kernels["norm"] == "torch" and isinstance(layer.input_layernorm, torch.nn.RMSNorm)
    assert kernels["attention"] == "torch SDPA" and isinstance(layer.self_attention.core_attention, TorchAttention)
    adam = state.optimizer.chained_optimizers[0].optimizer
    assert kernels["Adam"] == "torch fused" and type(adam).__module__ == "card_megatron.platform.adam"


def test_they_are_printed_at_the_start_and_kept_with_the_run(train, capfd):
    folder = train("--precision=fp8_tensorwise", "--precision.emulate=true", "--model.num_layers=3", console=True)
    kept = json.loads((folder / "kernels.json").read_text())
    assert kept["fp8"] == "emulated tensorwise hybrid" and kept["Adam"] == "torch fused"
    assert kernels_line(kept) in " ".join(capfd.readouterr().out.split())
