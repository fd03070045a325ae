"""A SentencePiece model as a tokenizer of the `tokenizers` library that gives the same ids.

What decides the ids in SentencePiece, and what says it here:

- Normalisation: the character map (empty for `identity`), superfluous spaces, the space in front of a text, and spaces
  written as "▁" become normalizers. The space in front is `Prepend`, not `Metaspace`: it comes once, before anything is
  split, and also where the text starts with a space of its own.
- BPE: SentencePiece joins the neighbours whose joint piece has the highest score, the leftmost of equals. A merge of
  `tokenizers` is a pair, so a piece gets one merge for every way of cutting it into two pieces.
- Unigram: the best path through the pieces. Control and byte pieces are words like any other in `tokenizers`; they get
  a score so low that no text is cut into them.
- User-defined symbols stay whole, and nothing joins with them.
"""

from __future__ import annotations

from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.convert.character_map import character_class, character_map, entries

SPACE = "▁"


class SentencePieceModel:
    """The parts of a model that decide its ids."""

    def __init__(self, name: str, serialized: bytes):
        from sentencepiece import sentencepiece_model_pb2 as protocol

        self.name = name
        self.model = protocol.ModelProto.FromString(serialized)
        kinds = protocol.ModelProto.SentencePiece
        self.pieces = [piece.piece for piece in self.model.pieces]
        self.scores = [piece.score for piece in self.model.pieces]
        by_kind = {
            kind: [piece.piece for piece in self.model.pieces if piece.type == kind] for kind in kinds.Type.values()
        }
        self.normal, self.symbols = set(by_kind[kinds.NORMAL]), by_kind[kinds.USER_DEFINED]
        self.control, self.unused = by_kind[kinds.CONTROL], by_kind[kinds.UNUSED]
        (self.unknown,) = by_kind[kinds.UNKNOWN]
        self.ids = {piece: number for number, piece in enumerate(self.pieces)}
        self.trainer, self.rules = self.model.trainer_spec, self.model.normalizer_spec

    def refuse(self, what: str) -> ConfigError:
        return ConfigError(
            f"tokenizer {self.name} has {what}, which a tokenizer.json cannot say; "
            "train the tokenizer without it, or leave the tokenizer out of the export"
        )

    @property
    def is_bpe(self) -> bool:
        return self.trainer.model_type == self.trainer.BPE


def sentencepiece_backend(name: str, serialized: bytes) -> Any:
    """The `tokenizers` tokenizer with the pieces, ids and rules of a serialized SentencePiece model."""
    import tokenizers

    model = SentencePieceModel(name, serialized)
    check_representable(model)
    backend = tokenizers.Tokenizer(bpe(model) if model.is_bpe else unigram(model))
    backend.normalizer = normalizer(model)
    backend.decoder = decoder(model)
    splits = (split_symbols if model.is_bpe else split_unknown)(model)
    if splits:
        backend.pre_tokenizer = splits
    backend.add_special_tokens([special(piece) for piece in (model.unknown, *model.control)])
    if model.is_bpe:
        backend.add_tokens([tokenizers.AddedToken(symbol, normalized=True) for symbol in long_symbols(model)])
    return backend


def special(piece: str) -> Any:
    import tokenizers

    return tokenizers.AddedToken(piece, normalized=False, special=True)


def check_representable(model: SentencePieceModel) -> None:
    """Refuse what would come out with other ids."""
    if model.trainer.model_type not in (model.trainer.BPE, model.trainer.UNIGRAM):
        raise model.refuse("a model that is neither BPE nor unigram")
    if model.trainer.treat_whitespace_as_suffix:
        raise model.refuse("whitespace as a suffix")
    if len(model.ids) < len(model.pieces):
        raise model.refuse("pieces that are there twice")
    if model.unused:
        raise model.refuse(f"unused pieces such as {model.unused[0]!r}")
    lonely = set().union(*model.normal) - model.normal - set(model.symbols)
    if lonely:
        raise model.refuse(f"pieces with the character {min(lonely)!r}, which is no piece itself")
    table = entries(model.rules.precompiled_charsmap) if model.symbols and model.rules.precompiled_charsmap else {}
    for symbol in model.symbols:
        if any(character in (" ", SPACE) or table.get(character, character) != character for character in symbol):
            raise model.refuse(f"the user-defined symbol {symbol!r}, which its own normalisation changes")
    if model.is_bpe and long_symbols(model) and model.rules.add_dummy_prefix:
        raise model.refuse(f"user-defined symbols such as {long_symbols(model)[0]!r} besides a dummy prefix")


# ---------------------------------------------------------------- the text before it is cut


def normalizer(model: SentencePieceModel) -> Any:
    from tokenizers import Regex, normalizers

    rules = model.rules
    space = SPACE if rules.escape_whitespaces else " "
    steps = character_map(rules.precompiled_charsmap, model.symbols) if rules.precompiled_charsmap else []
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if rules.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(space))
    if rules.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"{space}+\z"), ""))  # the sign itself too, if a text ends with it
    return normalizers.Sequence(steps)


def decoder(model: SentencePieceModel) -> Any:
    from tokenizers import decoders

    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.rules.add_dummy_prefix or model.rules.remove_extra_whitespaces:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


# ---------------------------------------------------------------- BPE


def bpe(model: SentencePieceModel) -> Any:
    from tokenizers import models

    return models.BPE(
        model.ids, merges(model), unk_token=model.unknown, fuse_unk=True, byte_fallback=model.trainer.byte_fallback
    )


def merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Every way to make a piece from two, the best score first.

    SentencePiece gives all ways to one piece the same rank and takes the leftmost in the text; here they must have an
    order, the one with the longer left part first: a run of one character is joined from the left, so that what is
    left over stands at its right.
    """
    ways = []
    for piece in model.normal:
        for cut in range(len(piece) - 1, 0, -1):
            left, right = piece[:cut], piece[cut:]
            if left in model.normal and right in model.normal:
                ways.append((-model.scores[model.ids[piece]], model.ids[piece], -cut, left, right))
    return [(left, right) for *_, left, right in sorted(ways)]


def long_symbols(model: SentencePieceModel) -> list[str]:
    return [symbol for symbol in model.symbols if len(symbol) > 1]


def split_symbols(model: SentencePieceModel) -> Any:
    """User-defined characters stand alone; longer symbols are added tokens."""
    from tokenizers import Regex, pre_tokenizers

    alone = [symbol for symbol in model.symbols if len(symbol) == 1]
    return pre_tokenizers.Split(Regex(f"[{character_class(alone)}]"), "isolated") if alone else None


# ---------------------------------------------------------------- unigram


def unigram(model: SentencePieceModel) -> Any:
    import numpy as np
    from tokenizers import models

    reserved = reserved_pieces(model)
    scores = [model.scores[model.ids[piece]] for piece in model.normal]
    # below any other path over the same characters: one piece a character
    never = min(0.0, *scores) * max(map(len, reserved)) - 1.0
    vocabulary = list(zip(model.pieces, model.scores, strict=True))
    for piece in reserved:
        vocabulary[model.ids[piece]] = (piece, never)
    for symbol in model.symbols:  # the score that SentencePiece gives them while it looks for the path
        score = float(np.float32(len(symbol.encode()) * max(scores) - 0.1))
        vocabulary[model.ids[symbol]] = (symbol, score)
    return models.Unigram(vocabulary, model.ids[model.unknown], model.trainer.byte_fallback)


def split_unknown(model: SentencePieceModel) -> Any:
    """Characters that no piece has stand alone, where a reserved piece has such a character.

    No path crosses them, so that nothing else changes; but no text can then be cut into the reserved piece. Without
    byte fallback a run of them is one unknown piece, and stays together.
    """
    from tokenizers import Regex, pre_tokenizers

    known = set().union(*model.normal, *model.symbols)
    reserved = reserved_pieces(model)
    if known.issuperset(set().union(*reserved)):
        return None
    run = "" if model.trainer.byte_fallback else "+"
    strange = [piece for piece in reserved if known.isdisjoint(piece)]
    if run and strange:
        raise model.refuse(f"the reserved piece {strange[0]!r}, of whose characters none is a piece")
    return pre_tokenizers.Split(Regex(f"[^{character_class(known)}]{run}"), "isolated")


def reserved_pieces(model: SentencePieceModel) -> list[str]:
    """Pieces that no text is cut into: unknown, control and byte pieces."""
    return [piece for piece in model.pieces if piece not in model.normal and piece not in model.symbols]
