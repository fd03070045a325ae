"""Core attention of block diffusion: which inputs see which in [noisy ; clean], without a dense mask over both.

A noisy block sees itself and the clean blocks before it; a clean block sees itself and the clean blocks before it.
So no clean position sees noise, and one pass gives each noisy block the clean prefix that it is denoised from.

Shapes: S positions of the text (the input has 2S), B batch, N heads, D head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from card_megatron.model.attention import TorchAttention

GROUP = 32
"""Positions of the text that share one call on a CPU: fewer waste less of the masked squares, more make fewer calls."""


def may_see(query: Any, key: Any, *, length: int, block_size: int) -> Any:
    """True where input `query` of [noisy ; clean], `length` positions each, may see input `key`; any integers."""
    query_block, key_block = query % length // block_size, key % length // block_size
    query_noisy, key_noisy = query < length, key < length
    own = (query_block == key_block) & (query_noisy == key_noisy)
    return own | ((key_block < query_block) & ~key_noisy)


class BlockDiffusionAttention(TorchAttention):
    """Megatron's interface for [noisy ; clean]: FlexAttention on a GPU, calls by groups of blocks on a CPU."""

    def __init__(self, *args: Any, block_size: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.block_size = block_size

    def forward(
        self,
        query_SBND: torch.Tensor,
        key_SBND: torch.Tensor,
        value_SBND: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """[2S, B, N, D] in, [2S, B, N * D] out."""
        if self.with_cache is not None:
            return self.with_cache(query_SBND, key_SBND, value_SBND)
        if attention_mask is not None or attention_bias is not None or packed_seq_params is not None:
            raise ValueError("block diffusion has one mask: give no attention mask, bias or packed sequences")
        if self.cp_group.size() > 1:
            raise ValueError("block diffusion is not cut along the sequence: parallel.context_parallel_size must be 1")
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query_SBND, key_SBND, value_SBND))
        out_BNSD = self._flex(q, k, v) if q.is_cuda else self._grouped(q, k, v)
        return out_BNSD.permute(2, 0, 1, 3).flatten(2)

    def _flex(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = flex_mask(q.shape[2] // 2, self.block_size, q.device)
        return compiled_flex_attention()(
            q, k, v, block_mask=mask, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    def _grouped(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        gqa = q.shape[1] != k.shape[1]
        attend = functools.partial(F.scaled_dot_product_attention, scale=self.softmax_scale, enable_gqa=gqa)
        return attend_by_groups(attend, q, k, v, self.block_size)


def attend_by_groups(
    attend: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_size: int
) -> torch.Tensor:
    """[B, N, 2S, D] of all three -> [B, N, 2S, D], by few attend(q, k, v, attn_mask=...) for each group of blocks.

    Noisy and clean queries of a group of several blocks go together: they share the clean keys before the group, and
    only the keys of the group itself need a mask. A group of one large block needs none: its noisy queries see all of
    their keys, and so do its clean ones. Together they would compute each other's, half of the work where K is L.
    """
    length = q.shape[2] // 2
    size = min(length, max(GROUP // block_size, 1) * block_size)
    (q_noisy, q_clean), (k_noisy, k_clean), (v_noisy, v_clean) = (  # split: the gradient of slices would fill zeros
        [half.split(size, dim=2) for half in x.chunk(2, dim=2)] for x in (q, k, v)
    )
    noisy, clean = [], []
    for group in range(len(q_noisy)):
        if block_size > GROUP:
            keys = torch.cat([k_noisy[group], *k_clean[:group]], dim=2)
            values = torch.cat([v_noisy[group], *v_clean[:group]], dim=2)
            noisy.append(attend(q_noisy[group], keys, values, attn_mask=None))
            keys, values = (torch.cat(pieces[: group + 1], dim=2) for pieces in (k_clean, v_clean))
            clean.append(attend(q_clean[group], keys, values, attn_mask=None))
        else:
            out = attend(
                torch.cat([q_noisy[group], q_clean[group]], dim=2),
                torch.cat([k_noisy[group], *k_clean[: group + 1]], dim=2),
                torch.cat([v_noisy[group], *v_clean[: group + 1]], dim=2),
                attn_mask=group_mask(length, block_size, group * size, min(length, (group + 1) * size), q.device),
            )
            of_noisy, of_clean = out.chunk(2, dim=2)
            noisy.append(of_noisy)
            clean.append(of_clean)
    return torch.cat([*noisy, *clean], dim=2)


@functools.lru_cache(maxsize=256)
def group_mask(length: int, block_size: int, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """bool[2 * (stop - start), stop - start + stop]: queries noisy and clean, keys noisy of the group and all clean."""
    with torch.inference_mode(False):  # kept for later calls, which may train
        group = torch.arange(start, stop, device=device)
        queries = torch.cat([group, group + length])
        keys = torch.cat([group, torch.arange(length, length + stop, device=device)])
        return may_see(queries[:, None], keys[None, :], length=length, block_size=block_size)


@functools.lru_cache(maxsize=8)
def flex_mask(length: int, block_size: int, device: torch.device) -> BlockMask:
    """Tiles that FlexAttention may skip, and the rule within those that it may not."""

    def mask_mod(batch, head, query, key):
        return may_see(query, key, length=length, block_size=block_size)

    with torch.inference_mode(False):  # as above
        return create_block_mask(mask_mod, B=None, H=None, Q_LEN=2 * length, KV_LEN=2 * length, device=device)


@functools.cache
def compiled_flex_attention() -> Callable[..., torch.Tensor]:
    """Compiled, or it would make the dense scores."""
    return torch.compile(flex_attention)
