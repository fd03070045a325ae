"""An exponential moving average of the weights, cut as the optimizer's main weights are: its memory falls with DP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from card_megatron.checkpoint.optimizer_state import ShardMap, main_shard, model_places, renamed, sharded_like_model
from card_megatron.checkpoint.source import EMA_PREFIX


class Ema:
    """ema <- decay * ema + (1 - decay) * weight, in fp32, after every update."""

    def __init__(self, optimizer: Any, model: list[Any], decay: float):
        self.optimizer, self.model, self.decay = optimizer, model, decay
        self.maps: list[ShardMap] = []
        self.main = [_main_shards(part) for part in optimizer.chained_optimizers]
        self.average = [{param: shard.clone() for param, shard in shards.items()} for shards in self.main]

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again from the weights as they are."""
        for average, main in zip(self.average, self.main, strict=True):
            for param, shard in main.items():
                average[param].copy_(shard)

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the weights: call once after each update."""
        for average, main in zip(self.average, self.main, strict=True):
            if average:
                torch._foreach_lerp_(list(average.values()), list(main.values()), 1.0 - self.decay)

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """The model with averaged weights, for as long as the context lasts; the weights come back bit for bit."""
        kept = [{param: shard.clone() for param, shard in shards.items()} for shards in self.main]
        self._put(self.average)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, shards: list[dict[Any, torch.Tensor]]) -> None:
        for part, main, values in zip(self.optimizer.chained_optimizers, self.main, shards, strict=True):
            for param, value in values.items():
                main[param].copy_(value)
            part._copy_main_params_to_model_params()
        for chunk in self.model:
            chunk.start_param_sync(force_sync=True)

    # ------------------------------------------------------------ checkpoints

    def to_save(self, model_state: Any) -> list[dict[int, Any]]:
        """What this rank saves of the average. Every rank must call this."""
        self.maps = self.maps or [ShardMap(part) for part in self.optimizer.chained_optimizers]
        return [
            sharded_like_model(shard_map, model_state, EMA_PREFIX, average.__getitem__)
            for shard_map, average in zip(self.maps, self.average, strict=True)
        ]

    def to_load(self, model_state: Any) -> list[dict[int, Any]]:
        """What this rank asks of a checkpoint: every parameter that it has a part of, whole."""
        places = model_places(model_state)
        return [
            {
                number: renamed(places[param], EMA_PREFIX, torch.empty_like(param.detach(), dtype=torch.float32))
                for number, param in enumerate(average)
            }
            for average in self.average
        ]

    @torch.no_grad()
    def load(self, loaded: list[dict[int, torch.Tensor]]) -> None:
        """Take this rank's parts of what to_load() asked for."""
        for part, average, wholes in zip(self.optimizer.chained_optimizers, self.average, loaded, strict=True):
            for number, (param, shard) in enumerate(average.items()):
                where = part._get_model_param_range_map(param)["param"]
                shard.copy_(wholes[number].flatten()[where.start : where.end])


def _main_shards(part: Any) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Weight -> this rank's fp32 shard of it, which the optimizer updates."""
    return {param: main_shard(part, param).detach() for param in part.model_param_group_index_map}
