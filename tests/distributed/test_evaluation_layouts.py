"""The same scores on 1, 2 and 4 ranks in every layout, each request processed by one replica alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from card_megatron.testing import run_distributed
from tests.scoring import sentence, some_pairs, trained_model, whole_forward_scores, write_lines

LAYOUTS = {1: [(1, 1)], 2: [(2, 1), (1, 2), (1, 1)], 4: [(2, 2), (2, 1), (1, 1)]}
"""World size -> (tensor, pipeline); what is left are replicas."""
POSITIONS, VOCAB = 96, 500


@pytest.fixture(scope="module")
def models(corpus, tmp_path_factory) -> tuple[Path, Path]:
    return trained_model(corpus, tmp_path_factory.mktemp("evaluation"))


@pytest.fixture(scope="module")
def views(models) -> dict[tuple[int, int, int], list[dict[str, Any]]]:
    """(world size, tensor, pipeline) -> what each rank saw."""
    found = {}
    for world_size, layouts in LAYOUTS.items():
        ranks = run_distributed(score_all, world_size, models, layouts, timeout=240)
        found |= {(world_size, *layout): [rank[layout] for rank in ranks] for layout in ranks[0]}
    return found


def score_all(models: tuple[Path, Path], layouts: list[tuple[int, int]]) -> dict[tuple[int, int] | str, dict[str, Any]]:
    from card_megatron.decoding.model import open_model
    from card_megatron.evaluation.scorer import Scorer

    found: dict[Any, dict[str, Any]] = {}
    for tensor, pipeline in layouts:
        with open_model(models[0], tensor=tensor, pipeline=pipeline) as model:
            scorer = Scorer(model, batch_tokens=512)
            scores = scorer.score(some_pairs(VOCAB, POSITIONS), per_token=True)
            found[tensor, pipeline] = {
                "scores": scores,
                "scored": scorer.scored_here,
                "forwarded": scorer.forwarded,
                "truncated": scorer.truncated,
                "leads": model.leads,
                "parameters": sum(parameter.numel() for parameter in model.backend.model.parameters()),
            }
    return found


def test_scores_are_the_same_in_every_layout(models, views):
    from transformers import AutoModelForCausalLM

    pairs = some_pairs(VOCAB, POSITIONS)
    expected = whole_forward_scores(AutoModelForCausalLM.from_pretrained(models[1]), pairs, POSITIONS, VOCAB)
    for layout, ranks in views.items():
        for rank in ranks:
            assert rank["scores"] == ranks[0]["scores"], "every rank has the same, to the last bit"
            assert rank["truncated"] == 2
        for score, (of_tokens, greedy) in zip(ranks[0]["scores"], expected, strict=True):
            assert score.logprob == pytest.approx(of_tokens.sum(), abs=1e-4), layout
            assert score.token_logprobs == pytest.approx(of_tokens, abs=1e-4) and score.greedy == greedy


def test_every_request_is_processed_by_one_replica(views):
    total, alone = len(some_pairs(VOCAB, POSITIONS)), views[1, 1, 1][0]
    for (world_size, tensor, pipeline), ranks in views.items():
        replicas = world_size // (tensor * pipeline)
        assert sum(rank["leads"] for rank in ranks) == replicas
        assert sum(rank["scored"] for rank in ranks) == total * tensor * pipeline
        tokens = [rank["forwarded"] for rank in ranks]
        if replicas == 1:
            assert {rank["scored"] for rank in ranks} == {total} and set(tokens) == {alone["forwarded"]}
        else:
            assert max(tokens) < 1.35 * alone["forwarded"] / replicas, "shares are alike, and prefixes stay together"
            assert all(0.4 * total / replicas < rank["scored"] < 1.8 * total / replicas for rank in ranks)


def test_no_rank_of_tp2_pp2_holds_the_model(views):
    whole = views[1, 1, 1][0]["parameters"]
    assert all(rank["parameters"] < 0.6 * whole for rank in views[4, 2, 2])
    assert all(rank["parameters"] < 0.7 * whole for rank in views[2, 2, 1] + views[2, 1, 2])


def test_tasks_on_two_replicas_give_the_results_of_one_process(models, tmp_path):
    import random

    rng = random.Random(0)
    rows = [
        {"question": sentence(rng, 9), "choices": [sentence(rng, 4) for _ in range(4)], "gold": rng.randrange(4)}
        for _ in range(25)
    ]
    write_lines(tmp_path / "arc/ARC-Easy-test.jsonl", rows)
    results = {}
    for world_size in (1, 2):
        output = tmp_path / f"{world_size}.json"
        ranks = run_distributed(evaluate, world_size, models[0], tmp_path, output, timeout=240)
        results[world_size] = ranks[0]
        assert ranks[1:] == [None] * (world_size - 1), "one rank speaks"
        assert sorted(path.name for path in tmp_path.glob(f"{world_size}.*")) == [
            f"{world_size}.json",
            f"{world_size}.md",
        ]
    one, two = results[1], results[2]
    assert one["results"] == two["results"] and one["truncated"] == two["truncated"]
    assert one["requests_per_rank"] == [100] and sum(two["requests_per_rank"]) == 100
    assert min(two["requests_per_rank"]) > 35
    assert one["generated"] == two["generated"]


def evaluate(checkpoint: Path, data: Path, output: Path) -> dict[str, Any] | None:
    from lm_eval.api.instance import Instance

    from card_megatron.decoding.model import open_model
    from card_megatron.evaluation.harness import CardLM
    from card_megatron.evaluation.runner import evaluate_tasks

    with open_model(checkpoint) as model:
        found = evaluate_tasks(model, ["arc_easy"], data=data, num_fewshot=1, output=output)
        options = {"max_gen_toks": 8, "until": []}
        requests = [Instance("generate_until", {}, (f"the {word}", options), 0) for word in ("list", "file", "a")]
        texts = CardLM(model=model).generate_until(requests)
    return None if found is None else {**found, "generated": texts}
