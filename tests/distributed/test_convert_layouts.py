"""Out of a layout, into transformers without Megatron; and back, as the start of a run in every layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from card_megatron.checkpoint.source import open_source
from card_megatron.convert.from_hf import from_hf
from card_megatron.convert.to_hf import to_hf
from card_megatron.convert.verify import make_inputs, megatron_scores
from card_megatron.data.tokenizers import tokenizer_of
from card_megatron.testing import run_distributed
from tests.curves import tiny_config
from tests.distributed.test_layouts import CP, ONE_ROW, PP, SP, TP, VPP
from tests.runs import train_in_turn

FOREIGN = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("megatron", "card_megatron"):
            raise ImportError(f"{name} cannot be imported here")

sys.meta_path.insert(0, Nothing())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, saved = sys.argv[1:]
inputs, scores = torch.load(saved)
model = AutoModelForCausalLM.from_pretrained(folder).eval()
with torch.no_grad():
    ours = [torch.log_softmax(model(tokens).logits.float(), -1) for tokens in inputs]
assert not any(name.partition(".")[0] in ("megatron", "card_megatron") for name in sys.modules)
print(max(float((one - other).abs().max()) for one, other in zip(ours, scores)))
print(AutoTokenizer.from_pretrained(folder).mask_token_id)
"""


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory) -> Path:
    """A short run on four ranks whose vocabulary of 500 is padded to 512."""
    run_dir = tmp_path_factory.mktemp("layouts") / "run"
    overrides = [TP, PP, VPP, ONE_ROW, "--train.train_iters=4", "--ema.decay=0.5"]
    run_distributed(train_in_turn, 4, [(tiny_config(corpus, run_dir, *overrides), {})])
    return run_dir


@pytest.mark.parametrize("ema", [False, True])
def test_an_export_from_tp2_pp2_vpp2_scores_the_same_where_megatron_is_not(trained, tmp_path, ema):
    source = open_source(trained)
    tokenizer = tokenizer_of(source.config)
    assert tokenizer is not None and source.manifest is not None
    assert (
        source.manifest.layout | {"world_size": 4} == source.manifest.layout and source.config.model.vocab_size == 500
    )
    to_hf(source, tmp_path / "hf", tokenizer, ema=ema, say=lambda text: None)
    tokens = torch.arange(500)
    inputs = make_inputs(tokens, 64, tokenizer.mask)
    scores = megatron_scores(source, inputs, tokens, ema=ema, dtype=torch.float32)
    torch.save((inputs, scores), tmp_path / "scores.pt")
    command = [sys.executable, "-c", FOREIGN, str(tmp_path / "hf"), str(tmp_path / "scores.pt")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    difference, mask = result.stdout.split()
    assert float(difference) <= 1e-4 and int(mask) == tokenizer.mask


LAYOUTS = {
    "one process": (1, []),
    "TP2+SP": (2, [TP, SP]),
    "PP2xVPP2": (2, [PP, VPP]),
    "CP2": (2, [CP]),
    "TP2xDP2": (4, [TP, ONE_ROW]),
}


@pytest.mark.timeout(600)
def test_a_run_starts_from_a_conversion_in_every_layout(trained, corpus, tmp_path):
    """HF -> Megatron -> `card train --init-from`: the same validation before the first step, and the same curve."""
    to_hf(open_source(trained), tmp_path / "hf", None, say=lambda text: None)
    from_hf(tmp_path / "hf", tmp_path / "start", tokenizer=f"{corpus}/tokenizer.model", say=lambda text: None)
    options = [
        *(f"--checkpoint.init_from={tmp_path / 'start'}", "--model.kv_channels=8", "--ema.decay=0.5"),
        *(f"--data.validation.second=[{corpus}/second]", "--eval.samples=8", "--eval.at_start=true"),
        "--train.train_iters=3",
    ]
    turns: dict[int, list] = {1: [], 2: [], 4: []}
    for name, (world_size, overrides) in LAYOUTS.items():
        turns[world_size].append((tiny_config(corpus, tmp_path / name, *options, *overrides), {}))
    for world_size, runs in turns.items():
        run_distributed(train_in_turn, world_size, runs)
    summaries = {name: json.loads((tmp_path / name / "summary.json").read_text()) for name in LAYOUTS}
    trained_curve = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    for name, summary in summaries.items():
        for when in ("validation_before", "validation_after"):
            ours, oracle = summary[when]["second"], summaries["one process"][when]["second"]
            assert abs(ours["clean_nll"] - oracle["clean_nll"]) < 5e-6, (name, when)
        to_hf(open_source(tmp_path / name), tmp_path / f"{name} hf", None, say=lambda text: None)  # compares
    start = summaries["one process"]["validation_before"]["second"]["clean_nll"]
    assert start < trained_curve[0]["nll"], "weights that have been trained"


def test_another_model_is_refused_as_a_start(trained, corpus, tmp_path):
    from card_megatron.config.errors import CheckpointError
    from card_megatron.platform import Ranks
    from card_megatron.training.run import train_run

    config = tiny_config(corpus, tmp_path / "run", f"--checkpoint.init_from={trained}", "--model.num_layers=2")
    with pytest.raises(CheckpointError, match=r"another model.*\n.*model\.num_layers: checkpoint 4, run 2"):
        train_run(config, Ranks(), console=False)
