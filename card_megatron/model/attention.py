"""Core attention on torch's scaled_dot_product_attention, with context parallelism.

Megatron's local DotProductAttention materialises the scores and refuses context parallelism; Transformer Engine's
needs CUDA. This one stands in Megatron's layer spec where Transformer Engine does not.

Shapes: S sequence, B batch, N heads, D head width.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule


class TorchAttention(MegatronModule):
    """Scaled dot product attention: causal or with a given mask, grouped queries, context parallelism."""

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused,
    ):
        super().__init__(config=config)
        for field, supported in (("window_size", None), ("softmax_type", "vanilla")):
            if getattr(config, field, supported) != supported:
                raise ValueError(f"model.transformer.{field} needs Transformer Engine (model.spec=te); remove it")
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = groups.cp
        self.with_cache: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        """Set while a model decodes: takes the place of forward(), with the keys and values that it keeps."""

    def forward(
        self,
        query_SBND: torch.Tensor,
        key_SBND: torch.Tensor,
        value_SBND: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params=None,
    ) -> torch.Tensor:
        """Megatron's interface: [S, B, N, D] in, [S, B, N * D] out; a mask is True where attention is forbidden."""
        if self.with_cache is not None:
            return self.with_cache(query_SBND, key_SBND, value_SBND)
        if attention_bias is not None or packed_seq_params is not None:
            raise ValueError("attention bias and packed sequences need Transformer Engine (model.spec=te)")
        causal = (attn_mask_type or self.attn_mask_type) == AttnMaskType.causal
        allowed = None if attention_mask is None else ~attention_mask
        if self.cp_group.size() > 1:
            key_SBND, value_SBND = (_GatherSequence.apply(x, self.cp_group) for x in (key_SBND, value_SBND))
            allowed = self._allowed_for_this_rank(allowed, key_SBND.shape[0], causal, query_SBND.device)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query_SBND, key_SBND, value_SBND))
        with self._dropout_rng():
            out_BNSD = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=allowed,
                is_causal=causal and allowed is None and q.shape[2] > 1,
                dropout_p=self.dropout if self.training else 0.0,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return out_BNSD.permute(2, 0, 1, 3).flatten(2)

    def _dropout_rng(self):
        """Heads differ between tensor-parallel ranks, and so must their dropout."""
        if self.dropout and self.training and not self.config.sequence_parallel:
            return tensor_parallel.get_cuda_rng_tracker().fork()
        return contextlib.nullcontext()

    def _allowed_for_this_rank(self, allowed, length: int, causal: bool, device) -> torch.Tensor | None:
        """Rows: the positions of this rank's queries. Columns: those of the gathered keys, in gathered order."""
        size = self.cp_group.size()
        rows = zigzag_positions(length, size, self.cp_group.rank()).to(device)
        columns = torch.cat([zigzag_positions(length, size, rank) for rank in range(size)]).to(device)
        if allowed is not None:
            return allowed[..., rows, :][..., columns]
        return (columns[None, :] <= rows[:, None])[None, None] if causal else None


@functools.cache
def zigzag_positions(length: int, size: int, rank: int) -> torch.Tensor:
    """Positions that Megatron's get_batch_on_this_cp_rank gives a rank: of 2*size pieces, one from each end."""
    early, late = torch.arange(length).chunk(2 * size)[rank], torch.arange(length).chunk(2 * size)[-1 - rank]
    return torch.cat([early, late])


class _GatherSequence(torch.autograd.Function):
    """All-gather along the sequence; every rank's queries used the result, so backward sums and scatters."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group) -> torch.Tensor:
        ctx.group = group
        gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        torch.distributed.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        mine = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        torch.distributed.reduce_scatter_tensor(mine, grad.contiguous(), group=ctx.group)
        return mine, None
