"""FP8's values without its hardware: torchao's emulated float8 and a loop over blocks say what they are."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from card_megatron.model.fp8_emulation import (
    E4M3,
    E5M2,
    ColumnParallelFp8Linear,
    Fp8Linear,
    Recipe,
    RowParallelFp8Linear,
    round_to_fp8,
)

TENSORWISE, BLOCKWISE = Recipe(gradient=E5M2), Recipe(gradient=E4M3, block=128)


def linear_case(tokens: int = 96, inputs: int = 160, outputs: int = 200) -> tuple[torch.Tensor, ...]:
    """Input, weight and output gradient with outliers, in the magnitudes of a real model."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(tokens, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    grad = torch.randn(tokens, outputs, generator=generator) * 1e-4
    x[3, 5], grad[7, 9] = 60.0, 0.02
    return x, weight * 0.02, grad


def through(recipe: Recipe, x, weight, grad) -> tuple[torch.Tensor, ...]:
    """Output, input gradient and weight gradient."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = Fp8Linear.apply(x, weight, recipe, None)
    y.backward(grad)
    return y.detach(), x.grad, weight.grad


# ---------------------------------------------------------------- one scale a tensor: torchao


@pytest.fixture(autouse=True, scope="module")
def torchao():
    """`make env` keeps it apart; what other tests import must not find it."""
    folder = str(Path(sys.prefix) / "torchao")
    sys.path.append(folder)
    yield
    sys.path.remove(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        del sys.modules[name]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("high_precision", [torch.float32, torch.bfloat16])
def test_a_tensor_has_torchaos_fp8_numbers_bit_for_bit(dtype, high_precision):
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    for x in linear_case():  # in bf16 some numbers lie right between two of FP8
        theirs = hp_tensor_to_float8_dynamic(x.to(high_precision), dtype, LinearMMConfig())
        ours = round_to_fp8(x.to(high_precision), dtype)
        assert torch.equal((ours * theirs._scale).to(dtype).float(), theirs._data.float())
        torch.testing.assert_close(ours, theirs._data.float() / theirs._scale, rtol=2**-22, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-3)])
def test_a_tensorwise_linear_is_torchaos_emulated_one(dtype, tolerance):
    """The same rounded matrices; torch takes another kernel for their other memory order, and adds up in another."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    x, weight, grad = (tensor.to(dtype) for tensor in linear_case())
    theirs = torch.nn.Sequential(torch.nn.Linear(x.shape[1], weight.shape[0], bias=False, dtype=dtype))
    theirs[0].weight.data.copy_(weight)
    convert_to_float8_training(theirs, config=Float8LinearConfig(emulate=True))
    their_x = x.clone().requires_grad_()
    y = theirs(their_x)
    y.backward(grad)
    expected = (y.detach(), their_x.grad, theirs[0].weight.grad)
    for ours, oracle in zip(through(TENSORWISE, x, weight, grad), expected, strict=True):
        assert ours.dtype == dtype
        assert float((ours - oracle).float().norm() / oracle.float().norm()) < tolerance


# ---------------------------------------------------------------- a scale a block: one block after the other


def by_definition(x: torch.Tensor, dtype: torch.dtype, high: int, wide: int) -> torch.Tensor:
    """Each block by itself, its scale in Python's own arithmetic."""
    result = torch.empty_like(x)
    for row in range(0, x.shape[0], high):
        for column in range(0, x.shape[1], wide):
            block = x[row : row + high, column : column + wide]
            largest = max(abs(value) for value in block.flatten().tolist())
            scale = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / largest)) if largest else 1.0
            result[row : row + high, column : column + wide] = (block * scale).to(dtype).float() / scale
    return result


@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_blocks_are_rounded_one_by_one(block, dtype):
    x = linear_case(tokens=200, inputs=300)[0]
    x[:, :140] *= 1e-3
    x[128:, :128] = 0.0
    assert torch.equal(round_to_fp8(x, dtype, block), by_definition(x, dtype, *block))


def test_blockwise_products_take_blocks_along_what_they_sum_over():
    x, weight, grad = linear_case(tokens=256, inputs=256, outputs=384)
    y, grad_x, grad_weight = through(BLOCKWISE, x, weight, grad)
    rounded = by_definition(weight, E4M3, 128, 128)
    assert torch.equal(y, by_definition(x, E4M3, 1, 128) @ rounded.t())
    assert torch.equal(grad_x, by_definition(grad, E4M3, 1, 128) @ rounded)
    assert torch.equal(grad_weight, by_definition(grad, E4M3, 128, 1).t() @ by_definition(x, E4M3, 128, 1))


# ---------------------------------------------------------------- edges


def test_rounding_is_as_coarse_as_fp8_and_no_coarser():
    """Half a step: 2^-4 of a number with three bits of mantissa, 2^-3 with two, where it is not subnormal."""
    x = torch.logspace(-1, 1, 4001).view(1, -1)
    assert 0.05 < float((round_to_fp8(x, E4M3) / x - 1).abs().max()) <= 2**-4
    assert 0.1 < float((round_to_fp8(x, E5M2) / x - 1).abs().max()) <= 2**-3


def test_blocks_confine_an_outlier():
    """What a tensor's one scale pushes below FP8's smallest number survives in a block of its own."""
    x = torch.full((1, 256), 1e-3)
    x[0, 200] = 1e4
    assert (round_to_fp8(x, E4M3)[0, :128] == 0).all()
    assert torch.allclose(round_to_fp8(x, E4M3, (1, 128))[0, :128], x[0, :128], rtol=2**-4)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("block", [None, (1, 2)])
def test_zeros_stay_zeros_and_tiny_or_huge_numbers_stay_finite(dtype, block):
    assert torch.equal(round_to_fp8(torch.zeros(3, 4), dtype, block), torch.zeros(3, 4))
    for size in (1e-44, 1e-38, 1e38):
        assert round_to_fp8(torch.full((3, 4), size), dtype, block).isfinite().all()
    ones = torch.full((3, 4), 3.0)
    assert torch.allclose(round_to_fp8(ones, dtype, block), ones)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_hidden(bad):
    x = torch.ones(2, 4)
    x[1, 2] = bad
    assert round_to_fp8(x, E4M3)[1, 2].isnan()
    assert round_to_fp8(x, E4M3, (1, 4))[1].isnan().any()


# ---------------------------------------------------------------- in Megatron's modules


def chunk_of(*overrides: str):
    from card_megatron.model import build_model, build_transformer_config
    from tests.configs import MOCK, load_config

    config, _ = load_config([*MOCK, "--model.num_layers=4", *overrides])
    return build_model(config, build_transformer_config(config))[0]


@pytest.mark.usefixtures("one_rank")
def test_the_linears_of_inner_layers_are_in_fp8_and_nothing_else_is():
    emulated = chunk_of("--precision=fp8_tensorwise", "--precision.emulate=true")
    kinds = {name: type(module) for name, module in emulated.named_modules() if hasattr(module, "recipe")}
    assert sorted(kinds) == sorted(
        f"decoder.layers.{layer}.{name}"
        for layer in (1, 2)
        for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    )
    assert kinds["decoder.layers.1.mlp.linear_fc1"] is ColumnParallelFp8Linear
    assert kinds["decoder.layers.1.mlp.linear_fc2"] is RowParallelFp8Linear
    everywhere = chunk_of(
        "--precision=fp8_blockwise", "--precision.emulate=true", "--precision.first_last_layers_bf16=false"
    )
    assert sum(hasattr(module, "recipe") for module in everywhere.modules()) == 16
    assert everywhere.decoder.layers[0].mlp.linear_fc1.recipe == BLOCKWISE
    plain = chunk_of()
    assert not any(hasattr(module, "recipe") for module in plain.modules())
    assert list(plain.state_dict()) == list(emulated.state_dict())  # so checkpoints are exchanged freely


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("bias", ["true", "false"])
def test_a_bias_is_added_and_learns_outside_of_fp8(bias):
    model = chunk_of("--precision=fp8_tensorwise", "--precision.emulate=true", f"--model.add_qkv_bias={bias}")
    linear = model.decoder.layers[1].self_attention.linear_qkv
    x, grad = torch.randn(5, 2, 128), torch.randn(5, 2, linear.weight.shape[0])
    if bias == "true":
        linear.bias.data.normal_()
    y, _ = linear(x)
    y.backward(grad)
    expected = Fp8Linear.apply(x, linear.weight.detach(), TENSORWISE, None)
    assert torch.equal(y, expected + linear.bias if bias == "true" else expected)
    if bias == "true":
        torch.testing.assert_close(linear.bias.grad, grad.sum((0, 1)))
