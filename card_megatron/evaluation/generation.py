"""Gen PPL: how likely other models find what a decoding strategy writes, beside how fast it writes it.

Likely is not good: the paper's failure mode, a text that loops, is very likely. So repetition stands beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from card_megatron.config.errors import ConfigError
from card_megatron.data.tokenizers import encode
from card_megatron.decoding.model import OpenModel
from card_megatron.decoding.text import STRATEGIES, Generation, generate
from card_megatron.evaluation.judge import Judge, Judged
from card_megatron.evaluation.ngrams import distinct, mean_repetition
from card_megatron.evaluation.report import markdown_table, perplexity_of, picture, shown

PARAMETERS: dict[str, dict[str, tuple[str, Callable[[str], Any]]]] = {
    "ar": {},
    "confidence": {
        "K": ("block", int),
        "tau": ("tau", float),
        "T": ("max_passes", int),
        "commit": ("commit", str),
        "min_fill": ("min_fill", int),
    },
    "verify": {
        "K": ("drafts", int),
        "adaptive": ("adaptive", lambda text: bool(int(text))),
        "branches": ("branches", lambda text: bool(int(text))),
    },
    "denoise": {"K": ("block", int), "T": ("steps", int), "order": ("order", str)},
}
"""Strategy -> what may stand behind its colon: the paper's letter -> (field of Generation, its type)."""
WORDS = ("context", "text", "prompt")
"""Fields of a prompt's line, the first that is there."""


def parse_strategy(text: str, base: Generation) -> Generation:
    """'ar', 'confidence:K=16,tau=0.9,T=16', 'verify:K=8', 'denoise:T=8'."""
    name, _, rest = text.partition(":")
    if name not in PARAMETERS:
        raise ConfigError(f"--strategies {text}: {name!r} is none of {', '.join(STRATEGIES)}")
    fields: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        letter, _, value = part.partition("=")
        if letter not in PARAMETERS[name]:
            known = ", ".join(PARAMETERS[name]) or "no parameter"
            raise ConfigError(f"--strategies {text}: {name} has no {letter!r}; it has {known}")
        field, kind = PARAMETERS[name][letter]
        try:
            fields[field] = kind(value)
        except ValueError:
            raise ConfigError(f"--strategies {text}: {part!r} has no value of its kind; write {letter}=16") from None
    made = replace(base, strategy=name, **fields)
    made.build()  # refuses bad numbers before a model is loaded
    return made


def read_prompts(path: Path, samples: int | None) -> list[str]:
    """The first `samples` prompts of a .jsonl: the "context" (as HellaSwag has it), "text" or "prompt" of each line."""
    try:
        lines = path.read_text("utf-8").split("\n")  # and no other line end
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from error
    prompts: list[str] = []
    for number, line in enumerate(lines, start=1):
        if samples is not None and len(prompts) == samples:
            break
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            prompts.append(next(record[word] for word in WORDS if isinstance(record.get(word), str)))
        except (ValueError, AttributeError, StopIteration):
            raise ConfigError(
                f'--prompts {path}, line {number}: no JSON object with a "context" or "text", as HellaSwag has it'
            ) from None
    if not prompts:
        raise ConfigError(f"--prompts {path} has no prompt")
    return prompts


def fit_prompts(model: OpenModel, prompts: Sequence[str], new: int) -> tuple[list[str], int]:
    """Prompts that leave room for the new tokens, and how many of them lost words on the left for it."""
    room = model.backend.max_positions - new
    if room < 1:
        raise ConfigError(
            f"--max-new-tokens={new} leaves no room for a prompt in the {model.backend.max_positions} positions of "
            f"{model.path}; ask for fewer"
        )
    fitted, cut = [], 0
    for prompt in prompts:
        words = prompt.split(" ")
        first = 0
        while first < len(words) and len(encode(model.tokenizer, " ".join(words[first:]))) > room:
            first += 1
        fitted.append(" ".join(words[first:]))
        cut += first > 0
    return fitted, cut


@dataclass(frozen=True)
class Written:
    """What a strategy made of the prompts."""

    strategy: str
    prompts: list[str]
    texts: list[str]
    tokens: list[list[int]]
    """Generated ids, without the end of text."""
    facts: dict[str, Any]


def write_texts(model: OpenModel, prompts: Sequence[str], strategy: str, options: Generation) -> Written:
    """Continue all prompts by one strategy; every rank calls this and gets the same."""
    made, stats = generate(model, prompts, options)
    tokens = [[token for token in one.result.tokens if token != model.tokenizer.eod] for one in made]
    texts = [continuation(model, prompt, ids) for prompt, ids in zip(prompts, tokens, strict=True)]
    facts = {
        "samples": len(made),
        "tokens": stats.tokens_produced,
        "seconds": stats.seconds,
        "tokens_per_second": stats.tokens_per_second,
        "tokens_per_pass": stats.tokens_per_pass,
        **{f"distinct_{n}": distinct(tokens, n) for n in (1, 2, 3)},
        "repetition_4": mean_repetition(tokens),
        "ended": sum(one.result.ended == "eos" for one in made),
    }
    return Written(strategy, list(prompts), texts, tokens, facts)


def continuation(model: OpenModel, prompt: str, ids: Sequence[int]) -> str:
    """The text of generated ids as it stands behind its prompt: alone, SentencePiece would lose its first space."""
    before = encode(model.tokenizer, prompt)
    known, whole = model.tokenizer.decode(before), model.tokenizer.decode([*before, *ids])
    return whole[len(known) :] if whole.startswith(known) else model.tokenizer.decode(ids)


def judge_all(
    model: OpenModel, judge: Judge, written: Written, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Judged]:
    """The judge's opinion of all texts; ranks share them out, and all get all."""
    texts = list(zip(written.prompts, written.texts, strict=True))
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = judge.score(texts[rank::ranks], progress)
    if ranks == 1:
        return mine
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, mine)
    return [everyone[index % ranks][index // ranks] for index in range(len(texts))]


def gen_perplexity(judged: Sequence[Judged]) -> dict[str, Any]:
    """Of all texts together, by the judge's tokens; the standard error is over texts."""
    kept = [one for one in judged if one.tokens]
    value, error = perplexity_of([one.nll for one in kept], [one.tokens for one in kept])
    return {
        "perplexity": value,
        "perplexity_stderr": error,
        "nll": sum(one.nll for one in kept),
        "tokens": sum(one.tokens for one in kept),
        "texts": len(kept),
        "truncated": sum(one.truncated for one in judged),
    }


def mean_perplexity(judges: dict[str, dict[str, Any]]) -> float | None:
    """The paper's AVG PPL: the mean over judges of their perplexities."""
    found = [judge["perplexity"] for judge in judges.values()]
    return sum(found) / len(found) if found and None not in found else None


def results_table(rows: Sequence[dict[str, Any]]) -> str:
    """Strategies down, the speed relative to the first of them beside each."""
    names = list(rows[0]["judges"])
    labels = [f"Gen PPL ({Path(name).name})" for name in names]
    header = ["strategy", "tok/s", "speed", "tok/pass", *labels, *(["AVG PPL"] if len(names) > 1 else [])]
    header += ["distinct-1", "distinct-2", "distinct-3", "repetition-4"]
    cells = []
    for row in rows:
        judged = [shown(row["judges"][name]["perplexity"], row["judges"][name]["perplexity_stderr"]) for name in names]
        speed = row["tokens_per_second"] / rows[0]["tokens_per_second"] if rows[0]["tokens_per_second"] else None
        cells.append(
            [
                row["strategy"],
                shown(row["tokens_per_second"], digits=1),
                shown(speed, digits=2) + "x",
                shown(row["tokens_per_pass"], digits=2),
                *judged,
                *([shown(row["gen_perplexity"])] if len(names) > 1 else []),
                *(shown(row[f"distinct_{n}"], digits=3) for n in (1, 2, 3)),
                shown(row["repetition_4"], digits=3),
            ]
        )
    return markdown_table(header, cells)


def draw(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Speed across, Gen PPL up: the lower right is where one wants to be."""
    with picture(path, title, "tokens / s", "Gen PPL") as axes:
        for name in rows[0]["judges"]:
            points = [
                (row["tokens_per_second"], row["judges"][name]["perplexity"], row["strategy"])
                for row in rows
                if row["judges"][name]["perplexity"] is not None
            ]
            axes.plot([speed for speed, _, _ in points], [value for _, value, _ in points], "o", label=Path(name).name)
            for speed, value, strategy in points:
                axes.annotate(strategy, (speed, value), fontsize="x-small", xytext=(4, 4), textcoords="offset points")
