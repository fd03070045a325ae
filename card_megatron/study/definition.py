"""A study as its YAML file declares it: a grid of runs, how each is evaluated, and what the report shows."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.config.load import load_config, options_of
from card_megatron.config.schema import RunConfig
from card_megatron.data.indexed import read_manifest

STRATEGY = " · "
"""Between a metric of generated text and the strategy that wrote it."""
PERPLEXITY = re.compile(r"(ppl|perplexity)\b", re.IGNORECASE)
OF_NO_EFFECT = ("run_dir", "checkpoint", "logging", "profile", "guard")
"""Sections of a configuration that change nothing of what a run learns: the hash leaves them out."""


@dataclass(frozen=True)
class StudyRun:
    """One run of the grid."""

    name: str
    seed: int
    config: Path
    run_dir: Path
    given: dict[str, Any]

    @property
    def label(self) -> str:
        return f"{self.name}-s{self.seed}"

    def options(self) -> list[str]:
        """Of `card train`."""
        return [f"--config={self.config}", *options_of(self.given | {"seed": self.seed, "run_dir": str(self.run_dir)})]

    def load(self) -> RunConfig:
        try:
            return load_config(self.options())[0]
        except ConfigError as error:
            raise ConfigError(f"run {self.name}: {error}") from error


@dataclass(frozen=True)
class Study:
    """The fields of STUDY.yaml, and where it stands."""

    path: Path
    title: str
    """Heading of the report."""
    config: str
    """Configuration that every run begins with, beside this file."""
    runs: dict[str, dict[str, Any]]
    """Name -> what is changed in it, as {section.key: value}. Studies of one folder share runs of one name."""
    every: dict[str, Any] = field(default_factory=dict)
    """What is changed in every run, as in `runs`, which may change it again."""
    seeds: list[int] = field(default_factory=lambda: [1, 2])
    """Every run is trained with each of them; differences are paired by seed."""
    baseline: str = ""
    """The run that others are compared with; none takes the first."""
    also_against: list[str] = field(default_factory=list)
    """Further runs that others are compared with, each in a table of its own."""
    folder: str = "runs/study"
    """Run directories, below the folder in which the study is started."""
    results: str = "results"
    """A JSON file for each finished run, beside this file: all that the report is made from."""
    evaluate: dict[str, str] = field(default_factory=dict)
    """Name -> words of `card eval` for a finished run, without the run and --output: 'perplexity --data a=b.jsonl'."""
    columns: dict[str, str] = field(default_factory=dict)
    """Heading -> metric, as `card eval compare` names it; empty shows every metric."""
    curves: dict[str, list[str]] = field(default_factory=dict)
    """Name of a picture -> metrics of metrics.jsonl that are drawn as one, a run's first that it has."""
    points: dict[str, list[str]] = field(default_factory=dict)
    """Name of a picture -> two metrics, across and up: every run, or strategy of its generated text, is a point."""
    pooled: bool = False
    """Differences share one spread, that of all runs: for runs that are variants of one another."""
    epochs: bool = False
    """Curves go by epochs, not by tokens; and the report says where they cross the baseline's."""

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def compared_with(self) -> str:
        return self.baseline or next(iter(self.runs))

    @property
    def baselines(self) -> list[str]:
        return [self.compared_with, *self.also_against]

    def grid(self, only: Sequence[str] = ()) -> list[StudyRun]:
        """Seed by seed, so that a study that is cut short has whole comparisons."""
        known = [*self.runs, *(f"{name}-s{seed}" for name in self.runs for seed in self.seeds)]
        for wanted in only:
            if wanted not in known:
                raise ConfigError(f"--only {wanted} is no run of {self.path}; it has {', '.join(self.runs)}")
        found = [
            StudyRun(
                *(name, seed, self.path.parent / self.config, Path(self.folder) / f"{name}-s{seed}"),
                {**self.every, **given},
            )
            for seed in self.seeds
            for name, given in self.runs.items()
        ]
        return [run for run in found if not only or run.name in only or run.label in only]

    def result_path(self, run: StudyRun) -> Path:
        return self.path.parent / self.results / f"{run.label}.json"

    def picture_file(self, name: str) -> str:
        """Without what Markdown or a file system would take for something else."""
        return re.sub(r"\W+", "_", f"{self.name}_{name}") + ".png"

    def evaluations(self) -> dict[str, list[str]]:
        return {name: shlex.split(words) for name, words in self.evaluate.items()}


def config_hash(config: RunConfig) -> str:
    """Names what a run learns from: every field that bears on it. A path is a name; the data behind it is not read."""
    tree = {name: value for name, value in asdict(config).items() if name not in OF_NO_EFFECT}
    if config.checkpoint.init_from is not None:  # of its section the one field that is learned from
        tree["init_from"] = config.checkpoint.init_from
    for place in ("num_workers", "path_to_cache"):
        tree["data"].pop(place)
    text = json.dumps(tree, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def data_identity(config: RunConfig) -> dict[str, Any] | None:
    """Of what was built for this run: counts and tokenizer of every source; None where a source says nothing of it.

    A path is a name; this is what stands behind it, so that a study is not continued on other data.
    """
    prefixes = [entry.split()[-1] for entry in config.data.train]  # an entry may begin with its weight
    prefixes += [prefix for part in config.data.validation.values() for prefix in part]
    found: dict[str, Any] = {}
    for prefix in prefixes:
        manifest = read_manifest(prefix)
        if manifest is None:
            return None
        found[prefix] = {name: manifest[name] for name in ("documents", "tokens")}
        found[prefix]["tokenizer"] = manifest["tokenizer"]["sha256"][:16]
    return found


def is_perplexity(metric: str) -> bool:
    return PERPLEXITY.search(metric.partition(STRATEGY)[0]) is not None


def perplexity(nats: float) -> float:
    """exp, and infinity where that is too large for a float."""
    return math.exp(nats) if nats < 700 else math.inf


def shown_option(value: Any) -> str:
    """As YAML has it."""
    return ".inf" if isinstance(value, float) and math.isinf(value) else str(value)
