"""Datasets: epochs chained, blends stable, noise outside of the blend, every validation token once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from card_megatron.config import ConfigError
from card_megatron.data.datasets import EpochChain, ObjectiveDataset, build_clean_datasets
from card_megatron.data.loader import MicroBatchSampler
from card_megatron.data.ngrams import all_tokens, bigram_nll, unigram_nll
from card_megatron.data.preprocess import build_indexed, refuse_unusable, write_documents
from card_megatron.data.sources import read_all
from card_megatron.data.tokenizer_training import train_sentencepiece
from card_megatron.data.tokenizers import encode, load_tokenizer
from card_megatron.objectives import Arm, build_objective
from tests.curves import tiny_config

pytestmark = pytest.mark.usefixtures("one_rank")  # Megatron's blends ask for their rank


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return load_tokenizer(corpus / "tokenizer.model")


def clean_datasets(corpus, folder, tokenizer, *overrides):
    return build_clean_datasets(tiny_config(corpus, folder, *overrides), tokenizer)


def all_samples(dataset, count=None):
    return [dataset[index]["tokens"].tolist() for index in range(count or len(dataset))]


def noised(config, dataset, tokenizer, split="train"):
    objective = build_objective(config.objective, mask_id=tokenizer.mask, eod_id=tokenizer.eod)
    return ObjectiveDataset(dataset, objective, config.seed, split)


# ---------------------------------------------------------------- order


def test_an_epoch_is_every_sample_once_and_epochs_are_shuffled_differently(corpus, tmp_path, tokenizer):
    sources = f"--data.train=[{corpus}/first]"
    train = clean_datasets(corpus, tmp_path, tokenizer, sources, "--train.train_iters=400").train
    assert isinstance(train, EpochChain) and len(train.epochs) >= 2
    size = train.samples_per_epoch
    first, second = all_samples(train)[:size], all_samples(train)[size : 2 * size]
    assert first != second
    text = all_tokens(f"{corpus}/first")
    assert size == (len(text) - 1) // 32
    assert abs(sum(map(sum, first)) - sum(map(sum, second))) < 0.02 * sum(map(sum, first))


@pytest.mark.parametrize("weights", [("", ""), ("0.7 ", "0.3 ")])
def test_asking_for_more_samples_reorders_nothing(corpus, tmp_path, tokenizer, weights):
    entries = [f"{weight}{corpus}/{name}" for weight, name in zip(weights, ("first", "second"), strict=True)]
    sources = f"--data.train={entries}"
    short, long = (
        clean_datasets(corpus, tmp_path / steps, tokenizer, sources, f"--train.train_iters={steps}").train
        for steps in ("40", "900")
    )
    assert len(long) > 2.5 * len(short), "the longer run must reach into further epochs"
    assert all_samples(short, 320) == all_samples(long, 320)


def test_a_blend_keeps_its_weights(corpus, tmp_path, tokenizer):
    sources = f"--data.train=['3 {corpus}/first', '1 {corpus}/second']"
    train = clean_datasets(corpus, tmp_path, tokenizer, sources, "--train.train_iters=40").train
    share = np.mean([int(train[index]["dataset_id"]) == 0 for index in range(320)])
    assert share == pytest.approx(0.75, abs=0.01)


def test_without_weights_sources_blend_by_their_tokens(corpus, tmp_path, tokenizer):
    train = clean_datasets(corpus, tmp_path, tokenizer, "--train.train_iters=40").train
    sizes = [len(all_tokens(f"{corpus}/{name}")) for name in ("first", "second")]
    share = np.mean([int(train[index]["dataset_id"]) == 0 for index in range(320)])
    assert share == pytest.approx(sizes[0] / sum(sizes), abs=0.01)


# ---------------------------------------------------------------- noise


def test_two_sources_never_share_noise(corpus, tmp_path, tokenizer):
    config = tiny_config(corpus, tmp_path, f"--data.train=['1 {corpus}/first', '1 {corpus}/second']")
    dataset = noised(config, build_clean_datasets(config, tokenizer).train, tokenizer)
    masks = {tuple(torch.nonzero(dataset[index]["tokens"] == tokenizer.mask).flatten().tolist()) for index in range(60)}
    levels = {float(dataset[index]["t"]) for index in range(60)}
    assert len(levels) == 60 and len(masks) > 45


def test_a_new_epoch_is_new_noise_on_the_same_text(corpus, tmp_path, tokenizer):
    config = tiny_config(corpus, tmp_path, f"--data.train=[{corpus}/first]", "--train.train_iters=400")
    chain = build_clean_datasets(config, tokenizer).train
    dataset, size = noised(config, chain, tokenizer), chain.samples_per_epoch
    assert {float(dataset[index]["t"]) for index in range(size)}.isdisjoint(
        float(dataset[index]["t"]) for index in range(size, 2 * size)
    )


def test_only_inputs_are_noised_and_labels_are_the_next_tokens(corpus, tmp_path, tokenizer):
    config = tiny_config(corpus, tmp_path)
    clean = build_clean_datasets(config, tokenizer).train
    dataset = noised(config, clean, tokenizer)
    for index in range(40):
        sample, original = dataset[index], clean[index]
        masked = sample["tokens"] == tokenizer.mask
        assert masked.any() and not masked[0]
        assert torch.equal(sample["tokens"][~masked], original["tokens"][~masked])
        assert torch.equal(sample["labels"], original["labels"])
        assert torch.equal(sample["labels"][:-1], original["tokens"][1:])
        assert not (sample["labels"] == tokenizer.mask).any()


# ---------------------------------------------------------------- held-out text


def test_a_validation_set_scores_every_token_once(corpus, tmp_path, tokenizer):
    sets = f"--data.validation.second=[{corpus}/second]"
    valid = clean_datasets(corpus, tmp_path, tokenizer, sets).validation["second"]
    text = all_tokens(f"{corpus}/second")
    scored = sum(int((valid[index]["loss_mask"] != 0).sum()) for index in range(len(valid)))
    assert scored == len(text) - 1, "all but the first token have a context"


def test_padding_of_the_last_sample_is_neither_masked_nor_supervised(corpus, tmp_path, tokenizer):
    config = tiny_config(corpus, tmp_path, f"--data.validation.second=[{corpus}/second]")
    valid = build_clean_datasets(config, tokenizer).validation["second"]
    padded = [index for index in range(len(valid)) if (valid[index]["loss_mask"] == 0).any()]
    assert len(padded) == 1, "the corpus is meant not to fill its last sample"
    sample = noised(config, valid, tokenizer, "validation/second")[padded[0]]
    unsupervised = sample["supervised"] == 0
    assert (sample["weights"][unsupervised] == 0).all()
    assert not (sample["tokens"][unsupervised] == tokenizer.mask).any()


def test_end_of_document_is_supervised_and_never_masked(corpus, tmp_path, tokenizer):
    config = tiny_config(corpus, tmp_path)
    dataset = noised(config, build_clean_datasets(config, tokenizer).train, tokenizer)
    ends = 0
    for index in range(160):
        sample = dataset[index]
        is_end = sample["labels"] == tokenizer.eod
        ends += int(is_end.sum())
        assert (sample["weights"][is_end] > 0).all()
        assert (sample["supervised"] == 1).all()
    assert ends > 5


def test_splits_of_one_source_do_not_overlap(corpus, tmp_path, tokenizer):
    data = clean_datasets(
        corpus, tmp_path, tokenizer, f"--data.train=[{corpus}/first]", "--data.split=80,10,10", "--train.train_iters=1"
    )
    documents = [dataset.indices for dataset in (data.train, data.validation["valid"], data.test["test"])]
    assert sum(map(len, documents)) == len(set(np.concatenate(documents).tolist())) == 150


def test_several_validation_sets_by_name(corpus, tmp_path, tokenizer):
    sets = [f"--data.validation.a=[{corpus}/first]", f"--data.validation.b=[{corpus}/second]"]
    data = clean_datasets(corpus, tmp_path, tokenizer, *sets)
    assert list(data.validation) == ["a", "b"] and data.test == {}


def test_mock_data_needs_no_files_and_never_holds_mask(tmp_path):
    from card_megatron.config import load_config
    from card_megatron.data.tokenizers import MockTokenizer

    config, _ = load_config(
        [
            "--preset=tiny",
            "--data.mock=true",
            "--model.vocab_size=300",
            "--train.train_iters=3",
            f"--run_dir={tmp_path}",
        ]
    )
    tokenizer = MockTokenizer(300)
    train = build_clean_datasets(config, tokenizer).train
    tokens = torch.cat([train[index]["tokens"] for index in range(96)])
    assert tokens.max() <= tokenizer.eod and not (tokens == tokenizer.mask).any()


# ---------------------------------------------------------------- refusals


def test_missing_files_and_too_little_text_are_named(corpus, tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"nowhere\.bin: no such file.*card data build"):
        refuse_unusable(tiny_config(corpus, tmp_path, "--data.train=[nowhere]").data, tokenizer)
    build_indexed(["short"], tokenizer, tmp_path / "short")
    with pytest.raises(ConfigError, match=r"shorter than one sample of data\.sequence_length=32"):
        clean_datasets(corpus, tmp_path, tokenizer, f"--data.train=[{tmp_path}/short]")


# ---------------------------------------------------------------- text and tokens


def test_built_files_hold_the_documents(corpus, tmp_path, tokenizer):
    path = write_documents(tmp_path / "two.jsonl", ["one document", "another\none"])
    built = build_indexed(read_all([str(path)], "text", 99), tokenizer, tmp_path / "two")
    first, second = encode(tokenizer, "one document"), encode(tokenizer, "another\none")
    expected = [*first, tokenizer.eod, *second, tokenizer.eod]
    assert all_tokens(str(tmp_path / "two")).tolist() == expected
    assert (built.documents, built.tokens) == (2, len(expected))
    assert not list(tmp_path.glob("*unfinished*"))


def test_a_vocabulary_that_cannot_be_trained_leaves_no_file(tmp_path):
    with pytest.raises(ConfigError, match="SentencePiece cannot train a vocabulary of 5000"):
        train_sentencepiece(["too little text"], tmp_path / "t.model", 5000)
    assert not list(tmp_path.iterdir())


def test_ngrams_against_counting_by_hand():
    train, held_out = np.array([0, 1, 0, 1, 0]), np.array([1, 0, 1])
    unigram = {0: 4 / 7, 1: 3 / 7}  # two further tokens of the vocabulary: 3+1, 2+1 of 5+2
    assert unigram_nll(train, held_out, 2) == pytest.approx(-np.mean(np.log([unigram[0], unigram[1]])))
    bigram = [(2 + 1 * unigram[0]) / (2 + 1), (2 + 1 * unigram[1]) / (2 + 1)]
    assert bigram_nll(train, held_out, 2, prior=1.0) == pytest.approx(-np.mean(np.log(bigram)))


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize(("rows", "replicas"), [(1, 1), (4, 1), (2, 2), (1, 4), (3, 2)])
def test_micro_batches_of_all_replicas_are_the_samples_in_order(rows, replicas):
    per_rank = [list(MicroBatchSampler(24, 72, rows, rank, replicas)) for rank in range(replicas)]
    together = [index for batches in zip(*per_rank, strict=True) for batch in batches for index in batch]
    assert together == list(range(24, 72))


def test_a_last_batch_is_filled_with_rows_that_count_for_nothing(corpus, tmp_path, tokenizer):
    batches = list(MicroBatchSampler(0, 5, 2, rank=1, replicas=2, fill_to=4))
    assert batches == [[2, 3], [None, None], [None, None], [None, None]]
    config = tiny_config(corpus, tmp_path)
    dataset = noised(config, build_clean_datasets(config, tokenizer).train, tokenizer)
    filler = dataset[None]
    assert filler["weights"].sum() == filler["supervised"].sum() == 0 and filler["index"] == -1


def test_arm_leaves_samples_alone(corpus, tmp_path, tokenizer):
    config = tiny_config(corpus, tmp_path, "--objective.name=arm")
    clean = build_clean_datasets(config, tokenizer).train
    dataset = noised(config, clean, tokenizer)
    assert isinstance(dataset.objective, Arm)
    assert all(torch.equal(dataset[index]["tokens"], clean[index]["tokens"]) for index in range(20))
    assert all((dataset[index]["weights"] == 1).all() for index in range(20))
