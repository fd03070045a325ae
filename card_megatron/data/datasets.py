"""Megatron's datasets, chained by epoch, blended, and noised outside of the blend."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split

from card_megatron.config.derived import total_samples
from card_megatron.config.errors import ConfigError
from card_megatron.config.schema import RunConfig
from card_megatron.data import cache
from card_megatron.data.preprocess import count_tokens
from card_megatron.data.tokenizers import Tokenizer
from card_megatron.objectives import Objective
from card_megatron.objectives.keys import SampleKey

NEVER_A_TOKEN = -1
"""Padding id given to Megatron: it unsupervises every label equal to its padding id, an EOD of the same id included."""


class EpochChain(MegatronDataset):
    """One GPTDataset for each epoch, one after the other, each shuffled on its own.

    GPTDataset shuffles all epochs together, in an order that depends on how many samples were asked for. Here
    sample i is the same whatever the length of the run, so extending a run reorders nothing.
    """

    gpt_class: type[GPTDataset] = GPTDataset

    def __init__(self, indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config):
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)

        def epoch(number: int) -> GPTDataset:
            shuffled = copy.copy(config)
            shuffled.random_seed = config.random_seed + number
            return self.gpt_class(indexed_dataset, dataset_path, indexed_indices, None, index_split, shuffled)

        first = epoch(0)
        self.samples_per_epoch = len(first)
        if self.samples_per_epoch < 1:
            raise ConfigError(
                f"{dataset_path}: its {index_split.name} share of {len(indexed_indices)} documents is shorter than one "
                f"sample of data.sequence_length={config.sequence_length} + 1 tokens; give more text or a larger share"
            )
        epochs = 1 if num_samples is None else math.ceil(num_samples / self.samples_per_epoch)
        self.epochs = [first, *(epoch(number) for number in range(1, epochs))]

    @classmethod
    def numel_low_level_dataset(cls, low_level_dataset) -> int:
        return cls.gpt_class.numel_low_level_dataset(low_level_dataset)

    @classmethod
    def build_low_level_dataset(cls, dataset_path, config):
        return cls.gpt_class.build_low_level_dataset(dataset_path, config)

    def __len__(self) -> int:
        return self.samples_per_epoch * len(self.epochs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        epoch, position = divmod(int(index), self.samples_per_epoch)
        return self.epochs[epoch][position]


class MockEpochChain(EpochChain):
    """The chain over Megatron's mock data."""

    gpt_class = MockGPTDataset


class ObjectiveDataset(torch.utils.data.Dataset):
    """Clean samples, each corrupted by the objective with noise keyed by (seed, split name, index).

    It stands outside of the blend: inside one, a dataset sees its own source's index, and two sources would share
    noise. The whole sequence is here, before context parallelism cuts it.
    """

    def __init__(self, clean: Any, objective: Objective, seed: int, split: str):
        self.clean, self.objective, self.seed, self.split = clean, objective, seed, split

    def __len__(self) -> int:
        return len(self.clean)

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        """Sample `index`; None is a row that fills up a last batch and counts for nothing."""
        clean = self.clean[0 if index is None else index]
        supervised = np.zeros(len(clean["tokens"]), bool) if index is None else clean["loss_mask"].numpy() != 0
        key = SampleKey(self.seed, self.split, index or 0)
        sample = self.objective.corrupt(clean["tokens"].numpy(), clean["labels"].numpy(), supervised, key)
        return {
            "tokens": torch.from_numpy(sample.tokens),
            "labels": torch.from_numpy(sample.labels),
            "weights": torch.from_numpy(sample.weights),
            "supervised": torch.from_numpy(sample.supervised.astype(np.int64)),
            "t": torch.tensor(sample.t, dtype=torch.float32),
            "index": torch.tensor(-1 if index is None else index),
        }


@dataclass
class CleanDatasets:
    """The text of a run before any noise; empty on ranks that read no data."""

    train: Any
    validation: dict[str, Any]
    test: dict[str, Any]


def build_clean_datasets(
    config: RunConfig, tokenizer: Tokenizer, is_built_on_rank: Callable[[], bool] = lambda: True
) -> CleanDatasets:
    """All datasets of a run. Every rank must call this; those that read no data get None."""
    data = config.data
    share = [float(part) for part in (data.split or "1,0,0").split(",")]
    ends = np.cumsum([0.0, *share]) / sum(share)

    def build(split: Split, bounds: tuple[float, float], entries: list[str], size: int | None) -> Any:
        dataset_config = _dataset_config(config, tokenizer, entries, weighted=size is not None)
        # one split at a time, so that each has its own sources and size
        dataset_config.split_matrix = [bounds if kind is split else None for kind in Split]
        sizes = [size if kind is split else 0 for kind in Split]
        kind = MockEpochChain if data.mock else EpochChain
        return BlendedMegatronDatasetBuilder(kind, sizes, is_built_on_rank, dataset_config).build()[split.value]

    def held_out(split: Split, named: dict[str, list[str]]) -> dict[str, Any]:
        bounds = float(ends[split.value]), float(ends[split.value + 1])
        if named:
            return {name: build(split, (0.0, 1.0), entries, None) for name, entries in named.items()}
        return {split.name: build(split, bounds, data.train, None)} if bounds[0] < bounds[1] else {}

    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    with cache.building(cache_folder(config), first=first):
        return CleanDatasets(
            train=build(Split.train, (0.0, float(ends[1])), data.train, total_samples(config)),
            validation=held_out(Split.valid, data.validation),
            test=held_out(Split.test, data.test),
        )


def cache_folder(config: RunConfig) -> Path:
    """Where Megatron keeps its sample indices."""
    return Path(config.data.path_to_cache or Path(config.run_dir) / "index_cache")


class _MegatronTokenizer:
    """What GPTDataset asks of a tokenizer."""

    pad = NEVER_A_TOKEN

    def __init__(self, tokenizer: Tokenizer, mock: bool):
        self.eod = tokenizer.eod
        # mock tokens run over the whole vocabulary that they are told of: keep [MASK] out of it
        self.vocab_size = tokenizer.mask if mock else tokenizer.vocab_size
        self.unique_identifiers = {"eod": self.eod, "vocab_size": self.vocab_size}


def _dataset_config(config: RunConfig, tokenizer: Tokenizer, entries: list[str], weighted: bool) -> GPTDatasetConfig:
    data = config.data
    return GPTDatasetConfig(
        random_seed=config.seed,
        sequence_length=data.sequence_length,
        blend=None if data.mock else blend_of(entries, weighted),
        split="1,1,1",
        path_to_cache=str(cache_folder(config)),
        tokenizer=_MegatronTokenizer(tokenizer, data.mock),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=data.eod_mask_loss,
        create_attention_mask=False,
        drop_last_partial_validation_sequence=False,  # the last tokens of a validation set count too
        mid_level_dataset_surplus=0.005,
    )


def blend_of(entries: list[str], weighted: bool) -> tuple[list[str], list[float] | None]:
    """(prefixes, weights) as Megatron takes them; no weights for one source, or to take each source once."""
    prefixes = [entry.split()[-1] for entry in entries]
    if len(prefixes) == 1 or not weighted:
        return prefixes, None
    if len(entries[0].split()) == 2:
        return prefixes, [float(entry.split()[0]) for entry in entries]
    return prefixes, [float(count_tokens(prefix)) for prefix in prefixes]
