"""What watches the steps of a run without changing them: section timers, stragglers, profiles, garbage collection."""

from __future__ import annotations

import contextlib
import gc
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state

from card_megatron.config.schema import RunConfig
from card_megatron.training.profiling import ProfileWindow
from card_megatron.training.sections import NAMES, Sections
from card_megatron.training.stragglers import Place, Stragglers


class Instruments:
    """Called before and after each step, and once a record; every rank calls everything."""

    def __init__(self, config: RunConfig, sections: Sections, events: Callable[..., None]):
        self.config, self.sections = config, sections
        self.profile = ProfileWindow(config.profile, config.run_dir, torch.distributed.get_rank(), events)
        self.steps: list[dict[str, float]] = []
        """Sections of each step since the last record."""
        self.between = dict.fromkeys(NAMES, 0.0)
        """Time in sections that lie between steps, since the last record."""
        self.stragglers: Stragglers | None = None
        if config.logging.straggler_factor and torch.distributed.get_world_size() > 1:
            self.stragglers = Stragglers(everyone(), config.logging.straggler_factor, events)

    def before_step(self, step: int) -> None:
        self.profile.before_step(step)

    def after_step(self, step: int) -> None:
        """The step is done on the device too: all ranks have agreed on its loss."""
        self.steps.append(self.sections.read())
        self.profile.after_step(step)
        interval = self.config.train.manual_gc_interval
        if interval is not None and step % interval == 0:
            gc.collect()

    @contextlib.contextmanager
    def outside(self, name: str) -> Iterator[None]:
        """A section that lies between steps."""
        started = time.perf_counter()
        yield
        self.between[name] += time.perf_counter() - started

    def of_window(self, step: int) -> dict[str, Any]:
        """What the record of the steps since the last one gets; one small gather over all ranks."""
        steps, between = self.steps, self.between
        self.steps, self.between = [], dict.fromkeys(NAMES, 0.0)
        timers = self.config.profile.timers
        if not steps or not (timers or self.stragglers is not None):
            return {}
        own = statistics.median(step["forward"] + step["backward"] for step in steps)
        data = statistics.median(step["data"] for step in steps)
        means = [(sum(step[name] for step in steps) + between[name]) / len(steps) for name in NAMES]
        table = gather([own, data, *means])
        more: dict[str, Any] = {}
        if self.stragglers is not None:
            slowest = self.stragglers.look(step, [row[0] for row in table], [row[1] for row in table])
            more |= {"slowest": slowest} if slowest is not None else {}
        if timers:
            columns = dict(zip(NAMES, zip(*(row[2:] for row in table), strict=True), strict=True))
            more["seconds"] = {name: spread(values) for name, values in columns.items()}
        return more

    def close(self, step: int) -> None:
        self.profile.close(step)


def spread(values: tuple[float, ...]) -> dict[str, float]:
    """A section's mean over the ranks, and the rank that spent most in it."""
    longest = max(range(len(values)), key=lambda rank: values[rank])
    return {"mean": sum(values) / len(values), "max": values[longest], "rank": longest}


def gather(values: list[float]) -> list[list[float]]:
    """The same few numbers of every rank."""
    mine = torch.tensor(values, dtype=torch.float64, device=torch.cuda.current_device())
    ranks = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(ranks, mine)
    return [values.tolist() for values in ranks]


def everyone() -> list[Place]:
    """Where each rank runs, and which share of the model and of the batch is its own."""
    mine = Place(
        rank=torch.distributed.get_rank(),
        host=socket.gethostname(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        replica=parallel_state.get_data_parallel_rank(),
    )
    places: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(places, mine)
    return places
