"""Perplexity of a model on sets of documents: by token, word and byte, with a sliding window inside each document.

A document's first token is predicted from end-of-document, as in training; no window reaches into another document.
The end itself is not scored: sets that are cut into documents differently stay comparable by word and byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.decoding.model import OpenModel
from card_megatron.evaluation.report import perplexity_of, shown
from card_megatron.evaluation.scorer import Scorer
from card_megatron.evaluation.texts import TextSet

Pair = tuple[Sequence[int], Sequence[int]]
Share = Callable[[float], None]
"""Told which share of the pairs is scored."""
Progress = Callable[[int, int], None]
"""Told how many bytes of a set are scored, and how many it has."""
TOKENS_AT_ONCE = 1 << 19
"""Documents are tokenised and scored in groups of about this many tokens: memory does not grow with the set."""
UNITS = ("token", "word", "byte")


@dataclass(frozen=True)
class Span:
    """Tokens [first, stop) of a document, predicted from those of [start, first); token 0 is end-of-document."""

    start: int
    first: int
    stop: int


def windows(length: int, window: int, stride: int) -> Iterator[Span]:
    """Spans that score tokens 1 .. length-1 of a row exactly once, with at most `window` inputs to each pass.

    The first fills the window; each later one scores `stride` tokens more, the first of them from window-stride+1
    others. The last ends with the row and reaches back as far as the window does.
    """
    first = 1
    while first < length:
        stop = min(length, first + (window if first == 1 else stride))
        yield Span(max(0, stop - 1 - window), first, stop)
        first = stop


def exact(model: OpenModel, pairs: Sequence[Pair], window: int, share: Share) -> list[float]:
    """Log-likelihoods by one pass: a causal model's outputs on a clean prefix are its conditionals."""
    scores = Scorer(model, max_length=window).score(pairs, progress=lambda done, total: share(done / max(1, total)))
    return [score.logprob for score in scores]


@dataclass(frozen=True)
class Likelihood:
    """How an objective's log-likelihoods are got."""

    how: str
    """exact; or what bounds it, such as 'bound, 128 samples'."""
    of: Callable[[OpenModel, Sequence[Pair], int, Share], list[float]]


LIKELIHOODS = {"arm": Likelihood("exact", exact), "card": Likelihood("exact", exact)}
"""Objective -> its likelihood. One that has only a bound puts its own function here."""


@dataclass(frozen=True)
class Perplexity:
    """A model on a set."""

    set: str
    how: str
    window: int
    stride: int
    documents: int
    tokens: int
    words: int
    """Stretches of the text without white space."""
    bytes: int
    """Of the text as UTF-8, before any normalisation by a tokenizer."""
    nll: float
    """Of the whole set, in nats."""
    token_perplexity: float | None
    word_perplexity: float | None
    byte_perplexity: float | None
    token_perplexity_stderr: float | None
    """Over documents, as are the other two; None where there is one."""
    word_perplexity_stderr: float | None
    byte_perplexity_stderr: float | None

    def record(self) -> dict[str, Any]:
        return asdict(self)


def choose_window(model: OpenModel, window: int | None, stride: int | None) -> tuple[int, int]:
    """The window, by default all positions of the model, and the stride, by default half of it; refuses bad ones."""
    longest = model.backend.max_positions
    chosen = longest if window is None else window
    if not 1 <= chosen <= longest:
        raise ConfigError(f"--window={chosen} must lie in [1, {longest}], the positions that {model.path} has")
    step = max(1, chosen // 2) if stride is None else stride
    if not 1 <= step <= chosen:
        raise ConfigError(f"--stride={step} must lie in [1, {chosen}], the window: a longer one would leave tokens out")
    return chosen, step


def measure(
    model: OpenModel,
    texts: TextSet,
    *,
    window: int | None = None,
    stride: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Perplexity:
    """The perplexity of a set; every rank calls this and gets the same."""
    if model.objective not in LIKELIHOODS:
        raise ConfigError(
            f"{model.path} was trained with objective {model.objective!r}, which has no likelihood here; "
            f"known are {', '.join(LIKELIHOODS)}"
        )
    likelihood = LIKELIHOODS[model.objective]
    window, stride = choose_window(model, window, stride)
    words = [len(text.split()) for text in texts.documents]
    sizes = [len(text.encode()) for text in texts.documents]
    nlls: list[float] = []
    tokens: list[int] = []
    for rows in token_rows(model, texts):
        spans = [(index, span) for index, row in enumerate(rows) for span in windows(len(row), window, stride)]
        pairs = [(rows[index][span.start : span.first], rows[index][span.first : span.stop]) for index, span in spans]
        found, before, here = [0.0] * len(rows), sum(sizes[: len(nlls)]), sum(sizes[len(nlls) :][: len(rows)])

        def told(share: float, before: int = before, here: int = here) -> None:
            progress(before + round(share * here), sum(sizes))

        for (index, _), logprob in zip(spans, likelihood.of(model, pairs, window, told), strict=True):
            found[index] -= logprob
        nlls += found
        tokens += [len(row) - 1 for row in rows]
    (by_token, token_error), (by_word, word_error), (by_byte, byte_error) = (
        perplexity_of(nlls, counts) for counts in (tokens, words, sizes)
    )
    return Perplexity(
        texts.name,
        likelihood.how,
        window,
        stride,
        len(nlls),
        sum(tokens),
        sum(words),
        sum(sizes),
        sum(nlls),
        by_token,
        by_word,
        by_byte,
        token_error,
        word_error,
        byte_error,
    )


def token_rows(model: OpenModel, texts: TextSet) -> Iterator[list[list[int]]]:
    """Groups of documents as [end-of-document, tokens...]."""
    rows: list[list[int]] = []
    size = 0
    for document in texts.documents:
        (ids,) = model.tokenizer.encode_batch([document])
        rows.append([model.tokenizer.eod, *ids.tolist()])
        size += len(ids)
        if size >= TOKENS_AT_ONCE:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def table_rows(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table: sets in the order they came, the models of a set together."""
    header = ["set", "model", "how", *(f"{unit} ppl" for unit in UNITS), "documents", "tokens", "window", "stride"]
    names = list(dict.fromkeys(result["set"] for result in results))
    rows = [
        [
            result["set"],
            result["model"],
            result["how"],
            *(shown(result[f"{unit}_perplexity"], result[f"{unit}_perplexity_stderr"]) for unit in UNITS),
            *(f"{result[count]:,}" for count in ("documents", "tokens", "window", "stride")),
        ]
        for result in sorted(results, key=lambda result: names.index(result["set"]))
    ]
    return header, rows
