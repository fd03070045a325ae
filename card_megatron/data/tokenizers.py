"""Tokenizers that have a [MASK]."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from card_megatron.config.errors import ConfigError

MASK_PIECE = "[MASK]"


class Tokenizer(Protocol):
    """What data preparation, training and decoding ask of a tokenizer."""

    vocab_size: int
    eod: int
    mask: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class SentencePieceTokenizer:
    """A SentencePiece model with a [MASK] piece; its </s> ends a document."""

    def __init__(self, path: str | Path):
        import sentencepiece

        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigError(f"tokenizer {self.path}: no such file; `card data tokenizer` trains one")
        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_file=str(self.path))
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"tokenizer {self.path} is not a SentencePiece model: {error}") from error
        self.vocab_size = self.processor.get_piece_size()
        self.mask = self.processor.piece_to_id(MASK_PIECE)
        if self.processor.id_to_piece(self.mask) != MASK_PIECE:
            raise ConfigError(
                f"tokenizer {self.path} has no {MASK_PIECE} piece, which CARD's noise needs; "
                "train one with `card data tokenizer`, which adds it"
            )
        self.eod = self.processor.eos_id()
        if self.eod < 0:
            raise ConfigError(
                f"tokenizer {self.path} has no </s> piece to end documents with; train it with eos_id set"
            )

    def encode(self, text: str) -> list[int]:
        return self.processor.encode(text)

    def decode(self, ids: list[int]) -> str:
        return self.processor.decode(ids)


class MockTokenizer:
    """Ids without text, for the mock dataset: the last two of the vocabulary are [MASK] and end of document."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.mask, self.eod = vocab_size - 2, vocab_size - 1

    def encode(self, text: str) -> list[int]:
        raise TypeError("the mock tokenizer has no text; set data.tokenizer")

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer that a file holds."""
    return SentencePieceTokenizer(path)


def train_sentencepiece(texts: Iterable[str], output: str | Path, vocab_size: int, threads: int = 2) -> Path:
    """Train a BPE with byte fallback, [MASK], <s>, </s> and <pad>; nothing is written unless it succeeds."""
    import sentencepiece

    output = Path(output)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=1.0,
            normalization_rule_name="identity",  # text comes back as it went in
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            user_defined_symbols=["\n"],  # SentencePiece trains on lines, and would never see a line's end
            control_symbols=[MASK_PIECE],  # a control symbol: no text can spell it
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            num_threads=threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigError(f"SentencePiece cannot train a vocabulary of {vocab_size}: {error}") from error
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(output.name + ".unfinished")
    unfinished.write_bytes(model.getvalue())
    unfinished.replace(output)
    return output


def _sentences(texts: Iterable[str], longest: int = 4000) -> Iterable[str]:
    """Lines, as SentencePiece wants them, cut where it would otherwise drop them silently."""
    for text in texts:
        for line in text.splitlines():
            for start in range(0, len(line), longest):
                yield line[start : start + longest]
