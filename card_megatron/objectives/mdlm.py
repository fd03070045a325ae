"""MDLM: masked diffusion. Predict each masked token from all that is not masked, at its own position.

The clean text of a sample is its targets x_1 .. x_L; they are also what is masked and fed. x_0, which only a shifted
model can use, is left out.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

import numpy as np

from card_megatron.objectives.base import Attention, Objective, Sample
from card_megatron.objectives.keys import SampleKey

T_FLOOR = 1e-3
"""With `masks: bernoulli`: lower levels are raised to this one. See `noise`."""
ROUNDING = 1e-9
"""A share of 0.7 of 10 positions is 7 of them, though 0.7 * 10 may not be 7.0."""


class Mdlm(Objective):
    """Uniform masks, bidirectional attention, weight 1/t on masked tokens: the loss is an upper bound of the nll."""

    attention: ClassVar[Attention] = "full"
    shifted = False
    likelihood = "bound"
    predicts_mask = False

    def corrupt(self, tokens: np.ndarray, labels: np.ndarray, supervised: np.ndarray, key: SampleKey) -> Sample:
        masked, weights, t = self.noise(supervised, key)
        # Attention sees behind the end of a text too: what stands there is not padding's id 0, but unknown.
        behind = np.arange(len(labels)) > np.max(np.flatnonzero(supervised), initial=-1)
        return Sample(
            tokens=np.where(masked | behind, self.mask_id, labels),
            labels=labels,
            weights=weights.astype(np.float32),
            supervised=supervised,
            t=t,
        )

    def block_size(self, length: int) -> int:
        """Neighbouring positions that share a noise level: here all of them."""
        return length

    def noise(self, supervised: np.ndarray, key: SampleKey) -> tuple[np.ndarray, np.ndarray, float]:
        """(masked positions, their weights 1/t and 0 elsewhere, mean t).

        `count`: of the K supervised positions of a block, N = floor(u K) + 1 are masked, and t is N/K. For u uniform in
        [0, 1) this is the integral of Bernoulli masks over t, done exactly. They too make all counts from 0 to K, and
        all sets of a count, equally likely, and the mean of their 1/t given N is (K + 1)/N: that is K/N where the empty
        set, one draw in K + 1, is left out. So the bound is the same, the variance less, and no t is near 0.

        `bernoulli`: each position on its own with probability t = max(u, T_FLOOR). The levels raised to the floor are
        a share T_FLOOR of all, and have weight 1/T_FLOOR: together they are the reconstruction term of a diffusion
        that starts at T_FLOOR, so the bound of that diffusion is whole and nothing near 0 is cut off. In a clipped
        range the masks of a block are drawn until their share lies in it too, as BD3LM's authors train.
        """
        rng = key.rng()
        blocks = supervised.reshape(-1, self.block_size(len(supervised)))
        levels = self.noise_levels(len(blocks), key, rng)
        order = np.where(blocks, rng.random(blocks.shape), 2.0)  # what may not be masked comes last
        sizes = blocks.sum(1)
        if self.config.masks == "count":
            counts = np.minimum(np.floor(levels * sizes).astype(int) + 1, sizes)
            last_masked = np.take_along_axis(np.sort(order, axis=1), np.maximum(counts - 1, 0)[:, None], axis=1)
            masked = (order <= last_masked) & blocks
            t = counts / np.maximum(sizes, 1)
        else:
            t = np.maximum(levels, T_FLOOR)
            masked = order < t[:, None]
            while (again := self.outside_range(masked, sizes)).any():
                masked[again] = np.where(blocks[again], rng.random(masked[again].shape), 2.0) < t[again, None]
        weights = np.divide(1.0, t[:, None], out=np.zeros(blocks.shape), where=masked)
        return masked.ravel(), weights.ravel(), float((t * sizes).sum() / max(1, sizes.sum()))

    def noise_levels(self, blocks: int, key: SampleKey, rng: np.random.Generator) -> np.ndarray:
        """float64[blocks] in [t_min, t_max]: spread evenly over blocks and samples, or independently."""
        if self.config.t_sampler == "uniform":
            uniform = rng.random(blocks)
        else:
            # each block of a sample has a stratum of its own, in random order; where in it goes evenly over samples
            uniform = (rng.permutation(blocks) + key.stratified()) / blocks
        return self.config.t_min + (self.config.t_max - self.config.t_min) * uniform

    def outside_range(self, masked: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """bool[blocks]: other masks would bring the share of masked positions into [t_min, t_max]."""
        least = np.ceil(self.config.t_min * sizes - ROUNDING)
        most = np.floor(self.config.t_max * sizes + ROUNDING)
        counts = masked.sum(1)
        # of 2 positions none is 45% to 48%: there every draw stands
        return (least <= most) & ((counts < least) | (counts > most))

    def for_validation(self) -> Self:
        """Levels of the whole range, since those of a clipped schedule alone bound nothing, by the better estimator."""
        whole = dataclasses.replace(self.config, t_min=0.0, t_max=1.0, masks="count")
        return type(self)(whole, mask_id=self.mask_id, eod_id=self.eod_id)
