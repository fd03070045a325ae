"""SentencePiece's character map (nmt_nfkc and its like) as normalizers of the `tokenizers` library.

SentencePiece replaces, from left to right, the longest sequence that its map has: "e" and a combining acute together,
or one character. `Precompiled`, which takes the same map, looks at grapheme clusters instead: of a short one it takes
the shortest sequence and drops the rest, of a long one each character alone. So here

1. a sign goes in front of every combining character that SentencePiece would not take with what stands before it,
2. another in front of everything that extends a cluster, so that `Precompiled` maps each character alone,
3. and NFC then joins what no sign of the first kind keeps apart, which is what the map has for the sequence.

Of 40,000 random strings made of combining sequences, most of them nonsense, 2 differ with nmt_nfkc and 1 with nfkc:
sequences of scripts that are younger than the Unicode of `tokenizers`. With case folding (nmt_nfkc_cf) 106 differ:
Greek with iota subscript in separate characters. Plain `Precompiled` fails on any o with two accents.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

APART, ALONE = "\U0007ffff", "\U0007fffe"
"""The two signs: code points that no text may interchange, and no map has."""


def character_map(blob: bytes, symbols: Sequence[str] = ()) -> list[Any]:
    """The normalizers that do what a precompiled map does; symbols are left as they are."""
    from tokenizers import Regex, normalizers

    table = entries(blob)
    sequences = [sequence for sequence in table if len(sequence) > 1]
    joining = {character for sequence in sequences for character in sequence[1:]}
    # NFC would join these with what stands before them, or change their order
    attached = character_class(joining | {key for key, text in table.items() if len(key) == 1 and text[:1] in joining})
    attached += r"\p{M}"
    whole = [literal(symbol) for symbol in sorted(symbols, key=len, reverse=True)]
    unit = "(?>" + "|".join([*whole, *([pattern(trie(sequences))] if sequences else []), "."]) + ")"
    # every sequence starts at a character that is not attached, or where the last one ended
    apart = rf"(?m)(?:\G|(?=[^{attached}])){unit}\K(?=[{attached}])"
    return [
        normalizers.Replace(Regex(apart), APART),
        # not at the start, where there is nothing to be apart from, and where `Replace` miscounts
        normalizers.Replace(Regex(rf"(?!\A)(?=[{attached}\p{{Cf}}\p{{Lm}}\p{{Sk}}\n])"), ALONE),
        normalizers.Precompiled(blob),
        normalizers.Replace(ALONE, ""),
        normalizers.NFC(),
        normalizers.Replace(APART, ""),
    ]


def entries(blob: bytes) -> dict[str, str]:
    """What a map replaces by what: a double-array trie of byte strings, whose leaves point into the texts behind it."""
    (size,) = struct.unpack_from("<I", blob)
    units = np.frombuffer(blob, dtype="<u4", count=size // 4, offset=4).astype(np.int64)
    texts = blob[4 + size :]
    labels = np.where(units >> 31 & 1, 0, units & 0xFF)
    children: dict[int, list[int]] = defaultdict(list)
    for child in np.flatnonzero(labels).tolist():
        children[child ^ int(labels[child])].append(child)
    found, stack = {}, [(0, b"")]
    while stack:
        place, key = stack.pop()
        unit = int(units[place])
        first = place ^ ((unit >> 10) << ((unit & (1 << 9)) >> 6))
        if unit >> 8 & 1:
            start = int(units[first]) & 0x7FFFFFFF
            found[key.decode()] = texts[start : texts.index(b"\0", start)].decode()
        stack += [(child, key + bytes([labels[child]])) for child in children[first]]
    return found


def trie(sequences: Iterable[str]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for sequence in sequences:
        node = root
        for character in sequence:
            node = node.setdefault(character, {})
        node[""] = {}
    return root


def pattern(node: dict[str, Any]) -> str:
    """The regular expression of the longest path from a node of a trie, equal branches written once."""
    branches = defaultdict(list)
    for character, child in node.items():
        if character:
            branches[pattern(child)].append(character)
    if not branches:
        return ""
    ways = "|".join(f"[{character_class(characters)}]{rest}" for rest, characters in branches.items())
    return f"(?:{ways})?" if "" in node else f"(?:{ways})"


def character_class(characters: Iterable[str]) -> str:
    """The inside of a regular expression's [...], with neighbours as ranges."""
    numbers = set(map(ord, characters))
    starts = sorted(number for number in numbers if number - 1 not in numbers)
    ends = sorted(number for number in numbers if number + 1 not in numbers)
    return "".join(f"\\x{{{start:x}}}-\\x{{{end:x}}}" for start, end in zip(starts, ends, strict=True))


def literal(text: str) -> str:
    """The regular expression of a text."""
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)
