"""What a run directory has measured so far: its records by tokens and by epochs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from card_megatron.config.derived import batch_size_at
from card_megatron.config.errors import ConfigError
from card_megatron.config.load import config_from_tree
from card_megatron.config.schema import RunConfig
from card_megatron.data.indexed import Indexed

EVALUATIONS = "evaluations"
"""Below a run directory: results of `card eval watch`, a file a checkpoint."""


@dataclass
class Run:
    """A run directory, finished or not."""

    path: Path
    config: RunConfig
    series: dict[str, dict[int, float]] = field(default_factory=dict)
    """Metric -> step -> value; names of nested records have `/` between them."""
    errors: dict[str, dict[int, float]] = field(default_factory=dict)
    """Standard errors of some of them."""

    @property
    def last_step(self) -> int:
        return max((max(points) for points in self.series.values() if points), default=0)

    def tokens_at(self, steps: list[int]) -> list[int]:
        """Tokens that the run had consumed after each step: whole batches, smaller ones during a ramp."""
        train, length = self.config.train, self.config.data.sequence_length
        consumed, known, step = 0, {0: 0}, 0
        while step < max(steps, default=0):
            size = batch_size_at(train, consumed)
            if size == train.global_batch_size:  # for the rest of the run
                break
            consumed, step = consumed + size, step + 1
            known[step] = consumed
        return [
            (known[wanted] if wanted in known else consumed + (wanted - step) * train.global_batch_size) * length
            for wanted in steps
        ]

    def epoch_tokens(self) -> int:
        """Tokens of one epoch: all that data.train has, without what data.split holds out."""
        if self.config.data.mock:
            raise ConfigError(f"{self.path}: data.mock=true has no epochs")
        total = sum(tokens_of(entry.split()[-1], self.path) for entry in self.config.data.train)
        if self.config.data.split is not None:
            shares = [float(share) for share in self.config.data.split.split(",")]
            total = round(total * shares[0] / sum(shares))
        if not total:
            raise ConfigError(f"{self.path}: data.train={self.config.data.train} has no tokens: no epochs")
        return total


def tokens_of(prefix: str, run_dir: Path) -> int:
    """What the manifest of a source says, or its index where there is no manifest; as the run saw it, or from here."""
    for path in (Path(prefix), run_dir / prefix, run_dir.parent / prefix):
        manifest = path.with_name(f"{path.name}.json")
        if manifest.is_file():
            return json.loads(manifest.read_text("utf-8"))["tokens"]
        if path.with_name(f"{path.name}.idx").is_file():
            return Indexed(path).tokens
    raise ConfigError(
        f"{run_dir}: {prefix}.json, the manifest that says how many tokens an epoch has, is not there; "
        "start this where the run was started, or copy the manifest to its place"
    )


def is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and (path / "metrics.jsonl").is_file()


def read_run(path: Path) -> Run:
    """All records of a run directory; a last line that is being written is left out."""
    import yaml

    try:
        config = config_from_tree(yaml.safe_load((path / "config.yaml").read_text("utf-8")))
    except (OSError, yaml.YAMLError, ConfigError) as error:
        raise ConfigError(f"{path}/config.yaml cannot be read: {error}") from error
    run = Run(path, config)
    for line in (path / "metrics.jsonl").read_text("utf-8").split("\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        add_record(run, record)
    for step, evaluation in read_evaluations(path):
        add_record(run, {"step": step, **from_evaluation(evaluation)})
    return run


def add_record(run: Run, record: dict[str, Any]) -> None:
    for name, value in leaves({key: value for key, value in record.items() if key not in ("step", "steps")}):
        if name.endswith("/stderr"):
            run.errors.setdefault(name.removesuffix("/stderr"), {})[record["step"]] = value
        else:
            run.series.setdefault(name.removesuffix("/value"), {})[record["step"]] = value


def leaves(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record; lists (a loss for each noise level) are no curve."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + name, value


def read_evaluations(run_dir: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(step, content) of what `card eval watch` has written, in order."""
    for path in sorted((run_dir / EVALUATIONS).glob("step_*.json")):
        content = json.loads(path.read_text("utf-8"))
        yield content["step"], content


def from_evaluation(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Metrics of a checkpoint as records of training have them: tasks/NAME/METRIC, perplexity/SET/UNIT."""
    found: dict[str, Any] = {}
    if evaluation.get("tasks"):
        found["tasks"] = evaluation["tasks"]["results"]
    if evaluation.get("perplexity"):
        found["perplexity"] = {
            result["set"]: {
                unit: {"value": result[f"{unit}_perplexity"], "stderr": result[f"{unit}_perplexity_stderr"]}
                for unit in ("token", "word", "byte")
            }
            for result in evaluation["perplexity"]["results"]
        }
    return found
