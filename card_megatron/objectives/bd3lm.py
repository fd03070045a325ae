"""BD3LM: block diffusion. Each block is denoised as in MDLM, given the clean blocks before it."""

from __future__ import annotations

import dataclasses

import numpy as np

from card_megatron.objectives.base import Sample
from card_megatron.objectives.keys import SampleKey
from card_megatron.objectives.mdlm import Mdlm


class Bd3lm(Mdlm):
    """The input is [noisy ; clean], so that one pass denoises every block; only the noisy half is scored."""

    attention = "block"
    copies = 2

    def corrupt(self, tokens: np.ndarray, labels: np.ndarray, supervised: np.ndarray, key: SampleKey) -> Sample:
        noisy = super().corrupt(tokens, labels, supervised, key)
        return dataclasses.replace(noisy, tokens=np.concatenate([noisy.tokens, labels]))

    def block_size(self, length: int) -> int:
        return self.config.block_size
