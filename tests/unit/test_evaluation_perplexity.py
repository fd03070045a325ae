"""Perplexity against a twin that runs transformers token by token, and windows that leave nothing out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from card_megatron.commands import eval_perplexity
from card_megatron.config.errors import ConfigError
from card_megatron.data.tokenizers import BytesTokenizer
from card_megatron.decoding.hf_backend import HFBackend
from card_megatron.decoding.model import OpenModel
from card_megatron.evaluation import perplexity
from card_megatron.evaluation.perplexity import measure, table_rows, windows
from card_megatron.evaluation.report import markdown_table, perplexity_of, ratio_error, shown
from card_megatron.evaluation.texts import PAPER, TextSet, preset_paths, read_set
from tests.evaluation import bytes_llama

DOCUMENTS = ["The owl and the pussycat went to sea in a boat.", "Ünïcode, too.", "a"]


@pytest.fixture(scope="module")
def llama():
    return bytes_llama()


@pytest.fixture
def model(llama) -> OpenModel:
    return OpenModel(HFBackend(llama), BytesTokenizer(), "card", Path("model"))


@given(length=st.integers(1, 200), window=st.integers(1, 40), data=st.data())
def test_windows_score_every_token_once_with_the_context_that_is_promised(length, window, data):
    stride = data.draw(st.integers(1, window))
    spans = list(windows(length, window, stride))
    assert [token for span in spans for token in range(span.first, span.stop)] == list(range(1, length))
    for span in spans:
        assert span.stop - 1 - span.start <= window  # inputs: the last token is only predicted
        for token in range(span.first, span.stop):
            assert token - span.start >= min(token, window - stride)


def slow_nll(llama, ids: list[int], window: int, stride: int) -> float:
    """The definition: one whole forward for every token, over the inputs that its window has before it."""
    row, total, start = [256, *ids], 0.0, 0
    for token in range(1, len(row)):
        if token > window:  # a window begins after every `stride` tokens behind the first window
            last = min(len(row), window + 1 + ((token - window - 1) // stride + 1) * stride)
            start = last - 1 - window
        logits = llama(input_ids=torch.tensor([row[start:token]])).logits[0, -1]
        total -= float(logits.log_softmax(0)[row[token]])
    return total


@pytest.mark.parametrize(("window", "stride"), [(32, 16), (8, 3), (5, 5), (1, 1)])
def test_perplexity_is_that_of_whole_forwards_token_by_token(model, llama, window, stride):
    found = measure(model, TextSet("poem", Path("poem.jsonl"), DOCUMENTS), window=window, stride=stride)
    nlls = [slow_nll(llama, list(text.encode()), window, stride) for text in DOCUMENTS]
    sizes = [len(text.encode()) for text in DOCUMENTS]
    assert found.tokens == found.bytes == sum(sizes)
    assert (found.words, found.documents, found.how) == (11 + 2 + 1, 3, "exact")
    assert found.nll == pytest.approx(sum(nlls), rel=1e-5)
    assert found.token_perplexity == found.byte_perplexity == pytest.approx(math.exp(sum(nlls) / sum(sizes)), rel=1e-5)
    assert found.word_perplexity == pytest.approx(math.exp(sum(nlls) / 14), rel=1e-4)


def test_documents_do_not_see_each_other_and_groups_change_nothing(model, monkeypatch):
    together = measure(model, TextSet("s", Path("s"), DOCUMENTS))
    alone = [measure(model, TextSet("s", Path("s"), [text])) for text in DOCUMENTS]
    assert together.nll == pytest.approx(sum(one.nll for one in alone), rel=1e-6)
    assert alone[0].token_perplexity_stderr is None
    told = []
    monkeypatch.setattr(perplexity, "TOKENS_AT_ONCE", 1)
    grouped = measure(model, TextSet("s", Path("s"), DOCUMENTS), progress=lambda *share: told.append(share))
    assert grouped.nll == pytest.approx(together.nll, rel=1e-6)
    assert told == sorted(told) and told[-1] == (together.bytes, together.bytes)


def test_the_standard_error_is_that_of_the_ratio():
    assert ratio_error([3.0], [2]) is None
    assert ratio_error([2.0, 4.0], [1, 2]) == 0  # the same mean in both
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 30, (4000, 40))
    totals = (rng.normal(2, 1, sizes.shape) * sizes).astype(float)
    spread = (totals.sum(1) / sizes.sum(1)).std()
    assert np.mean([ratio_error(*row) for row in zip(totals[:200].tolist(), sizes[:200].tolist(), strict=True)]) == (
        pytest.approx(spread, rel=0.05)
    )
    assert perplexity_of([0.0, 0.0], [1, 5]) == (1.0, 0.0)
    assert perplexity_of([1e9, 0.0], [1, 1]) == (math.inf, None)


def test_bad_windows_and_objectives_are_refused(model, llama):
    texts = TextSet("s", Path("s"), ["text"])
    with pytest.raises(ConfigError, match=r"--window=33 must lie in \[1, 32\]"):
        measure(model, texts, window=33)
    with pytest.raises(ConfigError, match=r"--stride=9 must lie in \[1, 8\]"):
        measure(model, texts, window=8, stride=9)
    with pytest.raises(ConfigError, match="objective 'other', which has no likelihood here"):
        measure(OpenModel(model.backend, model.tokenizer, "other", Path("m")), texts)


def test_a_bound_is_no_exact_number_in_the_table(model):
    exact = {"model": "card", **measure(model, TextSet("s", Path("s"), DOCUMENTS)).record()}
    assert (exact["likelihood"], exact["samples"], exact["nll_sampling_error"]) == ("exact", None, None)
    header, (row,) = table_rows([exact])
    assert not any("≤" in cell for cell in row) and not any("samples" in name for name in header)
    bound = exact | {"how": "ELBO, 8 samples", "likelihood": "bound", "samples": 8, "nll_sampling_error": 3.0}
    header, rows = table_rows([exact, bound])
    by_name = [dict(zip(header, row, strict=True)) for row in rows]
    for unit in ("token", "word", "byte"):
        assert by_name[1][f"{unit} ppl"] == "≤ " + by_name[0][f"{unit} ppl"]
    error = exact["token_perplexity"] * 3.0 / exact["tokens"]
    assert [cells["± of token ppl by samples"] for cells in by_name] == ["—", shown(error)]


# ---------------------------------------------------------------- files


def test_documents_by_the_file_s_ending(tmp_path):
    (tmp_path / "lines.jsonl").write_text('{"text": "one\\ntwo"}\n\n{"text": "three", "more": 1}\n{"text": " "}\n')
    (tmp_path / "plain.txt").write_text("one\ntwo\n")
    (tmp_path / "wiki.test.raw").write_text(" = One = \n two \n")
    (tmp_path / "news.tokens").write_text("A sentence .\nAnother .\n\n")
    read = {path.name: list(read_set("s", path).documents) for path in tmp_path.iterdir()}
    assert read == {
        "lines.jsonl": ["one\ntwo", "three"],
        "plain.txt": ["one\ntwo\n"],
        "wiki.test.raw": [" = One = \n two \n"],
        "news.tokens": ["A sentence .", "Another ."],
    }
    assert read_set("s", tmp_path / "lines.jsonl", limit=1).documents == ["one\ntwo"]


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.jsonl", '{"text": "x"}\n{"txt": "y"}\n', "line 2: no 'text' field"),
        ("a.jsonl", "{", "line 1: broken JSON"),
        ("a.txt", "  \n", "has no text"),
        ("a.tokens", "", "has no text"),
        (None, None, "no such file"),
    ],
)
def test_what_is_no_document_is_refused(tmp_path, name, content, fault):
    if name is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=fault):
        read_set("s", tmp_path / (name or "missing.txt"))


def test_the_paper_s_eight_are_all_named(tmp_path):
    assert len(PAPER) == 8
    with pytest.raises(ConfigError, match=r"none of its files is below .*wiki.test.raw.*lambada_test.jsonl"):
        preset_paths("paper", tmp_path)
    (tmp_path / "ptb").mkdir()
    (tmp_path / PAPER["ptb"]).write_text("no it was n't black monday\n")
    there, missing = preset_paths("paper", tmp_path)
    assert list(there) == ["ptb"] and len(missing) == 7


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def exported(llama, tmp_path_factory) -> Path:
    """The same model as a folder; bytes need no tokenizer file."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    llama.save_pretrained(folder)
    return folder


def test_the_command_writes_a_table_and_json_and_goes_on_where_it_was(exported, tmp_path, capsys, monkeypatch):
    for name, place in list(PAPER.items())[:2]:
        path = tmp_path / "sets" / place
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"text": f"a text of {name}"}) + "\n")
    arguments = [str(exported), "--tokenizer=bytes", "--preset=paper", f"--data-dir={tmp_path / 'sets'}"]
    arguments += [f"--output={tmp_path / 'out.json'}", "--stride=8"]

    measured, scored = [], perplexity.measure

    def killed_at_the_second(model, texts, **more):
        measured.append(texts.name)
        if len(measured) == 2:
            raise TimeoutError
        return scored(model, texts, **more)

    monkeypatch.setattr(perplexity, "measure", killed_at_the_second)
    with pytest.raises(TimeoutError):
        eval_perplexity.run(arguments)
    eval_perplexity.run(arguments)
    assert measured == ["wikitext", "openwebtext", "openwebtext"]
    written = json.loads((tmp_path / "out.json").read_text())
    assert [result["set"] for result in written["results"]] == ["wikitext", "openwebtext"]
    assert {(result["how"], result["window"], result["stride"]) for result in written["results"]} == {("exact", 32, 8)}
    assert len(written["missing"]) == 6
    said = capsys.readouterr().out
    assert "missing: lambada" in said and said.count("| exact |") == 2
    assert (tmp_path / "out.md").read_text() == said[said.index("| set") :]
    assert not list(tmp_path.glob("*.unfinished"))
    measured[:] = ["before"] * 3
    eval_perplexity.run([argument.replace("--stride=8", "--stride=9") for argument in arguments])
    assert len(measured) == 3 + 2  # another question


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ([], "no set is given"),
        (["--data", "=x"], "is not NAME=PATH"),
        (["--data", "a=x", "a=y"], "names a twice"),
        (["--preset=paper"], "needs --data-dir"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_opened(options, fault):
    with pytest.raises(ConfigError, match=fault):
        eval_perplexity.run(["nowhere", *options])


def test_a_file_that_is_something_else_is_not_overwritten(exported, tmp_path):
    (tmp_path / "out.json").write_text('{"results": {}}')
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match="holds no perplexities"):
        eval_perplexity.run([str(exported), f"--data=a={tmp_path / 'a.txt'}", f"--output={tmp_path / 'out.json'}"])


def test_tables():
    assert markdown_table(["name", "n"], [["a|b", "1"], ["c", "22"]]) == (
        "| name |   n |\n| ---- | --: |\n| a\\|b |   1 |\n| c    |  22 |\n"
    )
    numbers = [(12.3456,), (1234.5, 3.25), (0.01234,), (None,), (float("inf"),), (0.5, 0.1, 2)]
    assert [shown(*number) for number in numbers] == ["12.35", "1,234 ± 3", "0.01234", "—", "—", "0.50 ± 0.10"]
