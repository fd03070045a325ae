"""The autoregressive baseline: clean inputs, unit weights. It shares every other line with CARD."""

from __future__ import annotations

import numpy as np

from card_megatron.objectives.base import Objective, Sample
from card_megatron.objectives.keys import SampleKey


def clean_sample(tokens: np.ndarray, labels: np.ndarray, supervised: np.ndarray) -> Sample:
    """A sample without noise: next-token prediction."""
    return Sample(tokens, labels, weights=supervised.astype(np.float32), supervised=supervised, t=0.0)


class Arm(Objective):
    """Next-token prediction, as Megatron's own GPT does it."""

    def corrupt(self, tokens: np.ndarray, labels: np.ndarray, supervised: np.ndarray, key: SampleKey) -> Sample:
        return clean_sample(tokens, labels, supervised)
