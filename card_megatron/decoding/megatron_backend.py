"""Megatron's GPTModel, tensor and pipeline parallel: each rank runs its part and keeps its part of the cache.

Megatron's own inference contexts have one length for a whole batch, and its rotary embedding knows no positions of
rows. So the model's parts are called one by one here: embedding, layers, output; the layers get no rotary embedding,
and the core attention (model.attention.TorchAttention) hands over to ours, which rotates by the rows' own positions.

Shapes: W columns, B rows, N heads, D head width, H hidden, M wanted outputs, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rope_utils import _rotate_half
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from card_megatron.decoding.cache import Branches, CachePass, KVCache
from card_megatron.decoding.packed_linear import PackedWeight
from card_megatron.model.attention import TorchAttention


class MegatronBackend:
    """decoding.engine's Backend over inference.load_model's GPTModel; all ranks of the model must do the same.

    Between passes the model is as it was. Make a new backend when the parameters change: linear layers are packed here.
    """

    def __init__(self, model: GPTModel):
        self.model, self.config = model, model.config
        if self.config.sequence_parallel or self.config.context_parallel_size > 1:
            raise ValueError("decoding needs a layout of tensor and pipeline parallelism alone; see inference_config()")
        self.vocab_size, self.max_positions = model.true_vocab_size, model.max_sequence_length
        self.attentions = [layer.self_attention for layer in model.decoder.layers]
        for attention in self.attentions:
            if not isinstance(attention.core_attention, TorchAttention):
                raise ValueError(
                    "decoding needs local layers (model.spec=local); load the model by inference.load_model"
                )
        self.query_heads = self.config.num_attention_heads // self.config.tensor_model_parallel_size
        self.stages = Stages()
        self.model_group = parallel_state.get_model_parallel_group()
        self.model_ranks = dist.get_process_group_ranks(self.model_group)
        shared = model.post_process and model.share_embeddings_and_output_weights
        self.output_weight = model.shared_embedding_or_output_weight() if shared else None
        self.linears = [(linear, self._product(linear)) for linear in self._linears()]
        self.cache: KVCache | None = None

    @torch.inference_mode()
    def reserve(self, slots: int, capacity: int) -> int:
        if self.cache is None or not self.cache.fits(slots, capacity):
            self.cache = None  # let go of the old one first
            first, weight = self.attentions[0], next(self.model.parameters())
            self.cache = KVCache(
                *(
                    len(self.attentions),
                    slots,
                    first.num_query_groups_per_partition,
                    capacity,
                    first.hidden_size_per_attention_head,
                ),
                dtype=weight.dtype,
                device=weight.device,
            )
        mine = torch.tensor(self.cache.nbytes, device=self.cache.keys.device)
        dist.all_reduce(mine, group=self.model_group)
        return int(mine)

    @torch.inference_mode()
    def forward(
        self,
        tokens_BW: np.ndarray,
        starts_B: np.ndarray,
        first_slot: int,
        wanted: np.ndarray | None,
        branches: Branches | None = None,
    ) -> torch.Tensor | None:
        assert self.cache is not None, "reserve() comes first"
        device, (rows, width) = self.cache.keys.device, tokens_BW.shape
        groups = self.query_heads // self.cache.kv_heads
        cache_pass = CachePass(self.cache, first_slot, starts_B, width, groups, branches)
        with self._decoding(cache_pass):
            if self.model.pre_process:
                tokens = torch.from_numpy(np.ascontiguousarray(tokens_BW)).to(device)
                hidden_WBH = self.model.embedding(tokens, cache_pass.positions_BW)
            else:
                dtype = self.config.pipeline_dtype or self.config.params_dtype
                hidden_WBH = torch.empty((width, rows, self.config.hidden_size), dtype=dtype, device=device)
                self.stages.receive(hidden_WBH)
            hidden_WBH = self._layers(hidden_WBH)
            if not self.model.post_process:
                self.stages.send(hidden_WBH)
            if wanted is not None and not len(wanted):
                return None
            if self.model.post_process:
                hidden_MH = hidden_WBH.transpose(0, 1).flatten(0, 1)
                if wanted is not None:
                    hidden_MH = hidden_MH[torch.from_numpy(wanted).to(device)]
                logits_MV = self._logits(hidden_MH)
            else:
                outputs = rows * width if wanted is None else len(wanted)
                logits_MV = torch.empty((outputs, self.model.vocab_size), dtype=torch.float32, device=device)
        return self.stages.from_last(logits_MV)

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        assert self.cache is not None
        self.cache.move(source, target, length)

    def agree(self, value: int) -> int:
        if len(self.model_ranks) == 1:
            return value
        shared = torch.tensor(value, device=next(self.model.parameters()).device)
        dist.broadcast(shared, src=self.model_ranks[0], group=self.model_group)
        return int(shared)

    @contextlib.contextmanager
    def _decoding(self, cache_pass: CachePass) -> Iterator[None]:
        """The model's modules do what decoding needs, for the time of one pass."""
        rotate = Rotation(self.model.rotary_pos_emb, cache_pass.positions_BW)
        for layer, attention in enumerate(self.attentions):
            core = attention.core_attention
            turn = rotate if self._has_rope(attention) else None
            core.with_cache = functools.partial(_attend, cache_pass, layer, turn, core.softmax_scale)
        for linear, multiply in self.linears:
            linear._forward_impl = multiply
        try:
            yield
        finally:
            for attention in self.attentions:
                attention.core_attention.with_cache = None
            for linear, _ in self.linears:
                del linear._forward_impl
            self.model.decoder.set_input_tensor(None)

    def _layers(self, hidden_WBH: torch.Tensor) -> torch.Tensor:
        self.model.decoder.set_input_tensor(hidden_WBH)  # what a stage other than the first reads
        return self.model.decoder(hidden_states=hidden_WBH, attention_mask=None, rotary_pos_emb=None)

    def _logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """Of the whole vocabulary, gathered from the tensor-parallel ranks."""
        logits, _ = self.model.output_layer(hidden_MH[:, None], weight=self.output_weight, runtime_gather_output=True)
        return logits[:, 0].float()

    def _linears(self) -> list[Any]:
        parts = [self.model.decoder, *([self.model.output_layer] if self.model.post_process else [])]
        parallel = (ColumnParallelLinear, RowParallelLinear)
        return [module for part in parts for module in part.modules() if type(module) in parallel]

    def _product(self, linear: Any) -> Callable[..., torch.Tensor]:
        """What a parallel linear layer calls to multiply; it communicates itself, before and after."""
        weight = self.output_weight if linear.weight is None else linear.weight
        assert weight is not None
        packed = PackedWeight(weight)
        return lambda input, weight, bias=None, **unused: packed.linear(input, bias)

    def _has_rope(self, attention: Any) -> bool:
        without = self.config.no_rope_freq
        return not (without and without[attention.layer_number - 1])


class Rotation:
    """Megatron's rotary embedding at each row's own positions; cosines and sines are those of all layers."""

    def __init__(self, rotary: Any, positions_BW: torch.Tensor):
        # The rotary module's own frequencies, with whatever scaling it has: of one position, and linear in it.
        positions_WB = positions_BW.T.to(rotary.inv_freq.dtype)
        if rotary.seq_len_interpolation_factor is not None:
            positions_WB = positions_WB * (1 / rotary.seq_len_interpolation_factor)
        angles = positions_WB[:, :, None, None] * rotary.inv_freq.to(positions_WB.device)
        self.interleaved = rotary.rotary_interleaved
        angles = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, x_WBND: torch.Tensor) -> torch.Tensor:
        turned = self.cos.shape[-1]
        x, rest = x_WBND[..., :turned], x_WBND[..., turned:]
        x = x * self.cos.to(x.dtype) + _rotate_half(x, self.interleaved) * self.sin.to(x.dtype)
        return torch.cat((x, rest), dim=-1) if rest.shape[-1] else x


def _attend(cache_pass: CachePass, layer: int, rotate: Rotation | None, scale: float | None, *qkv_WBND) -> torch.Tensor:
    """In the place of TorchAttention.forward: [W, B, N, D] in, [W, B, N * D] out."""
    query, key, value = qkv_WBND
    if rotate is not None:
        query, key = rotate(query), rotate(key)
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    out_BWND = cache_pass.attend(layer, query, key, value, scale)
    return out_BWND.transpose(0, 1).flatten(2)


class Stages:
    """The pipeline of this rank: hidden states go to the next stage, the last stage's logits to all."""

    def __init__(self) -> None:
        self.group = parallel_state.get_pipeline_model_parallel_group()
        self.ranks = dist.get_process_group_ranks(self.group)
        self.mine = self.ranks.index(dist.get_rank())

    def receive(self, tensor: torch.Tensor) -> None:
        dist.recv(tensor, src=self.ranks[self.mine - 1], group=self.group)

    def send(self, tensor: torch.Tensor) -> None:
        dist.send(tensor.contiguous(), dst=self.ranks[self.mine + 1], group=self.group)

    def from_last(self, tensor: torch.Tensor) -> torch.Tensor:
        if len(self.ranks) > 1:
            dist.broadcast(tensor := tensor.contiguous(), src=self.ranks[-1], group=self.group)
        return tensor
