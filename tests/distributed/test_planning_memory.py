"""card plan's memory model against what ranks of a real run hold, tensor by tensor, in one training step."""

from __future__ import annotations

import pytest

from card_megatron.planning.memory import memory_by_stage
from card_megatron.testing import run_distributed
from tests.configs import load
from tests.memory import measure_all

TOLERANCE = 0.05

SMALL = (
    "model.num_layers=4; model.hidden_size=256; model.ffn_hidden_size=768; model.num_attention_heads=4; "
    "model.num_query_groups=2; model.vocab_size=1000; data.sequence_length=128; train.global_batch_size=8; "
    "train.micro_batch_size=2; data.num_workers=0"
)
WIDE = SMALL + "; model.num_layers=2; model.hidden_size=512; model.ffn_hidden_size=1408; model.vocab_size=4000"
BF16 = "precision.preset=bf16; model.num_layers=2; data.sequence_length=64"
FULL = "model.recompute_granularity=full; model.recompute_method=uniform; model.recompute_num_layers=1"
BLOCK = "model.recompute_granularity=full; model.recompute_method=block; model.recompute_num_layers=2"
SELECTIVE = "model.recompute_granularity=selective"
UNTIED = "model.share_embeddings_and_output_weights=false; model.qk_layernorm=true; model.add_qkv_bias=true"
GPT = "model.activation=gelu; model.normalization=LayerNorm; model.num_query_groups=null"

LAYOUTS = {
    1: [SMALL, WIDE, *(f"{SMALL}; {it}" for it in (BF16, GPT, SELECTIVE, FULL, BLOCK, UNTIED)),
        f"{SMALL}; train.micro_batch_size=1; ema.decay=0.99", f"{SMALL}; model.activation=squared_relu"],
    2: [f"{SMALL}; {it}" for it in (
        "TP=2", "TP=2; SP=true", "PP=2", "PP=2; VPP=2", "CP=2", f"CP=2; {SELECTIVE}", f"TP=2; SP=true; {FULL}",
        f"PP=2; {FULL}", "ema.decay=0.99", f"TP=2; SP=true; {BF16}", f"PP=2; model.num_layers=5; {UNTIED}")],
    4: [f"{SMALL}; {it}" for it in ("TP=2; SP=true; PP=2", "CP=2; PP=2", "TP=2; CP=2", "PP=4; ema.decay=0.99")],
}  # fmt: skip


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_bytes_of_a_real_run_are_as_planned(ranks):
    configs = [load(text) for text in LAYOUTS[ranks]]
    of_ranks = run_distributed(measure_all, ranks, configs, timeout=240)
    wrong = []
    for number, (text, config) in enumerate(zip(LAYOUTS[ranks], configs, strict=True)):
        for measured in (results[number] for results in of_ranks):
            planned = memory_by_stage(config, ranks, engine=False)[measured["stage"]]
            for item in ("weights", "gradients", "optimizer", "average", "activations"):
                expected = getattr(planned, item) + (planned.logits if item == "activations" else 0)
                if abs(expected - measured[item]) > TOLERANCE * measured[item]:
                    wrong.append(f"{text}: {item} of stage {measured['stage']}: {expected} != {measured[item]}")
    assert not wrong, "\n".join(wrong)
