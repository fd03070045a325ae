"""Tokenizers that have a [MASK]: SentencePiece, tokenizer.json, GPT-2's two files, plain bytes.

All of them turn text into ids that no text can forge: "[MASK]" written in a document is text, not the token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from card_megatron.config.errors import ConfigError
from card_megatron.config.schema import RunConfig

MASK_PIECE = "[MASK]"
END_PIECES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
"""What ends a document, in the order of preference, where a tokenizer.json does not say it."""
PAD_PIECES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")
BYTES = "bytes"
"""The name of the tokenizer that needs no file."""
GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
"""A folder with either pair is a GPT-2 tokenizer: the names of transformers, and those of the original release."""


class Tokenizer(Protocol):
    """What data preparation, training and decoding ask of a tokenizer."""

    kind: str
    vocab_size: int
    eod: int
    mask: int
    pad: int | None
    """Fills up batches and never stands in a text; None where the tokenizer has none."""
    gaps: tuple[int, ...]
    """Ids below vocab_size that mean nothing."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, without any added at its ends."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def fingerprint(self) -> str:
        """Names the tokenizer: the same for two files that encode the same because they are the same."""
        ...


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of one text."""
    return tokenizer.encode_batch([text])[0].tolist()


class SentencePieceTokenizer:
    """A SentencePiece model with a [MASK] piece; its </s> ends a document."""

    kind = "sentencepiece"
    gaps: tuple[int, ...] = ()

    def __init__(self, path: Path):
        import sentencepiece

        self.path = path
        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"tokenizer {path} is not a SentencePiece model: {error}") from error
        self.vocab_size = self.processor.get_piece_size()
        self.mask = self.processor.piece_to_id(MASK_PIECE)
        if self.processor.id_to_piece(self.mask) != MASK_PIECE:
            raise lacks_mask(path)
        if not self.processor.is_control(self.mask):
            raise can_be_spelled(path, MASK_PIECE)
        self.eod = self.processor.eos_id()
        self.pad = self.processor.pad_id() if self.processor.pad_id() >= 0 else None
        if self.eod < 0:
            raise ConfigError(f"tokenizer {path} has no </s> piece to end documents with; train it with eos_id set")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, dtype=np.int32) for ids in self.processor.encode(list(texts), num_threads=1)]

    def decode(self, ids: Sequence[int]) -> str:
        return self.processor.decode([int(number) for number in ids])

    def fingerprint(self) -> str:
        return file_hash(self.path)


class HuggingFaceTokenizer:
    """A tokenizer.json with a [MASK] token, as the `tokenizers` library reads it; or GPT-2's files as one."""

    kind = "huggingface"

    def __init__(self, path: Path, backend: Any, sources: Sequence[Path]):
        self.path, self.backend, self.sources = path, backend, sources
        # special tokens that a document happens to spell are text
        self.backend.encode_special_tokens = True
        known = set(backend.get_vocab(with_added_tokens=True).values())
        self.vocab_size = max(known) + 1
        self.gaps = tuple(sorted(set(range(self.vocab_size)) - known))
        self.mask = backend.token_to_id(MASK_PIECE)
        if self.mask is None:
            raise lacks_mask(path)
        ends = [piece for piece in END_PIECES if backend.token_to_id(piece) is not None]
        if not ends:
            raise ConfigError(
                f"tokenizer {path} has none of {', '.join(END_PIECES)} to end documents with; add one of them"
            )
        self.eod = backend.token_to_id(ends[0])
        pads = [backend.token_to_id(piece) for piece in PAD_PIECES]
        self.pad = next((number for number in pads if number is not None and number != self.eod), None)
        for piece, number in ((MASK_PIECE, self.mask), (ends[0], self.eod)):
            if any(number in ids for ids in self.encode_batch([piece, f"a {piece} b", f"a{piece}b"])):
                raise can_be_spelled(path, piece)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode([int(number) for number in ids], skip_special_tokens=False)

    def fingerprint(self) -> str:
        return file_hash(*self.sources)


class BytesTokenizer:
    """The 256 bytes of UTF-8, and four more ids."""

    kind = BYTES
    gaps: tuple[int, ...] = ()
    eod, mask, bos = 256, 257, 258
    pad: int | None = 259
    vocab_size = 260

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(number for number in ids if number < 256).decode(errors="replace")

    def fingerprint(self) -> str:
        return BYTES


class MockTokenizer:
    """Ids without text, for the mock dataset: the last two of the vocabulary are [MASK] and end of document."""

    kind = "mock"
    pad: int | None = None
    gaps: tuple[int, ...] = ()

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.mask, self.eod = vocab_size - 2, vocab_size - 1

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        raise TypeError("the mock tokenizer has no text; set data.tokenizer")

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def fingerprint(self) -> str:
        return f"mock {self.vocab_size}"


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer that a .model, a tokenizer.json, a folder with either or with GPT-2's files, or `bytes` is."""
    if str(name) == BYTES:
        return BytesTokenizer()
    path = tokenizer_path(name)
    if path.is_dir():
        return HuggingFaceTokenizer(path, read_gpt2(path), gpt2_files(path))
    if path.suffix == ".json":
        return HuggingFaceTokenizer(path, read_huggingface(path), [path])
    return SentencePieceTokenizer(path)


def tokenizer_of(
    config: RunConfig, override: str | None = None, saved: dict[str, Any] | None = None
) -> Tokenizer | None:
    """The tokenizer of a run that was trained elsewhere, perhaps; None for one on mock data, or without any.

    `saved` are the facts in the checkpoint's manifest: a tokenizer with other ids is refused.
    """
    name = override or config.data.tokenizer
    if name is None:
        return None
    if name != BYTES and not Path(name).exists():
        raise ConfigError(f"tokenizer {name}, which the run was trained with, is not there; give its path: --tokenizer")
    tokenizer = load_tokenizer(name)
    if config.model.vocab_size is not None and tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"tokenizer {name} has {tokenizer.vocab_size} pieces and the model {config.model.vocab_size} rows; "
            "give the tokenizer that the model was trained with: --tokenizer"
        )
    if saved is not None:
        refuse_other_ids(facts_of(tokenizer), saved, str(name))
    return tokenizer


def never_text(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Ids of a model's vocabulary that stand in no text, beside [MASK]: padding, and those without a piece."""
    padding = () if tokenizer.pad is None else (tokenizer.pad,)
    return (*padding, *tokenizer.gaps, *range(tokenizer.vocab_size, vocab_size))


def facts_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a checkpoint remembers of its tokenizer."""
    return {
        "kind": tokenizer.kind,
        "sha256": tokenizer.fingerprint(),
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "mask": tokenizer.mask,
    }


def refuse_other_ids(ours: dict[str, Any], saved: dict[str, Any], name: str) -> None:
    """Raise where two tokenizers cannot be the same. Another file may still be: an export's encodes as its source."""
    wrong = [
        f"{key} {ours[key]} (was {saved[key]})"
        for key in ("vocab_size", "eod", "mask")
        if saved.get(key) is not None and ours[key] != saved[key]
    ]
    if not wrong and ours["kind"] == saved.get("kind") and ours["sha256"] != saved["sha256"]:
        wrong = [f"sha256 {ours['sha256'][:12]} (was {saved['sha256'][:12]})"]
    if wrong:
        raise ConfigError(
            f"{name}: not the tokenizer that the model was trained with: {', '.join(wrong)}; give the right one"
        )


def tokenizer_path(name: str | Path) -> Path:
    """The file that a name means: itself, or the one in a folder; a folder with GPT-2's files stays one."""
    path = Path(name)
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"tokenizer {path}: no such file; `card data tokenizer train` trains one")
    if (path / "tokenizer.json").is_file():
        return path / "tokenizer.json"
    if gpt2_files(path):
        return path
    models = sorted(path.glob("*.model"))
    if len(models) == 1:
        return models[0]
    raise ConfigError(
        f"tokenizer {path}: no tokenizer.json, no GPT-2 files (vocab.json and merges.txt) and not one .model in it"
    )


def gpt2_files(folder: Path) -> list[Path]:
    """The vocabulary and the merges of a GPT-2 tokenizer, or nothing."""
    pairs = ([folder / vocabulary, folder / merges] for vocabulary, merges in GPT2_FILES)
    return next((pair for pair in pairs if all(path.is_file() for path in pair)), [])


def read_gpt2(folder: Path) -> Any:
    """GPT-2's byte-level BPE from its two files, as a `tokenizers` tokenizer."""
    library = _tokenizers()
    vocabulary, merges = gpt2_files(folder)
    try:
        backend = library.Tokenizer(library.models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # the library raises a bare Exception
        raise ConfigError(f"tokenizer {folder}: its files are not GPT-2's: {error}") from error
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    backend.add_special_tokens([piece for piece in END_PIECES if backend.token_to_id(piece) is not None])
    return backend


def read_huggingface(path: Path) -> Any:
    """A tokenizer.json, without its truncation and padding: documents are whole."""
    library = _tokenizers()
    try:
        backend = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise ConfigError(f"tokenizer {path} is no tokenizer.json: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            "this tokenizer needs the tokenizers library: pip install -e '.[hf]' in the checkout"
        ) from error
    return tokenizers


def lacks_mask(path: Path) -> ConfigError:
    return ConfigError(
        f"tokenizer {path} has no {MASK_PIECE}, which CARD's noise needs; "
        f"`card data tokenizer add-mask {path} OUTPUT` makes one that has it"
    )


def can_be_spelled(path: Path, piece: str) -> ConfigError:
    return ConfigError(
        f"tokenizer {path} takes {piece} written in a text for the token itself; it must be a special token that no "
        "text can spell (a control symbol of SentencePiece, no word of the vocabulary): choose another tokenizer"
    )


def file_hash(*paths: Path) -> str:
    """SHA-256 of the contents of files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()
