"""Where records go: a live line or plain lines, metrics.jsonl, TensorBoard, Weights & Biases. Rank 0 writes them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch

from card_megatron.config.errors import ConfigError
from card_megatron.config.schema import RunConfig


class Sink(Protocol):
    """One place that numbers go to."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """Hands each record to every sink, and shows progress; on ranks other than 0 it does nothing."""

    def __init__(self, config: RunConfig, console: bool = True, resumed_at: int | None = None):
        """With `resumed_at`, records of later steps, which the run is going to take again, are dropped."""
        self.active = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        self.sinks: list[Sink] = []
        self.line: ProgressLine | None = None
        if not self.active:
            return
        run_dir = Path(config.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.sinks.append(JsonLines(run_dir / "metrics.jsonl", resumed_at))
        if config.logging.tensorboard:
            self.sinks.append(TensorBoard(run_dir / "tensorboard", resumed_at))
        if config.logging.wandb_project:
            self.sinks.append(WeightsAndBiases(config))
        if console:
            self.line = ProgressLine()

    def training(self, record: dict[str, Any]) -> None:
        """A record of training steps."""
        self._write(record)
        if self.line:
            self.line.training(record)

    def validation(self, record: dict[str, Any]) -> None:
        """Results on the validation sets."""
        self._write(record)
        if self.line:
            self.line.validation(record)

    def tasks(self, record: dict[str, Any]) -> None:
        """Results on tasks."""
        self._write(record)
        if self.line:
            self.line.tasks(record)

    def tick(self, step: int, steps: int) -> None:
        """A step went by without a record."""
        if self.line:
            self.line.show(step=f"{step}/{steps}")

    def activity(self, name: str) -> None:
        """Something other than a step is going on."""
        if self.line:
            self.line.show(activity=name)

    def say(self, text: str) -> None:
        """A line of text for the console."""
        if self.line:
            self.line.say(text)

    def sync(self) -> None:
        """Wait until the disk has every record of metrics.jsonl."""
        for sink in self.sinks:
            if isinstance(sink, JsonLines):
                with self.despite_the_disk():
                    sink.sync()

    def write_file(self, name: str, content: dict[str, Any]) -> None:
        """A small file of the run directory, whole or not at all."""
        if self.active:
            with self.despite_the_disk():
                unfinished = self.run_dir / f"{name}.unfinished"
                unfinished.write_text(json.dumps(content, indent=2) + "\n")
                unfinished.replace(self.run_dir / name)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write RUN_DIR/summary.json and close everything."""
        self.write_file("summary.json", summary)
        self.close()

    def close(self) -> None:
        for sink in self.sinks:
            with self.despite_the_disk():
                sink.close()
        self.sinks = []
        if self.line:
            self.line.close()

    def _write(self, record: dict[str, Any]) -> None:
        for sink in self.sinks:
            with self.despite_the_disk():
                sink.write(record)

    @contextlib.contextmanager
    def despite_the_disk(self) -> Iterator[None]:
        """A disk that takes nothing is named, and training goes on: it is rank 0 alone that writes here."""
        try:
            yield
        except OSError as error:
            self.say(f"{self.run_dir}: {error.strerror or error}; going on")


class JsonLines:
    """metrics.jsonl: a line a record, on disk when it is written."""

    def __init__(self, path: Path, resumed_at: int | None):
        kept = [] if resumed_at is None or not path.exists() else list(_lines_until(path, resumed_at))
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("".join(kept), encoding="utf-8")
        unfinished.replace(path)
        self.file = path.open("ab", buffering=0)
        self.rest = b""
        """What a full disk did not take yet: it goes before the next record, so that none is lost or cut."""

    def write(self, record: dict[str, Any]) -> None:
        self.rest += json.dumps(record).encode() + b"\n"
        while self.rest:
            self.rest = self.rest[self.file.write(self.rest) :]

    def sync(self) -> None:
        """Wait until the disk has every record."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def _lines_until(path: Path, step: int) -> Iterator[str]:
    """The whole lines of a metrics file up to a step; a line that a crash cut short is dropped."""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step and line.endswith("\n"):
                yield line
        except (ValueError, KeyError, TypeError):
            continue


def scalars(record: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record, with `/` between the names of nested ones."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            flat |= scalars({str(number): item for number, item in enumerate(value)}, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and name != "step":
            flat[prefix + name] = value
    return flat


class TensorBoard:
    """An event file for TensorBoard."""

    def __init__(self, directory: Path, resumed_at: int | None):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(directory), purge_step=None if resumed_at is None else resumed_at + 1)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in scalars(record).items():
            self.writer.add_scalar(name, value, record["step"])
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A Weights & Biases run."""

    def __init__(self, config: RunConfig):
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("logging.wandb_project is set but wandb is not installed: pip install wandb") from error
        import dataclasses

        # a resumed run goes on in the same W&B run: its name is kept beside the metrics
        known = Path(config.run_dir) / "wandb_id"
        self.run = wandb.init(
            project=config.logging.wandb_project,
            entity=config.logging.wandb_entity,
            dir=config.run_dir,
            config=dataclasses.asdict(config),
            id=known.read_text().strip() if known.exists() else None,
            resume="allow",
        )
        known.write_text(f"{self.run.id}\n")

    def write(self, record: dict[str, Any]) -> None:
        self.run.log(scalars(record), step=record["step"])

    def close(self) -> None:
        self.run.finish()


def _shown(value: float | None, form: str) -> str:
    """A number, or that every step behind it was skipped."""
    return "skipped" if value is None else format(value, form)


class ProgressLine:
    """One line that is rewritten on a terminal; a line a record elsewhere, for log files."""

    def __init__(self) -> None:
        self.live: Any = None
        self.fields: dict[str, str] = {}
        if sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(refresh_per_second=8)
            self.live.start()

    def show(self, **fields: str) -> None:
        """Change some fields of the live line."""
        self.fields |= fields
        if self.live:
            self.live.update("  ".join(f"{name} {value}" for name, value in self.fields.items() if value))

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.live:
            self.live.console.print(text, highlight=False)
        else:
            print(text, flush=True)

    def training(self, record: dict[str, Any]) -> None:
        fields = {
            "step": f"{record['step']}/{record['steps']}",
            "loss": _shown(record["loss"], ".4f"),
            "nll": _shown(record["nll"], ".4f"),
            "ppl": _shown(record["perplexity"], ".4g"),
            "grad": _shown(record["grad_norm"], ".3f"),
            "lr": f"{record['lr']:.2e}",
            "tok/s": f"{record['tokens_per_second']:,.0f}",
            "eta": str(timedelta(seconds=round(record["eta_seconds"]))),
        }
        if record["mfu"] is not None:
            fields["mfu"] = f"{record['mfu']:.1%}"
        if record["skipped_steps"]:
            fields["skipped"] = str(record["skipped_steps"])
        if self.live:
            self.show(activity="", **fields)
        else:
            self.say("  ".join(f"{name} {value}" for name, value in fields.items()))

    def validation(self, record: dict[str, Any]) -> None:
        for name, metrics in record["validation"].items():
            clean = f"  clean ppl {metrics['clean_perplexity']:.4g}" if "clean_perplexity" in metrics else ""
            clean += f"  bound ppl {metrics['bound_perplexity']:.4g}" if "bound_perplexity" in metrics else ""
            clean += f"  accepts {metrics['accept_length']:.2f} drafts" if "accept_length" in metrics else ""
            self.say(
                f"validation {name} after step {record['step']}: loss {metrics['loss']:.4f}  "
                f"nll {metrics['nll']:.4f}{clean}"
            )

    def tasks(self, record: dict[str, Any]) -> None:
        for name, metrics in record["tasks"].items():
            shown = "  ".join(f"{metric} {_shown(cell['value'], '.4f')}" for metric, cell in metrics.items())
            if "task_bounds" in record:
                bounds = record["task_bounds"]
                shown += f"  by bounds of {bounds['mc_samples']} samples"
                if "mean_loglikelihood_error" in bounds:
                    shown += f", ± {bounds['mean_loglikelihood_error']:.3g} nats each"
            self.say(f"task {name} after step {record['step']}: {shown}")

    def close(self) -> None:
        if self.live:
            self.live.stop()
