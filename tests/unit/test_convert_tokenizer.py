"""Exported tokenizers give our ids, in transformers and in `tokenizers`, whatever the text and the model type."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from card_megatron.config import ConfigError
from card_megatron.convert.character_map import character_map, entries
from card_megatron.convert.tokenizer import ODD_TEXTS, encoding_differences, export_tokenizer, fast_backend, is_tie
from card_megatron.data.python_docs import python_documents
from card_megatron.data.tokenizer_training import add_mask, train_sentencepiece
from card_megatron.data.tokenizers import MockTokenizer, encode, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

SENTENCEPIECE = {
    # as Llama 2's
    "llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "character_coverage": 0.9995,
    },
    # as T5's: SentencePiece's own defaults
    "t5": {"model_type": "unigram", "character_coverage": 0.9995},
    "folded": {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc_cf"},
    # as Gemma's: symbols of several characters
    "symbols": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["\n", "\n\n", "\n\n\n", "<sep>", "\t"],
    },
    "prefixed_symbol": {"model_type": "bpe", "byte_fallback": True, "user_defined_symbols": ["|", "e"]},
    "unigram_symbols": {
        "model_type": "unigram",
        "byte_fallback": True,
        "normalization_rule_name": "nfkc",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<sep>", "||"],
    },
}
OURS = ["bpe", "unigram", "poor_unigram", "json", "gpt2", "bytes"]
KINDS = [*OURS, *SENTENCEPIECE]
EXACT = [kind for kind in KINDS if kind not in ("t5", "unigram_symbols")]
"""Those without ties that fp32's rounding decides."""


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return [document[:1500] for document in python_documents()[:120]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory, documents) -> dict[str, Path | str]:
    """One tokenizer of each kind: the file that load_tokenizer reads."""
    folder = tmp_path_factory.mktemp("sources")
    texts = [*documents, *ODD_TEXTS]
    for kind in ("bpe", "unigram"):
        train_sentencepiece(texts, folder / f"{kind}.model", 900, kind)
    # knows too few characters to write its own control pieces
    train_sentencepiece(["the cat sat on the mat and then the hat"] * 50, folder / "poor_unigram.model", 276, "unigram")
    for kind, options in SENTENCEPIECE.items():
        train_as_others(texts, folder / f"{kind}.model", **options)
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, 600, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save_model(str(folder))
    add_mask(folder, folder / "gpt2.json")
    with_template(texts, folder / "json.json")
    files = {kind: next(folder.glob(f"{kind}.*")) for kind in KINDS if kind != "bytes"}
    return {**files, "bytes": "bytes"}


def train_as_others(texts, path: Path, **options) -> None:
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in texts for line in text.replace("\0", "").splitlines()),
            model_writer=file,
            vocab_size=1000,
            hard_vocab_limit=False,
            control_symbols=["[MASK]"],
            minloglevel=2,
            **options,
        )


def with_template(texts, path: Path) -> None:
    """A tokenizer.json as BERT-like models have it: [CLS] A [SEP], a mask that eats spaces, added words."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["[CLS]", "[SEP]", "[PAD]", "[UNK]"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens(["  ", "    ", "\n\n"])
    backend.add_special_tokens([tokenizers.AddedToken("[MASK]", lstrip=True), "[unused0]"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    backend.enable_truncation(5)
    backend.enable_padding(length=7)
    backend.save(str(path))


@pytest.fixture(scope="module")
def folders(tmp_path_factory, sources) -> dict[str, Path]:
    """The exports, each with a Llama's config.json."""
    return {kind: export(kind, sources, tmp_path_factory.mktemp(kind), "llama") for kind in KINDS}


def export(kind: str, sources, folder: Path, model_type: str) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "transformers_version": "5.23.0"}))
    export_tokenizer(load_tokenizer(sources[kind]), folder, model_max_length=2048)
    return folder


def strings(letters: str, count: int, seed: int) -> list[str]:
    """Random strings and repetitions from a few letters, where ways to cut a text compete."""
    draw = random.Random(seed)

    def word(longest: int) -> str:
        return "".join(draw.choice(letters) for _ in range(draw.randint(1, longest)))

    return [word(30) for _ in range(count // 2)] + [
        "".join(word(3) * draw.randint(1, 7) for _ in range(draw.randint(1, 4))) for _ in range(count // 2)
    ]


# ---------------------------------------------------------------- the same ids


@pytest.mark.parametrize("kind", KINDS)
def test_odd_texts_have_the_same_ids_and_come_back(kind, sources, folders):
    assert encoding_differences(load_tokenizer(sources[kind]), folders[kind]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_real_texts_have_the_same_ids(kind, sources, folders, documents):
    assert encoding_differences(load_tokenizer(sources[kind]), folders[kind], documents) == []


@pytest.mark.parametrize("kind", EXACT)
def test_texts_of_few_letters_have_the_same_ids(kind, sources, folders):
    """Without any allowance for ties."""
    tokenizer, texts = load_tokenizer(sources[kind]), [*strings("ab", 2000, 0), *strings("the \n=|-_", 4000, 1)]
    theirs = transformers.AutoTokenizer.from_pretrained(str(folders[kind]))(texts, verbose=False)["input_ids"]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == theirs


def test_merges_agree_where_pieces_repeat_themselves(tmp_path):
    """A BPE model of periodic pieces: the leftmost way to a piece against the order of merges."""
    train_as_others(strings("ab", 2000, 2), tmp_path / "periodic.model", **SENTENCEPIECE["llama"])
    tokenizer, texts = load_tokenizer(tmp_path / "periodic.model"), strings("ab", 10_000, 3)
    theirs = fast_backend(tokenizer).encode_batch_fast(texts)
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [encoding.ids for encoding in theirs]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text(st.characters(exclude_categories=["Cs"], max_codepoint=0x1FFFF)))
def test_any_text_has_the_same_ids(sources, backends, text):
    for kind, (tokenizer, backend) in backends.items():
        ours, theirs = encode(tokenizer, text), backend.encode(text).ids
        assert ours == theirs or (kind not in EXACT and is_tie(tokenizer, ours, theirs)), kind


@pytest.fixture(scope="module")
def backends(sources, folders):
    loaded = {kind: tokenizers.Tokenizer.from_file(str(folders[kind] / "tokenizer.json")) for kind in KINDS}
    for backend in loaded.values():
        backend.encode_special_tokens = True
    return {kind: (load_tokenizer(sources[kind]), backend) for kind, backend in loaded.items()}


@pytest.mark.parametrize("kind", ["t5", "unigram_symbols"])
def test_combining_characters_are_normalised_as_sentencepiece_does(kind, sources):
    """Sequences that the map has, that it does not have, in any order, and with letters that are composed already."""
    from sentencepiece import sentencepiece_model_pb2 as protocol

    model = protocol.ModelProto.FromString(sources[kind].read_bytes())
    for rule in ("add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces"):
        setattr(model.normalizer_spec, rule, False)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    ours = tokenizers.normalizers.Sequence(character_map(model.normalizer_spec.precompiled_charsmap))
    # of scripts that every version of Unicode in use has
    table = sorted(key for key in entries(model.normalizer_spec.precompiled_charsmap) if max(key) < "\U00010000")
    draw = random.Random(4)
    marks = [*map(chr, range(0x300, 0x345)), "\u0653", "\u093c", "\u1161", "\u11a8", "\u3099", "\uff9e", "\u0344"]
    for _ in range(2500):
        parts = (
            draw.choice(draw.choice([table, marks, "aeiou \r\n", "êếôä가각ªﬁ"])) for _ in range(draw.randint(1, 8))
        )
        text = "".join(parts)
        assert ours.normalize_str(text) == reference.normalize(text), ascii(text)


# ---------------------------------------------------------------- in transformers


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", ["bpe", "t5", "json", "bytes"])
def test_no_model_type_changes_the_tokenizer(kind, model_type, sources, tmp_path):
    folder = export(kind, sources, tmp_path, model_type)
    assert encoding_differences(load_tokenizer(sources[kind]), folder) == []


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_their_ids_and_no_text_spells_them(kind, sources, folders, tmp_path):
    ours = load_tokenizer(sources[kind])
    theirs = transformers.AutoTokenizer.from_pretrained(str(folders[kind]))
    for tokenizer in (theirs, saved_and_loaded(theirs, tmp_path)):
        assert tokenizer.is_fast and tokenizer.model_max_length == 2048
        assert (tokenizer.mask_token, tokenizer.mask_token_id, tokenizer.eos_token_id) == (
            "[MASK]",
            ours.mask,
            ours.eod,
        )
        assert len(tokenizer) == ours.vocab_size == max(tokenizer.get_vocab().values()) + 1
        spelled = [f"a {name} b{name}" for name in (*tokenizer.all_special_tokens, "[MASK]", "</s>", "<0x41>")]
        assert tokenizer(spelled)["input_ids"] == [ids.tolist() for ids in ours.encode_batch(spelled)]
        assert (
            tokenizer.decode([ours.mask]) == "[MASK]" and tokenizer.decode([ours.mask], skip_special_tokens=True) == ""
        )


def saved_and_loaded(tokenizer, folder: Path):
    tokenizer.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def test_paddings_and_unknowns_are_named_where_they_exist_and_no_beginning(folders):
    names = {kind: special_tokens(folders[kind]) for kind in ("bpe", "json", "gpt2", "bytes")}
    assert names["bpe"] == {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    assert names["json"] == {"eos_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    assert names["gpt2"] == {"eos_token": "<|endoftext|>"}
    assert names["bytes"] == {"eos_token": "</s>", "pad_token": "<pad>"}


def special_tokens(folder: Path) -> dict[str, str]:
    tokens = transformers.AutoTokenizer.from_pretrained(str(folder)).special_tokens_map
    return {role: name for role, name in tokens.items() if role != "mask_token"}


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_a_tokenizer_of_ours(kind, sources, folders):
    before, after = load_tokenizer(sources[kind]), load_tokenizer(folders[kind])
    assert (before.mask, before.eod, before.vocab_size) == (after.mask, after.eod, after.vocab_size)
    texts = ODD_TEXTS if kind in EXACT else ODD_TEXTS[:14]  # runs of one character are ties
    for text in texts:
        assert encode(before, text) == encode(after, text)


# ---------------------------------------------------------------- what differs is seen


def test_changed_files_are_seen(sources, folders, tmp_path):
    def planted(kind: str, name: str, change) -> list[str]:
        folder = tmp_path / f"{kind}{name}{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folders[kind], folder)
        contents = json.loads((folder / name).read_text())
        change(contents)
        (folder / name).write_text(json.dumps(contents))
        return encoding_differences(load_tokenizer(sources[kind]), folder)

    lines = planted("bpe", "tokenizer.json", lambda file: file["model"]["merges"].reverse())
    assert any(line.startswith('transformers encodes "The quick brown') for line in lines)
    assert any(line.startswith('tokenizers encodes "The quick brown') and ", ours is [" in line for line in lines)
    assert all(len(line) < 300 for line in lines)
    assert planted(
        "t5", "tokenizer.json", lambda file: [piece.__setitem__(1, -99.0) for piece in file["model"]["vocab"][9:40]]
    )
    assert planted("llama", "tokenizer.json", lambda file: file.update(normalizer=None))
    assert planted("unigram", "tokenizer.json", lambda file: file["model"]["vocab"][4].__setitem__(1, 0.0))
    (first, *_) = planted("bpe", "tokenizer.json", lambda file: file["decoder"]["decoders"].pop(0))
    assert "decodes" in first
    lines = planted("json", "tokenizer_config.json", lambda file: file.update(split_special_tokens=False))
    assert lines and all(line.startswith("transformers encodes") for line in lines)
    lines = planted("json", "tokenizer_config.json", lambda file: file.update(mask_token="[unused0]"))
    assert lines[0].startswith("mask_token is ")


# ---------------------------------------------------------------- refusals


def test_what_a_tokenizer_json_cannot_say_is_refused(documents, tmp_path):
    for name, options, message in (
        ("word", {"model_type": "word"}, "a model that is neither BPE nor unigram"),
        ("suffix", {"model_type": "bpe", "treat_whitespace_as_suffix": True}, "whitespace as a suffix"),
        ("long", {"model_type": "bpe", "user_defined_symbols": ["<sep>"]}, "symbols such as '<sep>' besides a dummy"),
        (
            "mapped",
            {"model_type": "unigram", "user_defined_symbols": ["ﬁ"]},
            "'ﬁ', which its own normalisation changes",
        ),
    ):
        train_as_others(documents[:50], tmp_path / f"{name}.model", **options)
        with pytest.raises(ConfigError, match=rf"{name}\.model has .*{message}.*; train the tokenizer without it"):
            export_tokenizer(load_tokenizer(tmp_path / f"{name}.model"), tmp_path / name, model_max_length=8)
        assert not (tmp_path / name).exists()
    with pytest.raises(ConfigError, match=r"a mock tokenizer has no text"):
        export_tokenizer(MockTokenizer(99), tmp_path / "mock", model_max_length=8)
