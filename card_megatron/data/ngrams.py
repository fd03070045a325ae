"""Unigram and bigram models: what a language model must beat to have learned anything."""

from __future__ import annotations

import numpy as np

from card_megatron.data.indexed import Indexed


def unigram_nll(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Mean nll of held_out[1:] under token frequencies, each token counted once more than it was seen."""
    probabilities = _unigram(train, vocab_size)
    return float(-np.log(probabilities[held_out[1:]]).mean())


def bigram_nll(train: np.ndarray, held_out: np.ndarray, vocab_size: int, prior: float = 20.0) -> float:
    """Mean nll of held_out[1:] given the token before: pair counts, with the unigram worth `prior` observations."""
    unigram = _unigram(train, vocab_size)
    pairs = train[:-1].astype(np.int64) * vocab_size + train[1:]
    seen, counts = np.unique(pairs, return_counts=True)
    asked = held_out[:-1].astype(np.int64) * vocab_size + held_out[1:]
    places = np.minimum(np.searchsorted(seen, asked), len(seen) - 1)
    pair_counts = np.where(seen[places] == asked, counts[places], 0)
    first_counts = np.bincount(train[:-1], minlength=vocab_size)[held_out[:-1]]
    probabilities = (pair_counts + prior * unigram[held_out[1:]]) / (first_counts + prior)
    return float(-np.log(probabilities).mean())


def all_tokens(prefix: str) -> np.ndarray:
    """Every token behind a .bin/.idx prefix, in document order."""
    return np.asarray(Indexed(prefix).ids)


def _unigram(train: np.ndarray, vocab_size: int) -> np.ndarray:
    counts = np.bincount(train, minlength=vocab_size) + 1
    return counts / counts.sum()
