"""What a training objective does to a sample: pure maths on numpy arrays, no Megatron.

An objective is one file with one class; adding one is that file and a line in OBJECTIVES.
"""

from __future__ import annotations

from card_megatron.config.schema import ObjectiveConfig
from card_megatron.objectives.arm import Arm
from card_megatron.objectives.base import Objective, Sample
from card_megatron.objectives.card import Card

OBJECTIVES: dict[str, type[Objective]] = {"arm": Arm, "card": Card}


def build_objective(config: ObjectiveConfig, mask_id: int, eod_id: int) -> Objective:
    """The objective that `objective.name` asks for."""
    return OBJECTIVES[config.name](config, mask_id=mask_id, eod_id=eod_id)


__all__ = ["OBJECTIVES", "Arm", "Card", "Objective", "Sample", "build_objective"]
