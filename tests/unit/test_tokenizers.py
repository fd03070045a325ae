"""Tokenizers: text comes back, none can spell [MASK] or end of document, [MASK] is added without any other change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from card_megatron.cli import main as card
from card_megatron.config import ConfigError
from card_megatron.data.python_docs import python_documents
from card_megatron.data.tokenizer_training import add_mask, train_sentencepiece
from card_megatron.data.tokenizers import BytesTokenizer, encode, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")

ODD = [
    "def f(x):\n    return x  # two  spaces\n",
    "Grüße, 世界! 🙂 \U0001f469\u200d\U0001f4bb é e\u0301",
    " leading, trailing \t\r\n\n ",
    "[MASK] </s> <s> <pad> <unk> <|endoftext|> [SEP] [MASK",
    "\x01\x7f\u00a0\ufeff\ufffd",
    "word" * 500,
]
KINDS = ["bpe.model", "unigram.model", "tokenizer.json", "gpt2.json", "bytes"]
WITHOUT_MASK = ["plain.model", "plain.json", "gpt2"]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [text[:500] for text in python_documents()[:150]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, texts) -> Path:
    """One tokenizer of each kind, with and without [MASK]."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for kind in ("bpe", "unigram"):
        train_sentencepiece(texts, folder / f"{kind}.model", 450, kind)
    with (folder / "plain.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=file, vocab_size=300, minloglevel=2, model_type="bpe"
        )
    byte_level_json(texts, ["</s>", "[MASK]"], folder / "tokenizer.json")
    byte_level_json(texts, ["</s>"], folder / "plain.json")
    (folder / "gpt2").mkdir()
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, 400, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save_model(str(folder / "gpt2"))
    add_mask(folder / "gpt2", folder / "gpt2.json")
    return folder


def byte_level_json(texts, special: list[str], path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.enable_truncation(5)  # files that people publish have such settings: documents are whole all the same
    backend.enable_padding(length=7)
    backend.save(str(path))


@pytest.fixture(params=KINDS)
def tokenizer(request, folder):
    return load_tokenizer("bytes" if request.param == "bytes" else folder / request.param)


# ---------------------------------------------------------------- text and ids


def test_odd_text_comes_back_and_spells_no_special_id(tokenizer):
    for text, ids in zip(ODD, tokenizer.encode_batch(ODD), strict=True):
        assert ids.dtype == np.int32 and ids.min() >= 0 and ids.max() < tokenizer.vocab_size
        assert tokenizer.decode(ids) == text
        assert not {tokenizer.mask, tokenizer.eod} & set(ids.tolist())
    assert tokenizer.mask != tokenizer.eod


# SentencePiece's sign for a space, and NUL, which no document may hold
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁\0"), min_size=1)


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.one_of(TEXT, st.sampled_from(["[MASK]", "</s>", "<|endoftext|>"])), min_size=1, max_size=4))
def test_any_text_comes_back_and_spells_no_special_id(folder, pieces):
    text = "".join(pieces)
    for name in KINDS:
        tokenizer = load_tokenizer("bytes" if name == "bytes" else folder / name)
        ids = encode(tokenizer, text)
        assert tokenizer.decode(ids) == text, name
        assert not {tokenizer.mask, tokenizer.eod} & set(ids), name


def test_a_batch_is_its_texts_one_by_one(tokenizer):
    for text, ids in zip(ODD, tokenizer.encode_batch(ODD), strict=True):
        assert encode(tokenizer, text) == ids.tolist()


def test_bytes_are_the_bytes():
    tokenizer = BytesTokenizer()
    assert encode(tokenizer, "aé") == [97, 195, 169] and tokenizer.vocab_size == 260
    assert tokenizer.decode([97, tokenizer.mask, tokenizer.eod, 98]) == "ab"


def test_a_folder_is_the_tokenizer_in_it(folder, tmp_path):
    for name in ("bpe.model", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
        assert encode(load_tokenizer(tmp_path), ODD[0]) == encode(load_tokenizer(folder / name), ODD[0])
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((folder / "gpt2" / name).read_bytes())
    assert load_tokenizer(tmp_path).fingerprint() == load_tokenizer(folder / "tokenizer.json").fingerprint()


# ---------------------------------------------------------------- adding [MASK]


@pytest.mark.parametrize("name", WITHOUT_MASK)
def test_add_mask_gives_one_more_id_and_changes_nothing_else(folder, tmp_path, texts, name, capsys):
    with pytest.raises(ConfigError, match=rf"has no \[MASK\].*`card data tokenizer add-mask {folder}/{name} OUTPUT`"):
        load_tokenizer(folder / name)
    output = tmp_path / ("out.model" if name.endswith("model") else "out.json")
    card(["data", "tokenizer", "add-mask", str(folder / name), str(output)])
    tokenizer = load_tokenizer(output)
    if name.endswith("model"):
        plain = sentencepiece.SentencePieceProcessor(model_file=str(folder / name))
        size, before = plain.get_piece_size(), plain.encode([*texts, *ODD])
        assert tokenizer.eod == plain.eos_id()
    else:
        if name == "gpt2":
            files = [str(folder / name / part) for part in ("vocab.json", "merges.txt")]
            plain = tokenizers.ByteLevelBPETokenizer(*files)
            plain._tokenizer.encode_special_tokens = True
        else:
            plain = tokenizers.Tokenizer.from_file(str(folder / name))
            plain.no_truncation()
            plain.no_padding()
            plain.encode_special_tokens = True
        size, before = plain.get_vocab_size(), [plain.encode(text).ids for text in [*texts, *ODD]]
    assert tokenizer.vocab_size == size + 1 and tokenizer.mask == size
    assert [ids.tolist() for ids in tokenizer.encode_batch([*texts, *ODD])] == before
    assert f"[MASK] is {size}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"has \[MASK\] already"):
        add_mask(output, tmp_path / f"again{output.suffix}")


def test_add_mask_of_a_folder_with_everything_copies_what_loading_would_read(folder, tmp_path):
    """GPT-2's two files beside a tokenizer.json hold the words, but not how text is split into them."""
    for source, name in (("plain.json", "tokenizer.json"), ("gpt2/vocab.json",) * 2, ("gpt2/merges.txt",) * 2):
        (tmp_path / Path(name).name).write_bytes((folder / source).read_bytes())
    made = load_tokenizer(add_mask(tmp_path, tmp_path / "out.json"))
    assert made.eod == load_tokenizer(add_mask(folder / "plain.json", tmp_path / "same.json")).eod
    assert made.fingerprint() == load_tokenizer(tmp_path / "same.json").fingerprint()


# ---------------------------------------------------------------- which tokenizer it is


def test_fingerprints_name_the_contents_and_not_the_place(folder, tmp_path):
    names = ["bpe.model", "unigram.model", "tokenizer.json", "gpt2.json"]
    prints = {load_tokenizer(folder / name).fingerprint() for name in names} | {BytesTokenizer().fingerprint()}
    assert len(prints) == 5
    copy = tmp_path / "copy.model"
    copy.write_bytes((folder / "bpe.model").read_bytes())
    assert load_tokenizer(copy).fingerprint() == load_tokenizer(folder / "bpe.model").fingerprint()
    copy.write_bytes((folder / "unigram.model").read_bytes())
    assert load_tokenizer(copy).fingerprint() == load_tokenizer(folder / "unigram.model").fingerprint()


# ---------------------------------------------------------------- refusals


def test_files_that_are_no_tokenizers_are_refused(folder, tmp_path):
    for name, message in (
        ("none.model", "no such file; `card data tokenizer train`"),
        ("bad.model", "is not a SentencePiece model"),
        ("bad.json", r"is no tokenizer\.json"),
        ("empty", r"no tokenizer\.json, no GPT-2 files .* and not one \.model"),
        ("bad_gpt2", "its files are not GPT-2's"),
    ):
        for part in ("bad.model", "bad.json", "bad_gpt2/vocab.json", "bad_gpt2/merges.txt", "empty/readme"):
            (tmp_path / part).parent.mkdir(exist_ok=True)
            (tmp_path / part).write_bytes(b"\x00{nonsense")
        with pytest.raises(ConfigError, match=message):
            load_tokenizer(tmp_path / name)
        with pytest.raises(ConfigError, match=message):
            add_mask(tmp_path / name, tmp_path / ("out.model" if name.endswith("model") else "out.json"))
    with pytest.raises(ConfigError, match=r"out\.model: a copy of .*plain\.json must end in \.json"):
        add_mask(folder / "plain.json", tmp_path / "out.model")
    assert not list(tmp_path.glob("out*"))


def test_a_mask_or_an_end_that_text_can_spell_is_refused(tmp_path, texts):
    with (tmp_path / "user.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=file,
            vocab_size=300,
            minloglevel=2,
            user_defined_symbols=["[MASK]"],
        )
    words = tokenizers.models.WordLevel({"[UNK]": 0, "[MASK]": 1, "[SEP]": 2, "a": 3}, "[UNK]")
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), ("b", -1.0), (" ", -1.0)]
    for name, model, special in (
        ("words", words, ["[MASK]", "[SEP]"]),
        ("unigram", tokenizers.models.Unigram(pieces, 0), ["</s>", "[MASK]"]),
    ):
        backend = tokenizers.Tokenizer(model)
        if name == "words":
            backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        backend.add_special_tokens(special)
        backend.save(str(tmp_path / f"{name}.json"))
    for name, piece in (("user.model", r"\[MASK\]"), ("words.json", r"\[MASK\]"), ("unigram.json", "</s>")):
        with pytest.raises(ConfigError, match=f"{name} takes {piece} written in a text for the token itself"):
            load_tokenizer(tmp_path / name)


def test_a_tokenizer_without_an_end_is_refused_and_add_mask_gives_it_one(texts, tmp_path):
    byte_level_json(texts, ["[MASK]"], tmp_path / "endless.json")
    with pytest.raises(ConfigError, match=r"endless\.json has none of <\|endoftext\|>, .* add one of them"):
        load_tokenizer(tmp_path / "endless.json")
    byte_level_json(texts, [], tmp_path / "neither.json")
    tokenizer = load_tokenizer(add_mask(tmp_path / "neither.json", tmp_path / "both.json"))
    assert (tokenizer.mask, tokenizer.eod) == (tokenizer.vocab_size - 2, tokenizer.vocab_size - 1)
