"""Saving: begin, go on training, finish; failures are reported and leave the previous checkpoint as it was."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from card_megatron.checkpoint import files, folder
from card_megatron.checkpoint.agree import on_first_rank, problems_on_all_ranks
from card_megatron.checkpoint.contents import Contents, to_save
from card_megatron.checkpoint.manifest import MANIFEST, Manifest, describe_file
from card_megatron.checkpoint.optimizer_state import save_without_copies
from card_megatron.checkpoint.writer import Writing, Written
from card_megatron.config.errors import CheckpointError
from card_megatron.config.schema import CheckpointConfig

Event = Callable[..., None]
"""Told of what happens, as event(name, **facts); only rank 0's telling is kept."""


@dataclass
class Pending:
    """A save that has begun."""

    unfinished: Path
    final: Path
    manifest: Manifest
    writing: Writing
    started: float
    written: bool = False
    """All ranks' shards are on disk; what is left is rank 0's to do."""
    publishing: concurrent.futures.Future | None = None
    """Rank 0's part, in a thread of its own: syncing takes a while, and training need not wait for it."""

    def waits_for_nothing(self) -> bool:
        """True where this rank has nothing under way for the save."""
        return (self.publishing is None or self.publishing.done()) if self.written else self.writing.done()


class Saver:
    """The saves of one run. Every rank calls every method, in the same order."""

    def __init__(self, run_dir: str | Path, config: CheckpointConfig, optimizer: Any, event: Event):
        self.run_dir, self.config, self.event = Path(run_dir), config, event
        self.pending: list[Pending] = []
        self.last_saved: int | None = None
        """The step of the newest save that has begun or is done."""
        self.validated = False
        self.publisher = concurrent.futures.ThreadPoolExecutor(1) if dist.get_rank() == 0 else None
        save_without_copies(optimizer)
        # Megatron collects garbage at every save: what is there before the first step need not be looked at each time
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def save(self, contents: Contents, manifest: Manifest, *, wait: bool = False) -> None:
        """Begin to save; with `wait`, or without async_save, also finish."""
        while len(self.pending) >= self.config.max_pending:
            self._advance(self.pending[0])
        started = time.perf_counter()
        self.event("save_started", step=manifest.step)
        final = folder.final_path(self.run_dir, manifest.step)
        unfinished, problems = on_first_rank(lambda: folder.make_unfinished(self.run_dir, manifest.step))
        if problems:
            return self._failed(manifest.step, None, problems)
        # Megatron's check that the shards of all ranks make up whole tensors: the layout does not change afterwards
        writing = Writing(to_save(contents), unfinished, validate=not self.validated)
        self.validated = True
        self.pending.append(Pending(unfinished, final, manifest, writing, started))
        self.last_saved = manifest.step
        if wait or not self.config.async_save:
            self.finish_all()

    def poll(self) -> None:
        """Take the oldest save a stage further if no rank would have to wait for it; call it between steps."""
        if self.pending:
            busy = torch.tensor(float(not self.pending[0].waits_for_nothing()), device=torch.cuda.current_device())
            dist.all_reduce(busy)
            if not busy:
                self._advance(self.pending[0])

    def finish_all(self) -> None:
        """Wait for all saves that have begun."""
        while self.pending:
            self._advance(self.pending[0])

    def _advance(self, save: Pending) -> None:
        """The next stage of a save, waiting for what it needs: shards are written, then the checkpoint is published."""
        if not save.written:
            written = save.writing.collect()
            problems = problems_on_all_ranks(written.problem)
            if problems:
                return self._failed(save.manifest.step, save.unfinished, problems)
            everyone: list[Any] | None = [None] * dist.get_world_size() if self.publisher else None
            dist.gather_object(written, everyone, dst=0)
            save.written = True
            if self.publisher:
                save.publishing = self.publisher.submit(self._publish, save, everyone or [])
            return
        _, problems = on_first_rank(lambda: save.publishing and save.publishing.result())
        if problems:
            return self._failed(save.manifest.step, save.unfinished, problems)
        self.pending.remove(save)
        self.event(
            "save_finished",
            step=save.manifest.step,
            seconds=round(time.perf_counter() - save.started, 3),
            bytes=save.manifest.total_bytes,
        )

    def _publish(self, save: Pending, everyone: list[Written]) -> None:
        """Rank 0: metadata and manifest, the rename, retention."""
        save.writing.writer.finish(save.writing.metadata, [written.results for written in everyone])
        manifest = save.manifest
        for written in everyone:
            manifest.files |= written.files
        metadata = save.unfinished / ".metadata"
        files.sync(metadata)  # torch's own sync can come before the last of its buffer is written
        manifest.files[metadata.name] = describe_file(metadata)
        manifest.created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        manifest.seconds = round(time.perf_counter() - save.started, 3)
        files.write(save.unfinished / MANIFEST, manifest.dump())
        folder.publish(save.unfinished, save.final)
        old = folder.to_discard(folder.visible(self.run_dir), self.config.keep_last, self.config.keep_every)
        folder.discard(old, background=True)

    def _failed(self, step: int, unfinished: Path | None, problems: list[str]) -> None:
        self.pending = [save for save in self.pending if save.unfinished != unfinished]
        if unfinished is not None:
            on_first_rank(lambda: files.remove_tree(unfinished))
        if self.last_saved == step:
            self.last_saved = None
        kept, _ = on_first_rank(lambda: [path.name for path in folder.visible(self.run_dir)][:1])
        newest = f"the newest checkpoint is still {kept[0]}" if kept else "there is no checkpoint yet"
        self.event("save_failed", step=step, problems=problems, newest=kept[0] if kept else None)
        if self.config.on_save_error == "stop":
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: {'; '.join(problems)}; {newest}. "
                "checkpoint.on_save_error=continue would go on training"
            )


def describe_run(
    config: Any, *, step: int, consumed_samples: int, parameters: int, ema: bool, tokenizer: dict[str, Any] | None
) -> Manifest:
    """The manifest of a checkpoint that is about to be saved."""
    parallel = config.parallel
    return Manifest(
        step=step,
        consumed_samples=consumed_samples,
        parameters=parameters,
        layout={
            "world_size": dist.get_world_size(),
            "tensor": parallel.tensor_model_parallel_size,
            "pipeline": parallel.pipeline_model_parallel_size,
            "virtual_pipeline": parallel.virtual_pipeline_model_parallel_size or 1,
            "context": parallel.context_parallel_size,
            "expert": parallel.expert_model_parallel_size,
        },
        config=dataclasses.asdict(config),
        versions=versions(),
        ema=ema,
        tokenizer=tokenizer,
    )


def versions() -> dict[str, str]:
    """Of everything that shapes the numbers."""
    import platform

    import megatron.core
    import numpy

    from card_megatron.version import __version__

    return {
        "card_megatron": __version__,
        "megatron-core": megatron.core.__version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }
