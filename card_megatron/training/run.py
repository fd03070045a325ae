"""A whole run: check, build, train, leave."""

from __future__ import annotations

from typing import Any

import torch

from card_megatron.config.schema import RunConfig
from card_megatron.platform import Ranks
from card_megatron.training.preflight import preflight


def train_run(config: RunConfig, ranks: Ranks, console: bool = True) -> dict[str, Any]:
    """Train as one of `ranks`; returns the summary. The process group is left again, whatever happens."""
    plan = preflight(config, ranks)
    from megatron.core import parallel_state

    from card_megatron.training.loop import train
    from card_megatron.training.records import Recorder
    from card_megatron.training.state import build_state

    try:
        state = build_state(plan)
        recorder = Recorder(plan.config, console=console)
        try:
            return train(state, recorder)
        finally:
            recorder.close()
    finally:
        parallel_state.destroy_model_parallel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
