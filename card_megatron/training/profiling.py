"""A few steps under a profiler: traces of torch's own, or a range that nsys captures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from card_megatron.config.schema import ProfileConfig
from card_megatron.training.sections import Sections

TABLE_ROWS = 40


class ProfileWindow:
    """Starts before step `step_start` and ends after step `step_end`, on the ranks that were asked for."""

    def __init__(self, config: ProfileConfig, run_dir: str | Path, rank: int, events: Callable[..., None]):
        self.config, self.folder, self.rank, self.events = config, Path(run_dir) / "profile", rank, events
        self.active = config.tool is not None and rank in config.ranks
        self.first_step = 0
        """The first step that is in the running profile; 0 while none runs."""
        self.profiler: Any = None
        self.contexts = contextlib.ExitStack()

    def before_step(self, step: int) -> None:
        if self.active and not self.first_step and self.config.step_start <= step <= self.config.step_end:
            self.first_step = step
            Sections.annotate = True
            self._start()

    def after_step(self, step: int) -> None:
        if self.first_step and step >= self.config.step_end:
            self.close(step)

    def close(self, step: int) -> None:
        """End the profile, also where the run ends inside the window; what was measured is kept."""
        if not self.first_step:
            return
        Sections.annotate = False
        first, self.first_step, self.active = self.first_step, 0, False
        try:
            self._stop(f"rank_{self.rank}.steps_{first}-{step}")
        except OSError as error:  # a full disk costs the profile, not the run
            self.events("profile_failed", step=step, problem=f"{self.folder}: {error.strerror or error}")
        else:
            self.events("profiled", step=step, first=first, tool=self.config.tool, folder=str(self.folder))

    def _start(self) -> None:
        if self.config.tool == "torch":
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self.profiler = self.contexts.enter_context(torch.profiler.profile(activities=activities))
        else:  # `nsys profile --capture-range=cudaProfilerApi --capture-range-end=stop card train ...`
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            self.contexts.enter_context(torch.autograd.profiler.emit_nvtx())

    def _stop(self, name: str) -> None:
        torch.cuda.synchronize()
        self.contexts.close()
        if self.config.tool == "nsys":
            torch.cuda.cudart().cudaProfilerStop()
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        (self.folder / f"{name}.txt").write_text(self.profiler.key_averages().table(sort_by=by, row_limit=TABLE_ROWS))
        unfinished = self.folder / f"{name}.unfinished.json.gz"
        self.profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(self.folder / f"{name}.json.gz")
        self.profiler = None
