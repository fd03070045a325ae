"""The seam between the training loop, which knows no objective, and an objective, which knows no loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from card_megatron.config.schema import ObjectiveConfig
from card_megatron.objectives.keys import SampleKey

Attention = Literal["causal", "full", "block"]


@dataclass
class Sample:
    """One sequence as the model gets it. S is its length; output i is scored against labels[i]."""

    tokens: np.ndarray
    """int64[copies * S]: inputs, with noise."""
    labels: np.ndarray
    """int64[S]: clean targets."""
    weights: np.ndarray
    """float32[S]: weight of each prediction's loss; 0 where nothing is scored."""
    supervised: np.ndarray
    """bool[S]: the positions that the loss is divided by."""
    t: float
    """The noise level in [0, 1] that the nll is reported under."""


class Objective:
    """What is done to a sample (`corrupt`) and what the model must provide for it (the declarations)."""

    attention: ClassVar[Attention] = "causal"
    """Which inputs an output may see: "causal" those up to its own, "full" all, "block" as model/block_attention.py."""
    shifted: ClassVar[bool] = True
    """An output predicts the token behind its input; False: the token at its input's own place."""
    copies: ClassVar[int] = 1
    """How often the text stands in the input, each time at the same positions; the first one's outputs are scored."""
    likelihood: ClassVar[Literal["exact", "bound"]] = "exact"
    """What clean text gives: in one pass the "exact" autoregressive likelihood, or a "bound" by sampled noise."""
    predicts_mask: ClassVar[bool] = True
    """False takes [MASK] out of the softmax."""

    def __init__(self, config: ObjectiveConfig, *, mask_id: int, eod_id: int):
        self.config, self.mask_id, self.eod_id = config, mask_id, eod_id

    def corrupt(self, tokens: np.ndarray, labels: np.ndarray, supervised: np.ndarray, key: SampleKey) -> Sample:
        """The noised sample: a pure function of its arguments, whatever the layout, worker or restart."""
        raise TypeError(f"{type(self).__name__} does not define corrupt()")

    def for_validation(self) -> Objective:
        """What held-out text is measured with: where the likelihood is a bound, its loss is that bound."""
        return self
