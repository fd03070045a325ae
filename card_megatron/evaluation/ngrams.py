"""How much a text says again: distinct n-grams over texts, and repetition inside each."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

REPEATED = 4
"""Length of the n-grams whose return is a loop, rather than a phrase."""


def ngrams(text: Sequence[Hashable], n: int) -> Iterator[tuple[Hashable, ...]]:
    return zip(*(text[start:] for start in range(n)), strict=False)


def distinct(texts: Sequence[Sequence[Hashable]], n: int) -> float | None:
    """Different n-grams over all n-grams, of all texts together; None where no text is that long."""
    found = [ngram for text in texts for ngram in ngrams(text, n)]
    return len(set(found)) / len(found) if found else None


def repetition(text: Sequence[Hashable], n: int = REPEATED) -> float | None:
    """Share of a text's n-grams that stood earlier in the same text; None for one that has none."""
    found = list(ngrams(text, n))
    return 1 - len(set(found)) / len(found) if found else None


def mean_repetition(texts: Sequence[Sequence[Hashable]], n: int = REPEATED) -> float | None:
    """The mean over texts that are long enough to repeat themselves."""
    found = [share for text in texts if (share := repetition(text, n)) is not None]
    return sum(found) / len(found) if found else None
