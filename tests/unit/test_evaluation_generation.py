"""Gen PPL against whole forwards of the judge, and the measures of repetition by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from card_megatron.commands import eval_generation
from card_megatron.config.errors import ConfigError
from card_megatron.data.tokenizers import BytesTokenizer
from card_megatron.decoding.hf_backend import HFBackend
from card_megatron.decoding.model import OpenModel
from card_megatron.decoding.text import Generation
from card_megatron.evaluation import judge as judge_module
from card_megatron.evaluation.generation import (
    continuation,
    fit_prompts,
    gen_perplexity,
    parse_strategy,
    read_prompts,
    write_texts,
)
from card_megatron.evaluation.judge import Judge
from card_megatron.evaluation.ngrams import distinct, mean_repetition, repetition
from tests.evaluation import bytes_llama, judge_folder


def test_distinct_and_repetition_by_hand():
    assert distinct(["abab"], 1) == 2 / 4
    assert distinct(["abab"], 2) == 2 / 3  # ab ba ab
    assert distinct(["abab", "ab"], 2) == 2 / 4  # over all texts
    assert distinct(["a"], 2) is None
    assert repetition("abcdefgh") == 0
    assert repetition("aaaaaa") == pytest.approx(2 / 3)  # aaaa three times
    assert repetition("abcdabcd") == pytest.approx(1 / 5)
    assert repetition("abc") is None
    assert mean_repetition(["aaaaaa", "abcdefgh", "abc"]) == pytest.approx(1 / 3)


# ---------------------------------------------------------------- the judge


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Judge:
    return Judge(judge_folder(tmp_path_factory.mktemp("judge") / "gpt2_tiny"))


def slow_nll(judge: Judge, ids: list[int], context: int) -> float:
    """One whole forward a token."""
    total = 0.0
    for place in range(context, len(ids)):
        logits = judge.model(input_ids=torch.tensor([ids[:place]])).logits[0, -1]
        total -= float(logits.log_softmax(0)[ids[place]])
    return total


TEXTS = [("the owl", " and the cat went"), ("a", "bc the end"), ("", "abc"), ("nothing", ""), ("xyz ", "the")]


def test_gen_perplexity_is_that_of_whole_forwards(judge, monkeypatch):
    end = judge.tokenizer.eos_token_id
    nlls, counts = [], []
    for prefix, text in TEXTS:
        whole = [end, *judge.tokenizer(prefix + text)["input_ids"]]
        # a token that reaches over the seam is the continuation's
        context = 1 + next(
            count
            for count in range(len(whole) - 1, -1, -1)
            if len(judge.tokenizer.decode(whole[1 : 1 + count])) <= len(prefix)
        )
        nlls.append(slow_nll(judge, whole, context))
        counts.append(len(whole) - context)
    assert [judge.ids(prefix) for prefix, _ in TEXTS][1] != judge.ids("abc the end")[:1]  # a + bc is one token there
    for at_once in (judge_module.LOGITS_OF_A_PASS, 1):
        monkeypatch.setattr(judge_module, "LOGITS_OF_A_PASS", at_once)
        judged = judge.score(TEXTS)
        assert [one.tokens for one in judged] == counts
        assert [one.nll for one in judged] == pytest.approx(nlls, rel=1e-5)
    assert counts[3] == 0
    found = gen_perplexity(judged)
    assert found["perplexity"] == pytest.approx(math.exp(sum(nlls) / sum(counts)), rel=1e-5)
    assert (found["tokens"], found["texts"], found["truncated"]) == (sum(counts), 4, 0)


def test_a_text_beyond_the_judge_s_context_loses_its_left(judge):
    prefix, text = "x" * 60, "y" * 10
    (found,) = judge.score([(prefix, text)])
    ids = [judge.tokenizer.eos_token_id, *judge.ids(prefix + text)][-49:]
    assert (found.truncated, found.tokens) == (True, 10)
    assert found.nll == pytest.approx(slow_nll(judge, ids, 39), rel=1e-5)


def test_a_folder_that_is_no_judge_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no causal language model with a tokenizer"):
        Judge(tmp_path)


# ---------------------------------------------------------------- prompts and strategies


def test_strategies_are_read_from_words():
    base = Generation(max_new_tokens=5, batch_size=3)
    found = parse_strategy("confidence:K=8,tau=0.5,T=4,commit=prefix,min_fill=0", base)
    assert (found.block, found.tau, found.max_passes, found.commit, found.min_fill) == (8, 0.5, 4, "prefix", 0)
    assert (found.strategy, found.max_new_tokens, found.batch_size) == ("confidence", 5, 3)
    assert parse_strategy("verify:K=3,adaptive=0", base).build().width == 7
    assert parse_strategy("ar", base).strategy == "ar"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("beam", "'beam' is none of"),
        ("ar:K=2", "ar has no 'K'; it has no parameter"),
        ("verify:tau=1", "verify has no 'tau'; it has K, adaptive"),
        ("confidence:K=x", "'K=x' has no value of its kind"),
        ("confidence:K=0", "must be at least 1"),
    ],
)
def test_bad_strategies_are_refused(text, fault):
    with pytest.raises(ConfigError, match=fault):
        parse_strategy(text, Generation())


def test_prompts_are_contexts_or_texts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"context": "one\\u2028", "text": "not this"}\n\n{"text": "two"}\n{"prompt": "three"}\n')
    assert read_prompts(path, None) == ["one\u2028", "two", "three"]
    assert read_prompts(path, 1) == ["one\u2028"]
    for content, fault in (('{"endings": []}\n', "line 1: no JSON object"), ("", "has no prompt"), ("{", "line 1")):
        path.write_text(content)
        with pytest.raises(ConfigError, match=fault):
            read_prompts(path, None)


@pytest.fixture(scope="module")
def writer() -> OpenModel:
    return OpenModel(HFBackend(bytes_llama(positions=48)), BytesTokenizer(), "card", Path("model"))


def test_long_prompts_lose_words_on_the_left(writer):
    assert fit_prompts(writer, ["a few words that are too long for it", "short"], 30) == (
        ["too long for it", "short"],
        1,
    )
    with pytest.raises(ConfigError, match="leaves no room for a prompt"):
        fit_prompts(writer, ["a"], 48)


class DropsFirstSpace(BytesTokenizer):
    """As SentencePiece models with a dummy prefix do."""

    def decode(self, ids):
        return super().decode(ids).removeprefix(" ")


def test_a_continuation_keeps_its_first_space(writer):
    model = OpenModel(writer.backend, DropsFirstSpace(), "card", Path("model"))
    assert model.tokenizer.decode(list(b" name")) == "name"
    assert continuation(model, "Return the", list(b" name")) == " name"


def test_what_was_written_is_counted(writer):
    written = write_texts(
        writer, ["one ", "another "], "ar", Generation(strategy="ar", max_new_tokens=12, batch_size=2)
    )
    assert written.facts["tokens"] >= sum(map(len, written.tokens)) > 0
    assert written.facts["tokens_per_pass"] == 1
    assert written.facts["distinct_1"] == distinct(written.tokens, 1)
    assert written.facts["repetition_4"] == mean_repetition(written.tokens)


# ---------------------------------------------------------------- the command


def test_the_command_writes_table_json_samples_and_picture(judge, tmp_path, capsys):
    bytes_llama(positions=48).save_pretrained(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"context": f"the owl {number}"}) + "\n" for number in range(4)))
    second = judge_folder(tmp_path / "other")
    arguments = [str(tmp_path / "model"), f"--prompts={prompts}", "--scorer", str(judge.folder), str(second)]
    arguments += ["--strategies", "ar", "verify:K=3", "confidence:K=4,tau=0.3,T=2", "--max-new-tokens=10"]
    eval_generation.run([*arguments, "--samples=3", f"--output={tmp_path / 'out'}", "--tokenizer=bytes"])
    found = json.loads((tmp_path / "out" / "generation.json").read_text())
    ar, verify, confidence = found["results"]
    assert [row["strategy"] for row in found["results"]] == ["ar", "verify:K=3", "confidence:K=4,tau=0.3,T=2"]
    assert ar["judges"] == verify["judges"]  # the same text, however many passes it took
    assert ar["gen_perplexity"] == pytest.approx(ar["judges"][str(judge.folder)]["perplexity"])  # two equal judges
    assert confidence["tokens_per_pass"] > ar["tokens_per_pass"] == 1
    lines = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().split("\n")[:-1]]
    assert len(lines) == 9 and [line["prompt"] for line in lines[:3]] == ["the owl 0", "the owl 1", "the owl 2"]
    judged = judge.score([(line["prompt"], line["text"]) for line in lines[:3]])
    assert gen_perplexity(judged)["perplexity"] == pytest.approx(ar["judges"][str(judge.folder)]["perplexity"])
    table = (tmp_path / "out" / "generation.md").read_text()
    assert table in capsys.readouterr().out and "| AVG PPL |" in table and "| 1.00x |" in table
    assert (tmp_path / "out" / "generation.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert not list((tmp_path / "out").glob("*.unfinished"))


def test_a_scorer_that_is_not_there_is_refused_before_anything_is_written(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match=r"has no config.json: give a Hugging Face folder"):
        eval_generation.run(["nowhere", f"--prompts={prompts}", f"--scorer={tmp_path}"])
