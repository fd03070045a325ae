"""Where the time of a step goes, by section, on the clock of the device that does the work.

Megatron's schedules call `config.timers(name).start()` and `.stop()` around each forward pass, backward pass, pipeline
transfer and gradient reduction. Its own timers wait for the device at every call; these only put events on the stream
and read them when the step is over and has been waited for anyway, so that they may stay on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

NAMES = ("data", "forward", "backward", "pipeline", "gradients", "optimizer", "agree", "save", "validate")
"""Sections of a run. `forward` contains `data`; `pipeline`, `gradients` and `agree` are time spent waiting for others
as much as time spent on the wire; `save` and `validate` lie between steps."""

MEGATRON = {"forward-compute": "forward", "backward-compute": "backward", "all-grads-sync": "gradients"}
"""Megatron's name -> ours; its pipeline transfers have many names, all with `send` or `recv` in them."""


class Section:
    """One section: started and stopped any number of times in a step; also a context."""

    def __init__(self, name: str):
        self.name = name
        self.marks: list[tuple[Any, Any]] = []
        self.begun: Any = None
        self.annotation: Any = None
        """While the run is profiled: the range that a trace shows."""

    def start(self, barrier: bool = False) -> None:
        if Sections.annotate:
            self.annotation = torch.profiler.record_function(self.name)
            self.annotation.__enter__()
        self.begun = torch.cuda.Event(enable_timing=True)
        self.begun.record()

    def stop(self, barrier: bool = False) -> None:
        ended: Any = torch.cuda.Event(enable_timing=True)
        ended.record()
        self.marks.append((self.begun, ended))
        if self.annotation is not None:
            self.annotation.__exit__(None, None, None)
            self.annotation = None

    def __enter__(self) -> Section:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def seconds(self) -> float:
        """The sum of all stretches; waits until the device has passed them."""
        if self.marks:
            self.marks[-1][1].synchronize()
        return sum(begun.elapsed_time(ended) for begun, ended in self.marks) / 1e3


class Ignored(Section):
    """What Megatron times and nobody asks for."""

    def start(self, barrier: bool = False) -> None:
        pass

    def stop(self, barrier: bool = False) -> None:
        pass


class Sections:
    """Everything that is timed; called as Megatron calls its timers."""

    annotate = False
    """True while a profiler runs: sections then also are ranges of its trace."""

    def __init__(self) -> None:
        self.sections = {name: Section(name) for name in NAMES}
        self.ignored = Ignored("")

    def __call__(self, name: str, log_level: int = 0) -> Section:
        if name in self.sections:
            return self.sections[name]
        if name in MEGATRON:
            return self.sections[MEGATRON[name]]
        return self.sections["pipeline"] if "send" in name or "recv" in name else self.ignored

    def reset(self) -> None:
        """Forget what was measured: a step begins."""
        for section in self.sections.values():
            section.marks.clear()

    def read(self) -> dict[str, float]:
        """Seconds of each section since the last reset."""
        return {name: section.seconds() for name, section in self.sections.items()}

    def reading(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches, with the wait for each counted as `data`."""
        section = self.sections["data"]
        section.start()
        for batch in batches:
            section.stop()
            yield batch
            section.start()
