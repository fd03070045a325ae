"""The model `card` in the real harness gives what its own model `hf` gives on the exported folder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM

from card_megatron.config.errors import ConfigError
from card_megatron.decoding.model import open_model
from card_megatron.evaluation.harness import CardLM, chunks
from card_megatron.evaluation.store import Store
from tests.scoring import sentence, trained_model, write_tasks


@pytest.fixture(scope="module")
def models(corpus, tmp_path_factory) -> tuple[Path, Path]:
    return trained_model(corpus, tmp_path_factory.mktemp("evaluation"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> list[str]:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def by_hf(models, tasks) -> dict[str, Any]:
    return evaluated(HFLM(pretrained=str(models[1]), device="cpu", dtype="float32", batch_size=4), tasks)


@pytest.fixture
def card(models):
    with open_model(models[1]) as model:
        yield CardLM(model=model)


def evaluated(lm: Any, tasks: list[str]) -> dict[str, Any]:
    manager = lm_eval.tasks.TaskManager(include_defaults=False)
    return lm_eval.simple_evaluate(lm, tasks=tasks, task_manager=manager, bootstrap_iters=0)


def request(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@pytest.mark.parametrize("which", ["checkpoint", "exported"])
def test_scores_and_texts_are_those_of_hf(models, tasks, by_hf, which):
    with open_model(models[which == "exported"]) as model:
        lm = CardLM(model=model)
        ours = evaluated(lm, tasks)
    assert set(ours["results"]) == {"tiny_choice", "tiny_empty", "tiny_rolling", "tiny_generate"}
    for task, metrics in by_hf["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float):
                near = pytest.approx(value, rel=1e-5) if "perplexity" in name else value
                assert ours["results"][task][name] == near, (task, name)
        for one, other in zip(ours["samples"][task], by_hf["samples"][task], strict=True):
            assert one["arguments"] == other["arguments"]
            for mine, theirs in zip(one["filtered_resps"], other["filtered_resps"], strict=True):
                if task == "tiny_generate":
                    assert mine == theirs
                elif task == "tiny_rolling":
                    assert mine == pytest.approx(theirs, abs=1e-4, rel=2e-7)  # hf adds up in fp32
                else:
                    assert mine[0] == pytest.approx(theirs[0], abs=1e-4) and mine[1] == theirs[1]
    assert lm.truncated > 0, "some prompts with examples are longer than the context"
    assert len({sample["filtered_resps"][0] for sample in ours["samples"]["tiny_generate"]}) > 3


def test_pairs_are_encoded_as_the_harness_encodes_them(card, monkeypatch):
    rng = random.Random(3)
    texts = [(sentence(rng, 4) + space, lead + sentence(rng, 3)) for space in ("", " ", "\n ") for lead in ("", " ")]
    texts += [("", "the file"), ("", " the"), ("the", "n"), ("a\n\n", "b")]
    seen: list[Any] = []
    monkeypatch.setattr(CardLM, "_loglikelihood_tokens", lambda self, requests, **kwargs: seen.append(requests))
    TemplateLM.loglikelihood(card, [request("loglikelihood", *text) for text in texts], disable_tqdm=True)
    card.loglikelihood([request("loglikelihood", *text) for text in texts])
    assert seen[0] == seen[1]


def test_a_context_of_white_space_has_a_score(card):
    (answer,) = card.loglikelihood([request("loglikelihood", " ", "the")])
    assert answer == card.loglikelihood([request("loglikelihood", "", " the")])[0]


@pytest.mark.parametrize("options", [{"strategy": "ar"}, {"strategy": "verify", "K": 3}, {"strategy": "confidence"}])
def test_sampled_text_depends_on_the_seed_alone(models, options):
    kinds = {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "top_k": 20, "max_gen_toks": 10, "until": []}
    requests = [request("generate_until", "the list", kinds), request("generate_until", "the list", kinds)]
    with open_model(models[1]) as model:
        first, again, other = (
            CardLM(model=model, seed=seed, batch_tokens=tokens, **options).generate_until(requests)
            for seed, tokens in ((0, 8192), (0, 16), (7, 8192))
        )
    assert first == again != other and first[0] != first[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "generation option num_beams is not known here"),
        ({"max_gen_toks": 96}, "max_gen_toks=96 leaves no room for a prompt in max_length=96"),
        (
            {"do_sample": True, "temperature": 1.0, "top_p": 2.0, "max_gen_toks": 8},
            "generation option top_p=2.0 must be",
        ),
    ],
)
def test_generation_options_that_cannot_be_are_refused(card, options, message):
    with pytest.raises(ConfigError, match=message):
        card.generate_until([request("generate_until", "the", options)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs checkpoint=PATH"),
        ({"checkpoint": "x", "pretained": "y"}, "model_args has pretained"),
        ({"strategy": "beam"}, "--strategy beam: objective card is a causal model, which has verify, confidence, ar"),
        ({"strategy": "confidence", "K": 0}, "must be at least 1"),
        ({"strategy": "ar", "K": 4}, "block=4 is a field of confidence and denoise, and means nothing to ar"),
        ({"tau": 0.5}, "tau=0.5 is a field of confidence, and means nothing to verify"),
        ({"max_length": 1000}, "max_length=1000 must lie in 1 .. 96"),
    ],
)
def test_model_arguments_that_cannot_be_are_refused(models, arguments, message):
    with open_model(models[1]) as model, pytest.raises(ConfigError, match=message):
        CardLM(model=None if "checkpoint" in arguments or not arguments else model, **arguments)


def test_what_the_store_has_is_not_computed_again(models, tmp_path):
    texts = [("the list", f" {word}") for word in ("is", "of", "a file", "not")]
    likely = [request("loglikelihood", *text) for text in texts]
    said = [request("generate_until", text, {"max_gen_toks": 5, "until": []}) for text, _ in texts[:1]]
    with open_model(models[1]) as model:
        first = CardLM(model=model, store=Store(tmp_path / "scores", "one", writes=True))
        answers, text = first.loglikelihood(likely), first.generate_until(said)
        with (tmp_path / "scores").open("a") as file:
            file.write('["half of a line')
        again = CardLM(model=model, store=Store(tmp_path / "scores", "one", writes=True))
        assert again.store.found == 5
        assert again.loglikelihood(likely) == answers and again.generate_until(said) == text
        assert again.scorer.forwarded == 0 and again.answered == 5
        assert Store(tmp_path / "scores", "another model", writes=True).found == 0
        with pytest.raises(ConfigError, match=r"scores cannot be kept in .*; choose another --output"):
            Store(tmp_path / "scores" / "below a file", "one", writes=True)


def test_chunks_keep_order_and_go_on_where_they_were_cut():
    sizes = {str(number): 1 + number % 7 for number in range(50)}
    parts = chunks(sizes, 20)
    assert [key for part in parts for key in part] == list(sizes) and len(parts) > 5
    rest = {key: size for key, size in sizes.items() if key not in {*parts[0], *parts[1]}}
    assert chunks(rest, 20) == parts[2:]


def test_a_score_that_is_not_finite_is_passed_on(models):
    """A model that has diverged gets nan, not a crash and not a zero."""
    with open_model(models[1]) as model:
        lm = CardLM(model=model)
        model.backend.model.model.norm.weight = torch.nn.Parameter(torch.full((32,), float("nan")), requires_grad=False)
        ((logprob, greedy),) = lm.loglikelihood([request("loglikelihood", "the", " list")])
    assert logprob != logprob and not greedy
