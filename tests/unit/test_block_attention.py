"""Attention of block diffusion: the mask by its definition, and each way to compute it beside the dense mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from card_megatron.config.derived import flops_per_token, parameter_count
from card_megatron.config.schema import ModelConfig, ObjectiveConfig
from card_megatron.model.block_attention import attend_by_groups, flex_mask, group_mask, may_see


def by_definition(query: int, key: int, length: int, block_size: int) -> bool:
    """The three parts of the mask, in the words of its authors."""
    query_block, key_block = (place % length // block_size for place in (query, key))
    if query < length and key < length:
        return query_block == key_block  # block-diagonal among noisy
    if query < length:
        return key_block < query_block  # strictly earlier clean blocks for noisy
    if key < length:
        return False  # no clean input sees noise
    return key_block <= query_block  # block-causal among clean


def dense_mask(length: int, block_size: int) -> torch.Tensor:
    return torch.tensor(
        [[by_definition(query, key, length, block_size) for key in range(2 * length)] for query in range(2 * length)]
    )


@pytest.mark.parametrize(("length", "block_size"), [(12, 1), (12, 3), (12, 4), (12, 12), (1, 1)])
def test_the_mask_is_its_definition_element_by_element(length, block_size):
    places = torch.arange(2 * length)
    mask = may_see(places[:, None], places[None, :], length=length, block_size=block_size)
    assert torch.equal(mask, dense_mask(length, block_size))


@pytest.mark.parametrize(("name", "allowed"), [("arm", None), ("mdlm", 144), ("bd3lm", int(dense_mask(12, 4).sum()))])
def test_flops_count_the_pairs_that_may_see_each_other(name, allowed):
    """And the layers once for each copy of the text; a causal square counts half, without its diagonal's half."""
    model = ModelConfig(vocab_size=128)
    heads = 12 * model.num_layers * model.hidden_size
    output = 6 * 128 * model.hidden_size
    copies, pairs = (2 if name == "bd3lm" else 1), (72 if allowed is None else allowed)
    expected = 6 * (parameter_count(model) - 128 * model.hidden_size) * copies + output + heads * pairs / 12
    found = flops_per_token(model, 12, ObjectiveConfig(name=name, block_size=4))
    assert found == pytest.approx(expected, rel=1e-12)


def inputs(length: int, groups: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 2 * length, 8) for heads in (4, groups, groups)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def outputs_and_gradients(attend, length: int) -> list[torch.Tensor]:
    q, k, v = inputs(length)
    out = attend(q, k, v)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out * weights).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


def masked_sdpa(q, k, v, attn_mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, enable_gqa=True)


@pytest.mark.parametrize(("length", "block_size"), [(8, 4), (128, 1), (160, 16), (192, 96), (200, 200), (136, 8)])
def test_groups_of_blocks_equal_the_dense_mask(length, block_size):
    """Lengths of one group and of several, whole and not; blocks in groups, and blocks that are groups."""
    dense = dense_mask(length, block_size)
    ours = outputs_and_gradients(lambda q, k, v: attend_by_groups(masked_sdpa, q, k, v, block_size), length)
    theirs = outputs_and_gradients(lambda q, k, v: masked_sdpa(q, k, v, dense), length)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("length", "block_size"), [(256, 64), (256, 128), (256, 256)])
def test_large_blocks_compute_no_pair_that_is_masked(length, block_size):
    pairs = []

    def counted(q, k, v, attn_mask):
        pairs.append(q.shape[2] * k.shape[2])
        return masked_sdpa(q, k, v, attn_mask)

    attend_by_groups(counted, *inputs(length), block_size)
    places = torch.arange(2 * length)
    allowed = may_see(places[:, None], places[None, :], length=length, block_size=block_size)
    assert sum(pairs) == int(allowed.sum())


def test_masks_that_are_kept_serve_training_after_inference():
    q, k, v = (x.detach().float() for x in inputs(40))
    group_mask.cache_clear()
    with torch.inference_mode():
        attend_by_groups(masked_sdpa, q, k, v, 8)
    attend_by_groups(masked_sdpa, q.requires_grad_(), k, v, 8).sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


def test_flex_attention_has_the_same_mask():
    """Uncompiled, as far as a CPU can show; tests/gpu runs it compiled."""
    length, block_size = 160, 16
    mask = flex_mask(length, block_size, torch.device("cpu"))
    q, k, v = (x.detach() for x in inputs(length))
    ours = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(ours, masked_sdpa(q, k, v, dense_mask(length, block_size)), rtol=1e-10, atol=1e-12)
