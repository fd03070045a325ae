"""What a training objective does to a sample: pure maths on numpy arrays, no Megatron.

An objective is one file with one class; adding one is that file and a line in OBJECTIVES.
"""

from __future__ import annotations

from card_megatron.config.schema import ObjectiveConfig
from card_megatron.objectives.arm import Arm
from card_megatron.objectives.base import Attention, Objective, Sample
from card_megatron.objectives.bd3lm import Bd3lm
from card_megatron.objectives.card import Card
from card_megatron.objectives.mdlm import Mdlm

OBJECTIVES: dict[str, type[Objective]] = {"arm": Arm, "card": Card, "mdlm": Mdlm, "bd3lm": Bd3lm}


def build_objective(config: ObjectiveConfig, mask_id: int, eod_id: int) -> Objective:
    """The objective that `objective.name` asks for."""
    return OBJECTIVES[config.name](config, mask_id=mask_id, eod_id=eod_id)


__all__ = ["OBJECTIVES", "Arm", "Attention", "Bd3lm", "Card", "Mdlm", "Objective", "Sample", "build_objective"]
