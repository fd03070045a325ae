"""The four paradigms through the commands that exist: mdlm and bd3lm where arm and card already are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from card_megatron.cli import main
from tests.scoring import sentence, trained_diffusion, write_lines


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory) -> dict[str, Path]:
    return trained_diffusion(corpus, tmp_path_factory.mktemp("runs"), "card")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    import random

    rng, folder = random.Random(0), tmp_path_factory.mktemp("data")
    rows = [
        {"question": sentence(rng, 6), "choices": [sentence(rng, 3) for _ in range(4)], "gold": rng.randrange(4)}
        for _ in range(6)
    ]
    write_lines(folder / "arc/ARC-Easy-test.jsonl", rows)
    write_lines(folder / "text.jsonl", [{"text": sentence(rng, words)} for words in (3, 40, 9)])
    return folder


def refusal(*arguments: object) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*map(str, arguments)])
    assert isinstance(caught.value.code, str)
    return caught.value.code


def test_perplexities_stand_in_one_table_and_a_bound_is_named(runs, data, tmp_path, capsys):
    def results(*options: str) -> dict[str, dict]:
        command = ["eval", "perplexity", *map(str, runs.values()), f"--data=v={data / 'text.jsonl'}", "--window=64"]
        main([*command, f"--output={tmp_path / 'out.json'}", *options])
        found = json.loads((tmp_path / "out.json").read_text())["results"]
        return {result["objective"]: result for result in found}

    few = results("--samples=4")
    shown = capsys.readouterr().out
    assert shown.count("| ELBO, 4 samples |") == 2 and shown.count("≤ ") == 6 and "± of token ppl by samples" in shown
    for name, result in few.items():
        exact = name == "card"
        assert result["likelihood"] == ("exact" if exact else "bound")
        assert (result["samples"], result["window"]) == ((None, 64) if exact else (4, 63))
        assert (result["nll_sampling_error"] is None) == exact and result["tokens"] == few["card"]["tokens"]
    assert results("--samples=4") == few, "known ones are not computed again"
    many = results("--samples=64")
    assert many["card"] == few["card"]
    for name in ("mdlm", "bd3lm"):
        one, other = few[name], many[name]
        assert other["nll_sampling_error"] < 0.6 * one["nll_sampling_error"]
        assert abs(one["nll"] - other["nll"]) < 3 * (one["nll_sampling_error"] + other["nll_sampling_error"])
    main(["eval", "compare", str(tmp_path / "out.json")])
    compared = capsys.readouterr().out
    assert compared.count("(ELBO, 64 samples)") == 6 and "≤ is a bound" in compared


@pytest.mark.parametrize("name", ["mdlm", "bd3lm"])
def test_tasks_are_answered_by_bounds(runs, data, tmp_path, capsys, name):
    command = ["eval", str(runs[name]), "--tasks=arc_easy", f"--data={data}", "--num-fewshot=0", "--samples=4"]
    main([*command, f"--output={tmp_path / 'out.json'}"])
    found, shown = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    assert (found["likelihood"], found["mc_samples"], found["objective"]) == ("bound", 4, name)
    assert found["mean_loglikelihood_error"] > 0 and found["requests"] == 24
    assert "log-likelihoods are bounds (ELBO) by 4 noise samples each, with a standard error of" in shown
    main([*command, f"--output={tmp_path / 'again.json'}"])
    assert json.loads((tmp_path / "again.json").read_text())["results"] == found["results"]


@pytest.mark.parametrize("name", ["mdlm", "bd3lm"])
def test_every_kind_of_request_has_an_answer(runs, name):
    from lm_eval.api.instance import Instance

    from card_megatron.config.errors import ConfigError
    from card_megatron.decoding.model import open_model
    from card_megatron.evaluation.harness import CardLM

    def asked(kind: str, *arguments: object) -> list[Instance]:
        return [Instance(kind, {}, arguments, 0)]

    with open_model(runs[name]) as model:
        lm = CardLM(model=model, mc_samples=6, steps=4)
        ((logprob, greedy),) = lm.loglikelihood(asked("loglikelihood", "Return the", " list"))
        assert logprob < 0 and greedy in (True, False) and len(lm.errors) == 1 and lm.scorer.samples == 6
        text = "Return the list of values. " * 12
        (rolling,) = lm.loglikelihood_rolling(asked("loglikelihood_rolling", text))
        assert rolling < 5 * logprob and len(lm.errors) > 2, "in windows"
        options = {"until": ["\n\n"], "max_gen_toks": 8}
        (made,) = lm.generate_until(asked("generate_until", "Return", options))
        assert made == lm.generate_until(asked("generate_until", "Return", options))[0]
        with pytest.raises(ConfigError, match="samples=1 must be at least 2"):
            CardLM(model=model, mc_samples=1)


def test_texts_of_all_of_them(runs, tmp_path, capsys):
    for name, options in {"mdlm": ["--block=5", "--steps=2"], "bd3lm": ["--steps=2"], "card": []}.items():
        path = tmp_path / f"{name}.jsonl"
        common = [str(runs[name]), "def main", "The", "--max-new-tokens=12", "--temperature=1"]
        main(["generate", *common, *options, "--output", str(path)])
        found = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["prompt"] for line in found] == ["def main", "The"]
        assert all(4 not in line["tokens"] for line in found) and any(line["text"] for line in found)
        if name == "mdlm":
            assert all(line["passes"] <= 6 for line in found)
    capsys.readouterr()
    main(["generate", str(runs["bd3lm"]), "The", "--max-new-tokens=12", "--order=random", "--show", "--stats"])
    assert "tokens per pass" in capsys.readouterr().out
    main(["generate", str(runs["bd3lm"]), "The", "--max-new-tokens=12", "--stream"])
    assert capsys.readouterr().out.startswith("The")


def test_gen_ppl_s_command_knows_denoising(runs, tmp_path):
    write_lines(tmp_path / "prompts.jsonl", [{"text": "def main"}, {"text": "The"}])
    common = [
        f"--prompts={tmp_path / 'prompts.jsonl'}",
        "--max-new-tokens=8",
        f"--output={tmp_path / 'out'}",
        "--no-plot",
    ]
    main(["eval", "generation", str(runs["mdlm"]), *common, "--strategies", "denoise", "denoise:T=2,order=random"])
    rows = json.loads((tmp_path / "out/generation.json").read_text())["results"]
    assert [row["strategy"] for row in rows] == ["denoise", "denoise:T=2,order=random"]
    assert rows[1]["tokens_per_pass"] > 2 * rows[0]["tokens_per_pass"]
    said = refusal("eval", "generation", runs["mdlm"], *common, "--strategies", "verify:K=4")
    assert "objective mdlm is masked diffusion, which has denoise; leave it out" in said


@pytest.mark.parametrize(
    ("name", "options", "fault"),
    [
        (
            "mdlm",
            ["--strategy=verify"],
            "--strategy verify: objective mdlm is masked diffusion, which has denoise; leave",
        ),
        ("bd3lm", ["--tau=0.5"], "tau=0.5 is a field of confidence, and means nothing to denoise"),
        ("bd3lm", ["--block=4"], "block=4: the model was trained on blocks of 8; leave it out"),
        ("mdlm", ["--steps=0"], "steps=0 must be at least 1"),
        ("mdlm", ["--max-new-tokens=100"], "max_position_embeddings=64; ask for at most"),
        ("mdlm", ["--branches"], "branches=True is a field of verify, and means nothing to denoise"),
        ("card", ["--steps=4"], "steps=4 is a field of denoise, and means nothing to verify"),
        ("card", ["--block=4"], "block=4 is a field of confidence and denoise, and means nothing to verify"),
        ("card", ["--block=4", "--strategy=ar"], "(objective card is a causal model); leave it out"),
        ("card", ["--branches"], "--strategy verify: "),
        ("card", ["--strategy=denoise"], "objective card is a causal model, which has verify, confidence, ar"),
    ],
)
def test_options_that_do_not_fit_the_objective_are_refused(runs, name, options, fault):
    assert fault in refusal("generate", runs[name], "The", *options)
