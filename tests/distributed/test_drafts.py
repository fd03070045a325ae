"""Draft metrics of training: what decoding itself would accept, in every layout."""

from __future__ import annotations

import json

import pytest

from card_megatron.testing import run_distributed
from card_megatron.training.drafts import accept_length
from tests.curves import tiny_config
from tests.distributed.test_layouts import CP, ONE_ROW, PP, SP, TP, VPP
from tests.runs import train_in_turn

DRAFTS = 3
LAYOUTS = {
    "one process": (1, []),
    "TP2+SP": (2, [TP, SP]),
    "PP2xVPP2": (2, [PP, VPP]),
    "CP2": (2, [CP]),
    "DP2": (2, [ONE_ROW]),
}


@pytest.fixture(scope="module")
def summaries(corpus, tmp_path_factory):
    """Layout -> its run's summary: the same short run, validated with drafts at its end."""
    base = tmp_path_factory.mktemp("drafts")
    options = [
        *(f"--data.validation.second=[{corpus}/second]", "--eval.samples=8", f"--eval.drafts={DRAFTS}"),
        *("--eval.draft_samples=13", "--train.train_iters=40", "--optimizer.lr=3e-3"),
        *("--optimizer.min_lr=0", "--objective.t_max=0.3"),
    ]
    turns: dict[int, list] = {1: [], 2: []}
    for name, (world_size, overrides) in LAYOUTS.items():
        turns[world_size].append((tiny_config(corpus, base / name, *options, *overrides), {}))
    for world_size, runs in turns.items():
        run_distributed(train_in_turn, world_size, runs)
    return {name: json.loads((base / name / "summary.json").read_text()) for name in LAYOUTS}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_measures_the_same(summaries, name):
    ours, oracle = (summaries[layout]["validation_after"]["second"] for layout in (name, "one process"))
    assert ours["accept_length"] == oracle["accept_length"]
    # between: no draft is ever verified twice in a row, and every one is accepted
    assert 1 / (1 + DRAFTS) <= ours["passes_per_token"] <= 2 / (2 + ours["accept_length"])


def test_it_is_what_decoding_accepts(summaries, corpus, tmp_path):
    """The decoder itself: of a request's tokens, those of the second pass are the accepted drafts and one more."""
    from card_megatron.data.datasets import build_clean_datasets
    from card_megatron.data.tokenizers import load_tokenizer
    from card_megatron.decoding.engine import Request, decode
    from card_megatron.decoding.model import open_model
    from card_megatron.decoding.verify import Verify

    summary = summaries["one process"]
    with open_model(summary["checkpoint"]) as model:
        config = tiny_config(corpus, tmp_path, f"--data.validation.second=[{corpus}/second]")
        datasets = build_clean_datasets(config, load_tokenizer(f"{corpus}/tokenizer.model"))
        samples = [datasets.validation["second"][index]["tokens"].tolist() for index in range(13)]
        requests = [Request(tokens[:-DRAFTS], DRAFTS + 2) for tokens in samples]
        results, _ = decode(
            model.backend, requests, Verify(DRAFTS, adaptive=False), mask_id=model.tokenizer.mask, batch_size=1
        )
    lengths = [result.filled_in.count(2) - 1 for result in results]
    assert sum(lengths) / 13 == pytest.approx(summary["validation_after"]["second"]["accept_length"])
    assert 0 < sum(lengths) < 13 * DRAFTS, "a test that can tell: some drafts are accepted, and some are not"


def test_accept_length_by_definition():
    assert [accept_length(drafts, [1, 2, 3]) for drafts in ([1, 2, 3], [1, 2, 4], [0, 2, 3])] == [3, 2, 0]
