"""The seam between the training loop, which knows no objective, and an objective, which knows no loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from card_megatron.config.schema import ObjectiveConfig
from card_megatron.objectives.keys import SampleKey


@dataclass
class Sample:
    """One sequence as the model gets it. S is its length; output i is scored against labels[i]."""

    tokens: np.ndarray
    """int64[S]: inputs, with noise."""
    labels: np.ndarray
    """int64[S]: clean targets."""
    weights: np.ndarray
    """float32[S]: weight of each prediction's loss; 0 where nothing is supervised."""
    supervised: np.ndarray
    """bool[S]: the positions that the loss is divided by."""
    t: float
    """The noise level in [0, 1] that the nll is reported under."""


class Objective:
    """What is done to a sample (`corrupt`) and what the model must provide for it (the declarations)."""

    attention: ClassVar[str] = "causal"
    """Which inputs an output may see."""
    likelihood: ClassVar[str] = "exact"
    """What one pass over clean text gives: the "exact" autoregressive likelihood, or only a "bound"."""

    def __init__(self, config: ObjectiveConfig, *, mask_id: int, eod_id: int):
        self.config, self.mask_id, self.eod_id = config, mask_id, eod_id

    def corrupt(self, tokens: np.ndarray, labels: np.ndarray, supervised: np.ndarray, key: SampleKey) -> Sample:
        """The noised sample: a pure function of its arguments, whatever the layout, worker or restart."""
        raise TypeError(f"{type(self).__name__} does not define corrupt()")
