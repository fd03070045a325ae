"""Making tokenizers: train a SentencePiece model, or give an existing tokenizer the [MASK] that it lacks."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

from card_megatron.config.errors import ConfigError
from card_megatron.data.tokenizers import END_PIECES, MASK_PIECE, read_gpt2, read_huggingface, tokenizer_path

LONGEST_SENTENCE = 4000
SCORE_STEPS = 64
"""Steps between two whole scores: finer than the counts behind a score, coarse enough for texts of 30,000 tokens."""


class HasMask(ConfigError):
    """A tokenizer that needs no [MASK]."""


def train_sentencepiece(
    texts: Iterable[str],
    output: str | Path,
    vocab_size: int,
    model_type: str = "bpe",
    threads: int = 2,
    most_lines: int = 5_000_000,
) -> Path:
    """Train a BPE or unigram model with byte fallback, [MASK], <s>, </s> and <pad>; nothing is left if it fails."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
            model_writer=model,
            model_type=model_type,
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
            # a random sample of this size is all that is held in memory, however much text there is
            input_sentence_size=most_lines,
            shuffle_input_sentence=True,
            num_threads=threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"SentencePiece cannot train a vocabulary of {vocab_size}: {error}; "
            "give more text, or a smaller --vocab-size"
        ) from error
    return _write(Path(output), _with_exact_sums(model.getvalue()) if model_type == "unigram" else model.getvalue())


def _with_exact_sums(serialized: bytes) -> bytes:
    """A unigram model with scores in steps of 1/64, whose sums are exact in fp32.

    Two cuts of a text often have the same score ("aaa" as "aa a" or "a aa"); where sums are rounded, the rounding
    decides, otherwise in every library that an exported tokenizer meets.
    """
    from sentencepiece import sentencepiece_model_pb2 as protocol

    model = protocol.ModelProto.FromString(serialized)
    for piece in model.pieces:
        piece.score = round(piece.score * SCORE_STEPS) / SCORE_STEPS
    return model.SerializeToString()


def _sentences(texts: Iterable[str]) -> Iterable[str]:
    """Lines, as SentencePiece wants them, cut where it would otherwise drop them silently."""
    for text in texts:
        for line in text.splitlines():
            for start in range(0, len(line), LONGEST_SENTENCE):
                yield line[start : start + LONGEST_SENTENCE]


def add_mask(source: str | Path, output: str | Path) -> Path:
    """A copy of a tokenizer with [MASK] as a new last id; GPT-2's two files become a tokenizer.json."""
    source, output = tokenizer_path(source), Path(output)
    suffix = ".json" if source.is_dir() or source.suffix == ".json" else ".model"
    if output.suffix != suffix:
        raise ConfigError(f"{output}: a copy of {source} must end in {suffix}")
    if suffix == ".model":
        return _write(output, _sentencepiece_with_mask(source))
    backend = read_gpt2(source) if source.is_dir() else read_huggingface(source)
    if backend.token_to_id(MASK_PIECE) is not None:
        raise HasMask(f"tokenizer {source} has {MASK_PIECE} already: use it as it is")
    backend.add_special_tokens([MASK_PIECE])
    if not any(backend.token_to_id(piece) is not None for piece in END_PIECES):
        backend.add_special_tokens([END_PIECES[0]])
    return _write(output, backend.to_str(pretty=True).encode())


def copy_with_mask(source: str | Path, folder: Path) -> tuple[Path, bool]:
    """A copy in a folder, with a [MASK] in any case; True where the source had none."""
    source = tokenizer_path(source)
    json = source.is_dir() or source.suffix == ".json"
    output = folder / ("tokenizer.json" if json else "tokenizer.model")
    try:
        return add_mask(source, output), True
    except HasMask:
        data = read_gpt2(source).to_str(pretty=True).encode() if source.is_dir() else source.read_bytes()
        return _write(output, data), False


def _sentencepiece_with_mask(source: Path) -> bytes:
    from sentencepiece import sentencepiece_model_pb2 as protocol

    model = protocol.ModelProto()
    try:
        model.ParseFromString(source.read_bytes())
    except Exception as error:  # protobuf's own kind, which differs between its versions
        raise ConfigError(f"tokenizer {source} is not a SentencePiece model: {error}") from error
    if any(piece.piece == MASK_PIECE for piece in model.pieces):
        raise HasMask(f"tokenizer {source} has {MASK_PIECE} already: use it as it is")
    model.pieces.add(piece=MASK_PIECE, score=0.0, type=protocol.ModelProto.SentencePiece.CONTROL)
    model.trainer_spec.vocab_size = len(model.pieces)
    return model.SerializeToString()


def _write(output: Path, data: bytes) -> Path:
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(output.name + ".unfinished")
    unfinished.write_bytes(data)
    unfinished.replace(output)
    return output
