"""The nll of text behind masks: that of transformers' forward over the very inputs; and the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from card_megatron.cli import main
from card_megatron.config.errors import ConfigError
from card_megatron.data.tokenizers import BytesTokenizer
from card_megatron.decoding.hf_backend import HFBackend
from card_megatron.decoding.model import OpenModel
from card_megatron.evaluation.compare import Comparison
from card_megatron.evaluation.denoising import cut, measure, spread
from card_megatron.evaluation.texts import TextSet
from tests.evaluation import bytes_llama
from tests.scoring import trained_model

TEXTS = TextSet("tales", Path("tales"), ["Once upon a time there was a fox.", "short", "The end of it, and no other."])


@pytest.fixture(scope="module")
def llama():
    return bytes_llama()


@pytest.fixture(scope="module")
def model(llama) -> OpenModel:
    return OpenModel(HFBackend(llama), BytesTokenizer(), "card", Path("nowhere"))


def by_definition(llama, tokenizer, window: int, depth: int) -> list[list[float]]:
    """nll of each hidden token of each window, one whole forward each."""
    found = []
    for document in TEXTS.documents:
        row = [tokenizer.eod, *document.encode()]
        for start in range(0, len(row) - window + 1, window):
            part = row[start : start + window]
            nlls = []
            for place in range(window - depth, window):
                hidden = [tokenizer.mask] * (place - (window - depth))
                inputs = torch.tensor([part[: window - depth] + hidden])
                logits = llama(inputs).logits[0, -1].double()
                nlls.append(-float(logits.log_softmax(-1)[part[place]]))
            found.append(nlls)
    return found


@pytest.mark.parametrize(("window", "depth"), [(12, 4), (16, 1), (9, 8)])
def test_nll_by_depth_is_that_of_whole_forwards_over_masks(model, llama, window, depth):
    expected = by_definition(llama, model.tokenizer, window, depth)
    found = measure(model, TEXTS, depth=depth, samples=100, window=window)
    assert found.samples == len(expected) > 1 and found.window == window
    columns = [torch.tensor(column) for column in zip(*expected, strict=True)]
    assert found.nll == pytest.approx([float(column.mean()) for column in columns], abs=1e-5)
    errors = [float(column.std()) / math.sqrt(len(expected)) for column in columns]
    assert found.nll_stderr == pytest.approx(errors, abs=1e-5)


def test_windows_lie_side_by_side_and_samples_are_spread(model):
    pairs = cut([list(range(10)), list(range(3))], window=4, depth=1)
    assert pairs == [([0, 1, 2], [3]), ([4, 5, 6], [7])]
    assert spread([([n], [n]) for n in range(10)], 4) == [([n], [n]) for n in (0, 2, 5, 7)]
    assert spread(pairs, 5) == pairs
    assert measure(model, TEXTS, depth=2, samples=1, window=8).nll_stderr == [None, None]


def test_what_cannot_be_measured_is_refused(model):
    with pytest.raises(ConfigError, match="leaves no context in a window of 8"):
        measure(model, TEXTS, depth=8, samples=4, window=8)
    with pytest.raises(ConfigError, match="no document of 32 tokens"):
        measure(model, replace(TEXTS, documents=["short"]), depth=2, samples=4)
    with pytest.raises(ConfigError, match="objective mdlm"):
        measure(replace(model, objective="mdlm"), TEXTS, depth=2, samples=4)


def test_the_command_gives_a_checkpoint_s_numbers_to_the_comparison(corpus, tmp_path, capsys):
    run, exported = trained_model(corpus, tmp_path)
    output = tmp_path / "denoising.json"
    (tmp_path / "docs.txt").write_text("The value of the name is a string, not a list of names. " * 8)
    data = f"docs={tmp_path / 'docs.txt'}"
    main(
        ["eval", "denoising", str(run), str(exported), "--data", data, "--depth=4", "--window=24", f"--output={output}"]
    )
    assert "nll behind 1 mask |" in capsys.readouterr().out
    results = json.loads(output.read_text())["results"]
    assert results[0]["nll"] == pytest.approx(results[1]["nll"], abs=1e-4)
    assert len(results[0]["nll"]) == 4 and output.with_suffix(".md").is_file()
    main(["eval", "denoising", str(run), "--data", data, "--depth=4", "--window=24", f"--output={output}"])
    comparison = Comparison()
    comparison.add(str(output))
    assert comparison.rows[0].cells["docs nll behind 2 masks"].value == pytest.approx(results[0]["nll"][2])
