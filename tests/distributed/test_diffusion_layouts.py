"""mdlm and bd3lm: the same bounds and the same texts on 1, 2 and 4 ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from card_megatron.evaluation.texts import TextSet
from card_megatron.testing import run_distributed
from tests.scoring import trained_diffusion

LAYOUTS = {1: [(1, 1)], 2: [(2, 1), (1, 1)], 4: [(2, 2), (1, 1)]}
"""World size -> (tensor, pipeline); what is left are replicas."""
REQUESTS = [("the name of", word) for word in (" a file", " the list", " a")]
TEXTS = TextSet("some", Path("some.txt"), ["the name of the file is a string. " * 8, "a list of", "the value " * 30])
PROMPTS = ["def main", "", "import os", "The", "Return the list of"]


@pytest.fixture(scope="module")
def views(corpus, tmp_path_factory) -> dict[tuple[str, int, int, int], list[dict[str, Any]]]:
    """(objective, world size, tensor, pipeline) -> what each rank found."""
    runs = trained_diffusion(corpus, tmp_path_factory.mktemp("diffusion"))
    found = {}
    for world_size, layouts in LAYOUTS.items():
        ranks = run_distributed(evaluate_all, world_size, runs, layouts, timeout=240)
        for name, tensor, pipeline in ranks[0]:
            found[name, world_size, tensor, pipeline] = [rank[name, tensor, pipeline] for rank in ranks]
    return found


def some_pairs() -> list[tuple[list[int], list[int]]]:
    rng = random.Random(0)
    lengths = [(rng.randrange(1, 30), rng.randrange(1, 20)) for _ in range(8)] + [(1, 63), (60, 9)]
    return [tuple([rng.randrange(5, 500) for _ in range(count)] for count in pair) for pair in lengths]  # type: ignore


def evaluate_all(runs: dict[str, Path], layouts: list[tuple[int, int]]) -> dict[tuple[str, int, int], dict[str, Any]]:
    from lm_eval.api.instance import Instance

    from card_megatron.decoding.model import open_model
    from card_megatron.decoding.sampling import SamplingParams
    from card_megatron.decoding.text import Generation, generate
    from card_megatron.evaluation.bound import BoundScorer
    from card_megatron.evaluation.harness import CardLM
    from card_megatron.evaluation.perplexity import measure

    found = {}
    for name, path in runs.items():
        for tensor, pipeline in layouts:
            with open_model(path, tensor=tensor, pipeline=pipeline) as model:
                scorer = BoundScorer(model, samples=4, batch_tokens=200)
                scores = scorer.score(some_pairs(), common_noise=True, greedy=True)
                texts = [
                    [one.result.tokens for one in generate(model, PROMPTS, options)[0]]
                    for options in (
                        Generation(max_new_tokens=10, steps=4),
                        Generation(max_new_tokens=10, sampling=SamplingParams(temperature=1.0, seed=3), batch_size=2),
                    )
                ]
                lm = CardLM(model=model, mc_samples=3)
                answers = lm.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in REQUESTS])
                found[name, tensor, pipeline] = {
                    **{"perplexity": measure(model, TEXTS, window=32, samples=3), "answers": answers},
                    "likelihood": lm.likelihood(),
                    **{"scores": scores, "texts": texts, "scored": scorer.scored_here, "truncated": scorer.truncated},
                    "block": model.block_size,
                }
    return found


def test_bounds_and_texts_are_those_of_one_process(views):
    for (name, world_size, tensor, pipeline), ranks in views.items():
        alone = views[name, 1, 1, 1][0]
        replicas = world_size // (tensor * pipeline)
        assert ranks[0]["block"] == (8 if name == "bd3lm" else None)
        assert sum(rank["scored"] for rank in ranks) == len(some_pairs()) * tensor * pipeline
        assert max(rank["scored"] for rank in ranks) <= -(-len(some_pairs()) // replicas)
        for rank in ranks:
            assert rank["scores"] == ranks[0]["scores"], "every rank has the same, to the last bit"
            assert rank["texts"] == alone["texts"], (name, world_size, tensor, pipeline)
            assert rank["truncated"] == 1
        for score, wanted in zip(ranks[0]["scores"], alone["scores"], strict=True):
            assert score.logprob == pytest.approx(wanted.logprob, abs=1e-3, rel=1e-6), (name, world_size, tensor)
            assert score.error == pytest.approx(wanted.error, abs=1e-3, rel=1e-6) and score.greedy == wanted.greedy
    assert all(score.error > 0 for score in views["mdlm", 1, 1, 1][0]["scores"] if score.logprob < -50)


def test_perplexities_and_answers_of_the_harness_are_those_of_one_process(views):
    """What a table shows: with its samples and its error."""
    for (name, *_), ranks in views.items():
        alone = views[name, 1, 1, 1][0]
        for rank in ranks:
            ours, theirs = rank["perplexity"].record(), alone["perplexity"].record()
            assert ours["nll"] == pytest.approx(theirs["nll"], rel=1e-5) and ours["how"] == "ELBO, 3 samples"
            assert ours["nll_sampling_error"] == pytest.approx(theirs["nll_sampling_error"], rel=1e-3)
            assert ours["nll_sampling_error"] > 0 and ours["tokens"] == theirs["tokens"]
            for (logprob, greedy), (wanted, chosen) in zip(rank["answers"], alone["answers"], strict=True):
                assert logprob == pytest.approx(wanted, abs=1e-3) and greedy == chosen
            likelihood = rank["likelihood"]
            assert likelihood["likelihood"] == "bound" and likelihood["mc_samples"] == 3
            assert likelihood["mean_loglikelihood_error"] == pytest.approx(
                alone["likelihood"]["mean_loglikelihood_error"], rel=1e-3
            )
            assert likelihood["mean_loglikelihood_error"] > 0
