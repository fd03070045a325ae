"""CARD: predict each token from a prefix noised by soft tail masking, weighted by how noisy that prefix is."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Self

import numpy as np

from card_megatron.objectives.arm import clean_sample
from card_megatron.objectives.base import Objective, Sample
from card_megatron.objectives.keys import SampleKey
from card_megatron.objectives.noise import soft_tail_mask
from card_megatron.objectives.weights import token_weights


class Card(Objective):
    """Soft tail masking with context-aware reweighting; strict tail, random and unweighted by config."""

    def corrupt(self, tokens: np.ndarray, labels: np.ndarray, supervised: np.ndarray, key: SampleKey) -> Sample:
        rng = key.rng()
        # Drawn whether it is needed or not, so that the masks do not move when clean_fraction does.
        kept_clean = rng.random() < self.config.clean_fraction
        if kept_clean:
            return clean_sample(tokens, labels, supervised)

        masked = np.zeros(len(tokens), dtype=bool)
        weights = np.ones(len(tokens))
        levels = []
        for number, segment in enumerate(self.segments(tokens)):
            t = self.noise_level(key, number, rng)
            eligible = self.eligible(tokens[segment], supervised[segment])
            masked[segment][eligible] = soft_tail_mask(len(eligible), t, self.config.tail_factor, rng)
            if self.config.reweight:
                weights[segment] = token_weights(
                    masked[segment], decay=self.config.decay, beta=self.config.beta, score=self.config.score
                )
            levels.append((t, segment.stop - segment.start))
        return Sample(
            tokens=np.where(masked, self.mask_id, tokens),
            labels=labels,
            weights=np.where(supervised, weights, 0.0).astype(np.float32),
            supervised=supervised,
            t=sum(t * length for t, length in levels) / len(tokens),
        )

    def for_validation(self) -> Self:
        """All samples with noise, so that runs compare: what is clean is measured beside it."""
        noised = dataclasses.replace(self.config, clean_fraction=0.0)
        return type(self)(noised, mask_id=self.mask_id, eod_id=self.eod_id)

    def segments(self, tokens: np.ndarray) -> list[slice]:
        """The stretches that t, window, neighbour and score restart at: the sample, or each of its documents."""
        if self.config.segments == "sequence":
            return [slice(0, len(tokens))]
        starts = np.flatnonzero(tokens[:-1] == self.eod_id) + 1  # an EOD input closes its document
        bounds = [0, *starts.tolist(), len(tokens)]
        return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]

    def eligible(self, tokens: np.ndarray, supervised: np.ndarray) -> np.ndarray:
        """Indices of a segment that may be masked: not EOD, not padding, not a first input without context."""
        may = supervised & (tokens != self.eod_id)
        if self.config.keep_first and len(may):
            may[0] = False
        return np.flatnonzero(may)

    def noise_level(self, key: SampleKey, segment: int, rng: np.random.Generator) -> float:
        """t in [t_min, t_max]: uniform, or spread evenly over consecutive samples."""
        uniform = rng.random()
        if self.config.t_sampler == "stratified":
            # the sample's even spacing, turned by a random angle for each further document
            uniform = (key.stratified() + (uniform if segment else 0.0)) % 1.0
        return self.config.t_min + (self.config.t_max - self.config.t_min) * uniform
