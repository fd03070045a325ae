"""Learning is real: a tiny CARD model, against what token counts alone can do on the same text."""

from __future__ import annotations

import math

import pytest

from card_megatron.config import load_config
from card_megatron.data import ngrams, python_docs
from card_megatron.data.preprocess import build_indexed
from card_megatron.data.tokenizer_training import train_sentencepiece
from card_megatron.data.tokenizers import load_tokenizer
from card_megatron.platform import Ranks
from card_megatron.training.run import train_run

STEPS = 600
"""Of 1,024 tokens each: the whole token budget."""


@pytest.mark.timeout(600)
def test_card_reaches_half_of_a_unigram_models_perplexity(tmp_path):
    texts = dict(zip(("train", "valid"), python_docs.train_and_validation(python_docs.python_documents()), strict=True))
    tokenizer = load_tokenizer(train_sentencepiece(texts["train"], tmp_path / "tokenizer.model", vocab_size=2048))
    for name, documents in texts.items():
        build_indexed(documents, tokenizer, tmp_path / name)
    config, _ = load_config(
        [
            *("--preset=tiny", f"--train.train_iters={STEPS}", "--eval.interval=0", "--eval.at_start=false"),
            *(f"--data.tokenizer={tokenizer.path}", f"--data.train={tmp_path / 'train'}", "--data.num_workers=1"),
            *(f"--data.validation.docs=[{tmp_path / 'valid'}]", f"--run_dir={tmp_path / 'run'}"),
        ]
    )
    summary = train_run(config, Ranks(), console=False)
    unigram = ngrams.unigram_nll(*(ngrams.all_tokens(str(tmp_path / name)) for name in texts), tokenizer.vocab_size)
    assert summary["validation_after"]["docs"]["clean_perplexity"] <= math.exp(unigram) / 2
