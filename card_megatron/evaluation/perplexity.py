"""Perplexity of a model on sets of documents: by token, word and byte, with a sliding window inside each document.

A document's first token is predicted from end-of-document, as in training; no window reaches into another document.
The end itself is not scored: sets that are cut into documents differently stay comparable by word and byte.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.decoding.model import OpenModel
from card_megatron.evaluation.bound import has_bound, scorer_for
from card_megatron.evaluation.report import NOTHING, perplexity_of, shown
from card_megatron.evaluation.store import request_key
from card_megatron.evaluation.texts import TextSet
from card_megatron.objectives import OBJECTIVES

Progress = Callable[[int, int], None]
"""Told how many bytes of a set are scored, and how many it has."""
TOKENS_AT_ONCE = 1 << 19
"""Documents are tokenised and scored in groups of about this many tokens: memory does not grow with the set."""
UNITS = ("token", "word", "byte")
SAMPLES = 8
"""Of a bound's noise, for each window; a set has many windows, whose errors average where the windows differ."""


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


@dataclass(frozen=True)
class Perplexity:
    """A model on a set."""

    set: str
    how: str
    """exact; or what bounds it: 'ELBO, 8 samples'."""
    likelihood: str
    """exact or bound: perplexities of a bound are at most what is said."""
    samples: int | None
    """Of the noise, for each window; None where the likelihood is exact."""
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
    nll_sampling_error: float | None
    """Standard error of nll by the noise alone, on these very documents; None where the likelihood is exact."""
    token_perplexity: float | None
    word_perplexity: float | None
    byte_perplexity: float | None
    token_perplexity_stderr: float | None
    """Over documents (a bound's noise is part of it), as are the other two; None where there is one."""
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
    if has_bound(model):
        chosen = min(chosen, longest - 1)  # which feeds the last token, too
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
    samples: int = SAMPLES,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> Perplexity:
    """The perplexity of a set; every rank calls this and gets the same. `samples` and `seed` are a bound's."""
    if model.objective not in OBJECTIVES:
        raise ConfigError(
            f"{model.path} was trained with objective {model.objective!r}, which has no likelihood here; "
            f"known are {', '.join(OBJECTIVES)}"
        )
    bound = has_bound(model)
    window, stride = choose_window(model, window, stride)
    words = [len(text.split()) for text in texts.documents]
    sizes = [len(text.encode()) for text in texts.documents]
    scorer = scorer_for(model, max_length=window, samples=samples, seed=seed)
    nlls: list[float] = []
    tokens: list[int] = []
    errors: defaultdict[str, float] = defaultdict(float)
    for rows in token_rows(model, texts):
        spans = [(index, span) for index, row in enumerate(rows) for span in windows(len(row), window, stride)]
        pairs = [(rows[index][span.start : span.first], rows[index][span.first : span.stop]) for index, span in spans]
        found, before, here = [0.0] * len(rows), sum(sizes[: len(nlls)]), sum(sizes[len(nlls) :][: len(rows)])

        def told(done: int, total: int, before: int = before, here: int = here) -> None:
            progress(before + round(done / max(1, total) * here), sum(sizes))

        for (index, _), pair, score in zip(spans, pairs, scorer.score(pairs, progress=told), strict=True):
            found[index] -= score.logprob
            if bound:
                errors[request_key("window", *pair)] += score.error  # equal windows have equal noise: no average
        nlls += found
        tokens += [len(row) - 1 for row in rows]
    (by_token, token_error), (by_word, word_error), (by_byte, byte_error) = (
        perplexity_of(nlls, counts) for counts in (tokens, words, sizes)
    )
    return Perplexity(
        texts.name,
        f"ELBO, {samples} samples" if bound else "exact",
        "bound" if bound else "exact",
        samples if bound else None,
        window,
        stride,
        len(nlls),
        sum(tokens),
        sum(words),
        sum(sizes),
        sum(nlls),
        math.hypot(*errors.values()) if bound else None,
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
    header = ["set", "model", "how", *(f"{unit} ppl" for unit in UNITS)]
    counts = ("documents", "tokens", "window", "stride")
    bounds = any(result.get("likelihood") == "bound" for result in results)
    names = list(dict.fromkeys(result["set"] for result in results))
    rows = [
        [
            result["set"],
            result["model"],
            result["how"],
            *(
                marked(result, shown(result[f"{unit}_perplexity"], result[f"{unit}_perplexity_stderr"]))
                for unit in UNITS
            ),
            *([shown(sampling_error(result))] if bounds else []),
            *(f"{result[count]:,}" for count in counts),
        ]
        for result in sorted(results, key=lambda result: names.index(result["set"]))
    ]
    return [*header, *(["± of token ppl by samples"] if bounds else []), *counts], rows


def marked(result: dict[str, Any], text: str) -> str:
    """A number that is a bound says so."""
    return f"≤ {text}" if result.get("likelihood") == "bound" and text != NOTHING else text


def sampling_error(result: dict[str, Any]) -> float | None:
    """Standard error of the perplexity by token that the noise alone makes."""
    error, value = result.get("nll_sampling_error"), result["token_perplexity"]
    return None if error is None or value is None else value * error / result["tokens"]
