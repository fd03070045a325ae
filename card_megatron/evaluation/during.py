"""Tasks on the ranks of a run that trains: the saved checkpoint as a second model, in the run's own groups.

The run's model itself may have Transformer Engine's layers, sequence parallelism or sharded weights under way; the
checkpoint is read into the layers that evaluation knows, and costs the memory of the weights while it lasts.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from card_megatron.checkpoint.source import open_source
from card_megatron.config.precision import resolve_precision
from card_megatron.config.schema import RunConfig
from card_megatron.data.tokenizers import load_tokenizer
from card_megatron.decoding.model import OpenModel, block_size_of
from card_megatron.evaluation.lm_eval_main import import_harness
from card_megatron.platform import capabilities, install


class DuringTraining:
    """What training calls after a save; refuses unknown tasks and missing data when it is made."""

    def __init__(self, config: RunConfig):
        capabilities()  # looked at before install(), which answers for CUDA
        install()
        import_harness()
        from card_megatron.evaluation.tasks import load_tasks

        self.names, self.limit = list(config.eval.tasks), config.eval.tasks_limit
        self.data = None if config.eval.tasks_data is None else Path(config.eval.tasks_data)
        self.ema = config.ema.validate
        load_tasks(self.names, self.data)

    def __call__(self, checkpoint: Path, beat: Callable[[], None]) -> dict[str, Any] | None:
        from card_megatron.evaluation.runner import evaluate_tasks

        with undisturbed():
            model = open_in_groups(checkpoint, ema=self.ema, beat=beat)
            found = evaluate_tasks(model, self.names, data=self.data, limit=self.limit)
        if found is None:
            return None
        record = {"tasks": found["results"]}
        if found["likelihood"] == "bound":
            names = ("mc_samples", "mean_loglikelihood_error")
            record["task_bounds"] = {name: found[name] for name in names if found[name] is not None}
        return record


def open_in_groups(checkpoint: Path, *, ema: bool, beat: Callable[[], None]) -> OpenModel:
    """A checkpoint in the tensor and pipeline parallel groups that are there; the other ranks are replicas."""
    from megatron.core import parallel_state

    from card_megatron.decoding.megatron_backend import MegatronBackend
    from card_megatron.inference import inference_config, load_model

    source = open_source(checkpoint)
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    dtype = resolve_precision(source.config.precision).params_dtype if torch.cuda.is_available() else "fp32"
    config = inference_config(
        source.config,
        world_size=torch.distributed.get_world_size(),
        tensor=tensor,
        pipeline=pipeline,
        dtype=dtype,
    )
    assert source.config.data.tokenizer is not None, "check() refuses eval.tasks on mock data"
    place = parallel_state.get_tensor_model_parallel_rank() + parallel_state.get_pipeline_model_parallel_rank()
    backend: Any = Alive(MegatronBackend(load_model(source, config, ema=ema)), beat)
    return OpenModel(
        backend,
        load_tokenizer(source.config.data.tokenizer),
        source.config.objective.name,
        source.path,
        block_size_of(source.config.objective),
        replica=parallel_state.get_data_parallel_rank(),
        replicas=parallel_state.get_data_parallel_world_size(),
        speaks=torch.distributed.get_rank() == 0,
        leads=place == 0,
    )


class Alive:
    """A backend that gives a sign of life with every pass: an evaluation may take longer than a step ever does."""

    def __init__(self, backend: Any, beat: Callable[[], None]):
        self.backend, self.beat = backend, beat

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def forward(self, *arguments: Any) -> Any:
        self.beat()
        return self.backend.forward(*arguments)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """All random states are as before: the harness seeds every generator, and the run's dropout must not notice."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state(), tracker.get_states()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
        tracker.set_states(kept[3])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
