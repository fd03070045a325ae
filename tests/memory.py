"""What a rank of a real run holds, counted tensor by tensor: the reality that card plan's memory model is held to."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from card_megatron.config import RunConfig


class SavedTensors:
    """Bytes that autograd keeps for the backward pass, each storage once, for as long as anything refers to it."""

    def __init__(self, known: set[int]):
        self.known = known
        """Storages that are there anyway: weights and gradients."""
        self.holders: Counter[int] = Counter()
        self.live = self.peak = 0

    def __enter__(self):
        import torch

        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)
        return self.hooks.__enter__()

    def __exit__(self, *exception):
        return self.hooks.__exit__(*exception)

    def _pack(self, tensor):
        kept, storage = _Kept(tensor.detach()), tensor.untyped_storage()
        pointer, size = storage.data_ptr(), storage.nbytes()
        if size and pointer not in self.known:
            self.holders[pointer] += 1
            if self.holders[pointer] == 1:
                self.live += size
                self.peak = max(self.peak, self.live)
            weakref.finalize(kept, self._release, pointer, size)
        return kept

    def _release(self, pointer: int, size: int) -> None:
        self.holders[pointer] -= 1
        if not self.holders[pointer]:
            self.live -= size


class _Kept:
    def __init__(self, tensor):
        self.tensor = tensor


def measure(config: RunConfig) -> dict[str, Any]:
    """Bytes of this rank's weights, gradients, optimizer state, average and peak of saved activations, in one step."""
    from megatron.core import parallel_state

    from card_megatron.platform import ranks_from_environment
    from card_megatron.training.preflight import preflight
    from card_megatron.training.state import build_state
    from card_megatron.training.step import train_step

    state = build_state(preflight(config, ranks_from_environment()))
    weights = {p.untyped_storage().data_ptr() for chunk in state.model for p in chunk.parameters()}
    buffers = [b for chunk in state.model for b in chunk.buffers + chunk.expert_parallel_buffers]
    known = weights | {b.grad_data.untyped_storage().data_ptr() for b in buffers}
    saved = SavedTensors(known)
    with saved:
        train_step(state)
    optimizer: dict[int, int] = {}
    for part in state.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                for tensor in (param, *part.optimizer.state[param].values()):
                    if tensor.untyped_storage().data_ptr() not in weights:
                        optimizer[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    measured = dict(
        weights=sum(b.param_data.numel() * b.param_data.element_size() for b in buffers),
        gradients=sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
        optimizer=sum(optimizer.values()),
        average=sum(t.numel() * 4 for part in (state.ema.average if state.ema else []) for t in part.values()),
        activations=saved.peak,
        stage=parallel_state.get_pipeline_model_parallel_rank(),
    )
    parallel_state.destroy_model_parallel()
    return measured


def measure_all(configs: list[RunConfig]) -> list[dict[str, Any]]:
    """Several runs one after the other in one set of ranks."""
    return [measure(config) for config in configs]
