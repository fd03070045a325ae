"""The distributed optimizer's state in whole parameters, which any layout can load, without needless copies.

The layout on disk is Megatron's `fully_reshardable`. Its own way there gathers all state on every data-parallel rank,
through several copies. Here a parameter whose shard is whole on one rank is saved by that rank as it is, and one
that is cut goes to the rank that has most of it; so a save's memory and writing fall with the data-parallel size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

STATE_KEYS = ("param", "exp_avg", "exp_avg_sq")

Piece = tuple[int, int]
"""Start and end of a rank's shard in a flattened parameter."""


def layout_metadata() -> dict[str, Any]:
    """How every checkpoint of ours is laid out, in Megatron's words; new each time: Megatron adds groups to it."""
    return {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


class ShardMap:
    """Who holds which part of each parameter of one DistributedOptimizer; asked of all ranks once."""

    def __init__(self, optimizer: Any):
        self.group = optimizer.data_parallel_group
        self.params = [param for buffer in optimizer.buffers for param in buffer.param_index_map]
        held = {}
        for ranges in optimizer.gbuf_ranges:
            for buckets in ranges.values():
                for bucket in buckets:
                    for param, where in bucket["param_map"].items():
                        held[param] = (where["param"].start, where["param"].end)
        mine = [held.get(param) for param in self.params]
        self.held: list[list[Piece | None]] = [[] for _ in range(self.group.size())]
        dist.all_gather_object(self.held, mine, group=self.group)

    def pieces(self, number: int) -> dict[int, Piece]:
        """Rank -> its part of parameter `number`, for the ranks that have one."""
        found = {rank: pieces[number] for rank, pieces in enumerate(self.held)}
        return {rank: piece for rank, piece in found.items() if piece is not None and piece[1] > piece[0]}

    def owner(self, number: int) -> int:
        """The rank that saves a parameter: the one with most of it."""
        pieces = self.pieces(number)
        return max(pieces, key=lambda rank: (pieces[rank][1] - pieces[rank][0], -rank))

    @torch.no_grad()
    def whole(self, read: Callable[[torch.nn.Parameter], torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """(number, flat whole tensor) of the parameters that this rank owns; read() gives this rank's shard of one."""
        me, wholes, transfers = self.group.rank(), {}, []
        for number, param in enumerate(self.params):
            pieces, owner = self.pieces(number), self.owner(number)
            if owner == me and len(pieces) == 1:
                wholes[number] = read(param)
                continue
            if owner == me:
                shard = read(param)
                wholes[number] = shard.new_empty(param.numel())
                wholes[number][slice(*pieces[me])] = shard
                for rank, piece in pieces.items():
                    if rank != me:
                        transfers.append(self._transfer(dist.irecv, wholes[number][slice(*piece)], rank))
            elif me in pieces:
                transfers.append(self._transfer(dist.isend, read(param).contiguous(), owner))
        if transfers:
            for request in dist.batch_isend_irecv(transfers):
                request.wait()
        yield from wholes.items()

    def _transfer(self, operation: Callable, tensor: torch.Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, dist.get_global_rank(self.group, rank), group=self.group)


def save_without_copies(optimizer: Any) -> None:
    """Let Megatron's own sharded_state_dict() of this optimizer take its state from here when it saves."""
    for part in optimizer.chained_optimizers:
        part.sharded_param_state_fully_reshardable = _Saved(part)


class _Saved:
    """Stands in for DistributedOptimizer.sharded_param_state_fully_reshardable."""

    def __init__(self, optimizer: Any):
        self.optimizer, self.loading = optimizer, optimizer.sharded_param_state_fully_reshardable
        self.map: ShardMap | None = None

    def __call__(self, model_state: Any, is_loading: bool = False, metadata: Any = None) -> Any:
        if is_loading:
            return self.loading(model_state, is_loading, metadata)
        self.map = self.map or ShardMap(self.optimizer)
        saved: dict[int, dict[str, Any]] = {}
        for key in STATE_KEYS:
            read = functools.partial(self._read, key=key)
            named = sharded_like_model(self.map, model_state, f"optimizer.state.{key}.", read)
            for number, tensor in named.items():
                saved.setdefault(number, {})[key] = tensor
        return saved

    def _read(self, param: torch.nn.Parameter, key: str) -> torch.Tensor:
        main = main_shard(self.optimizer, param)
        if key == "param":
            return main.view(-1)
        moments = self.optimizer.optimizer.state.get(main)
        return moments[key].view(-1) if moments else torch.zeros_like(main).view(-1)  # no update has happened yet


def main_shard(optimizer: Any, param: torch.nn.Parameter) -> torch.Tensor:
    """This rank's fp32 shard of a weight, which a DistributedOptimizer updates.

    Megatron's own accessor also looks into the optimizer's state, and the look creates an empty entry: a checkpoint
    loaded afterwards then loses its moments without a word.
    """
    group, place = optimizer.model_param_group_index_map[param]
    return optimizer.optimizer.param_groups[group]["params"][place]


def sharded_like_model(
    shard_map: ShardMap, model_state: Any, prefix: str, read: Callable[[torch.nn.Parameter], torch.Tensor]
) -> dict[int, Any]:
    """Tensors shaped and placed like the model's weights, under prefixed names; only those that this rank saves."""
    places = model_places(model_state)
    named = {}
    for number, flat in shard_map.whole(read):
        place = places[shard_map.params[number]]
        tensor = renamed(place, prefix, flat.view(place.data.shape))
        # this rank saves it for all data-parallel replicas: the last number counts those
        named[number] = replace(tensor, replica_id=(*place.replica_id[:-1], 0))
    return named


def renamed(place: Any, prefix: str, data: torch.Tensor) -> Any:
    """Another tensor in a weight's place, under a prefixed name."""
    fields: dict[str, Any] = {"key": prefix + place.key, "data": data}
    if not isinstance(place, ShardedTensorFactory):
        fields["dtype"] = data.dtype
    return replace(place, **fields)


def model_places(model_state: Any) -> dict[torch.Tensor, Any]:
    """Weight -> where it stands in the whole model, as Megatron's sharded state dict says."""
    shards, _ = extract_sharded_tensors_and_factories(model_state)
    return {shard.data: shard for shard in nested_values(shards)}
