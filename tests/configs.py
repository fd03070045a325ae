"""Configurations of a small run on mock data, said in few words."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from card_megatron.config import RunConfig, load_config

MOCK = ["--data.mock=true", "--model.vocab_size=500", "--train.train_iters=10"]

SHORT = {
    "TP": "parallel.tensor_model_parallel_size",
    "SP": "parallel.sequence_parallel",
    "PP": "parallel.pipeline_model_parallel_size",
    "VPP": "parallel.virtual_pipeline_model_parallel_size",
    "CP": "parallel.context_parallel_size",
    "EP": "parallel.expert_model_parallel_size",
    "layout": "parallel.pipeline_model_parallel_layout",
    "experts": "model.num_moe_experts",
    "transformer": "model.transformer",
    "EMULATED": "precision=fp8_tensorwise; precision.emulate=true",
    "files": "data.mock=false; data.tokenizer",
}


def options(text: str) -> list[str]:
    """Command line of 'key=value; key=value', with the short names above."""
    for name, key in SHORT.items():
        text = re.sub(rf"(^|; ){name}\b", rf"\1{key}", text)
    return [f"--{option}" for option in text.split("; ") if option]


@functools.cache
def load(text: str = "") -> RunConfig:
    """A small run on mock data, changed as `text` says."""
    return load_config([*MOCK, *options(text)])[0]


def load_yaml(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.yaml"
    path.write_text(text)
    return load_config([f"--config={path}", *overrides])[0]
