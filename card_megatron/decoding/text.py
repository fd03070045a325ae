"""From prompts to texts: encoding, stop strings, streaming, and prompts shared out among replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from card_megatron.config.errors import ConfigError
from card_megatron.data.tokenizers import Tokenizer, encode
from card_megatron.decoding.block import Confidence, Strategy, autoregressive
from card_megatron.decoding.diffusion import Denoise, denoise
from card_megatron.decoding.engine import Request, Result, Stats, decode
from card_megatron.decoding.model import OpenModel
from card_megatron.decoding.sampling import SamplingParams
from card_megatron.decoding.verify import Verify
from card_megatron.objectives import OBJECTIVES

FIELDS = {
    "verify": ("drafts", "adaptive", "branches"),
    "confidence": ("block", "tau", "max_passes", "commit", "min_fill"),
    "ar": (),
    "denoise": ("block", "steps", "order"),
}
"""Strategy -> the fields of Generation that it reads; another's that is set would do nothing, without a word."""
STRATEGIES = tuple(FIELDS)


@dataclass(frozen=True)
class Continuation:
    """What a prompt was continued with."""

    prompt: str
    text: str
    """Without the end of text, and without the stop string that ended it."""
    result: Result
    prompt_tokens: list[int]


@dataclass(frozen=True)
class Generation:
    """How texts are made: the strategy's numbers, and what ends a text."""

    strategy: str | None = None
    """None: verify, or denoise where the model is one of masked diffusion."""
    block: int | None = None
    """None: 16 for confidence; of denoise see decoding.diffusion.Denoise, as for the next two."""
    steps: int | None = None
    order: str | None = None
    tau: float = 0.9
    max_passes: int = 16
    commit: str = "block"
    min_fill: int = 1
    drafts: int = 8
    adaptive: bool = True
    branches: bool = False
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    batch_size: int = 32
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def fitting(self, objective: str) -> Generation:
        """With the strategy that a model of this objective has; refuses what does not fit it."""
        diffusion = OBJECTIVES[objective].attention != "causal"
        fits = ("denoise",) if diffusion else tuple(name for name in STRATEGIES if name != "denoise")
        kind = "masked diffusion" if diffusion else "a causal model"
        if self.strategy not in (None, *fits):
            raise ConfigError(
                f"--strategy {self.strategy}: objective {objective} is {kind}, which has {', '.join(fits)}; "
                "leave it out, or choose one of these"
            )
        strategy = self.strategy or fits[0]
        for name in sorted({name for fields in FIELDS.values() for name in fields} - {*FIELDS[strategy]}):
            if getattr(self, name) != getattr(Generation, name):
                users = " and ".join(other for other, fields in FIELDS.items() if name in fields)
                raise ConfigError(
                    f"{name}={getattr(self, name)} is a field of {users}, and means nothing to {strategy}, the "
                    f"strategy here (objective {objective} is {kind}); leave it out"
                )
        made = replace(self, strategy=strategy)
        made.build()  # refuses bad numbers
        return made

    def build(self) -> Strategy | Denoise:
        """The strategy, new: one that adapts remembers what it has seen."""
        try:
            if self.strategy == "denoise":
                return Denoise(self.block, self.steps, self.order)
            if self.strategy in (None, "verify"):
                return Verify(self.drafts, self.adaptive, self.branches)
            if self.strategy == "confidence":
                block = 16 if self.block is None else self.block
                return Confidence(block, self.tau, self.max_passes, self.commit, self.min_fill)
        except ValueError as error:
            raise ConfigError(f"--strategy {self.strategy or 'verify'}: {error}") from error
        if self.strategy != "ar":
            raise ConfigError(f"strategy {self.strategy!r} is none of {', '.join(STRATEGIES)}")
        return autoregressive()


def generate(
    model: OpenModel,
    prompts: Sequence[str],
    options: Generation,
    on_text: Callable[[int, str], None] | None = None,
) -> tuple[list[Continuation], Stats]:
    """Continue prompts; on every rank the same. Each prompt's seed is options.sampling.seed + its number.

    `on_text(number, text)` hears new text as it is decided, on the rank that leads the prompt's replica.
    """
    mine = range(model.replica, len(prompts), model.replicas)
    # an empty prompt is what the beginning of a text follows in training
    ids = {number: encode(model.tokenizer, prompts[number]) or [model.tokenizer.eod] for number in range(len(prompts))}
    streams: dict[int, _Stream] = {}
    requests = []
    for number in mine:
        prompt = ids[number]
        if on_text is not None:
            streams[number] = _Stream(partial(text_of, model.tokenizer, prompt), options.stop, number, on_text)
        requests.append(
            Request(
                prompt,
                options.max_new_tokens,
                sampling=_with_seed(options.sampling, number),
                eos_ids=(model.tokenizer.eod,),
                stop=_stopper(partial(text_of, model.tokenizer, prompt), options.stop),
                on_tokens=streams[number].add if model.leads and number in streams else None,
            )
        )
    results, stats = continue_requests(model, requests, options)
    found = _gathered(model, dict(zip(mine, results, strict=True)), stats)
    texts = [
        Continuation(
            prompts[number],
            text_of(model.tokenizer, ids[number], found[0][number].tokens, options.stop),
            found[0][number],
            ids[number],
        )
        for number in range(len(prompts))
    ]
    for number, stream in streams.items():
        if model.leads:
            stream.finish(texts[number].text)
    return texts, found[1]


def continue_requests(model: OpenModel, requests: Sequence[Request], options: Generation) -> tuple[list[Result], Stats]:
    """This replica's requests, by the decoder that the model has."""
    strategy = options.fitting(model.objective).build()
    try:
        if isinstance(strategy, Denoise):
            return denoise(
                model.backend,
                requests,
                strategy,
                model_block=model.block_size,
                mask_id=model.tokenizer.mask,
                forbidden=model.forbidden,
                batch_size=options.batch_size,
            )
        return decode(
            model.backend,
            requests,
            strategy,
            mask_id=model.tokenizer.mask,
            forbidden=model.forbidden,
            batch_size=options.batch_size,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def text_of(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], stop: Sequence[str] = ()) -> str:
    """The text that generated tokens add to a prompt's, up to the end of text or the first stop string.

    Decoded behind the prompt: many tokenizers leave out the space at the beginning of what they decode.
    """
    before, behind = ([token for token in ids if token != tokenizer.eod] for ids in (prompt, tokens))
    given = tokenizer.decode(before)
    text = tokenizer.decode([*before, *behind])
    text = text[len(given) :] if text.startswith(given) else tokenizer.decode(behind)
    places = [place for place in (text.find(string) for string in stop) if place >= 0]
    return text[: min(places)] if places else text


def _stopper(text: Callable[[list[int]], str], stop: Sequence[str]) -> Callable[[list[int]], int | None] | None:
    """Tokens to keep once a stop string is complete: the fewest whose text has it."""
    if not stop:
        return None

    def has_stop(tokens: list[int]) -> bool:
        found = text(tokens)
        return any(string in found for string in stop)

    def look(tokens: list[int]) -> int | None:
        if not has_stop(tokens):
            return None
        low, high = 1, len(tokens)  # a text that has it keeps it when it grows
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if has_stop(tokens[:middle]) else (middle + 1, high)
        return low

    return look


class _Stream:
    """Tells of text once it cannot change: no half character, and nothing that may become a stop string."""

    def __init__(self, text: Callable[..., str], stop: Sequence[str], number: int, on_text: Callable[[int, str], None]):
        self.text, self.stop, self.number, self.on_text = text, stop, number, on_text
        self.tokens: list[int] = []
        self.told = 0
        self.held = max((len(string) - 1 for string in stop), default=0)

    def add(self, tokens: list[int]) -> None:
        self.tokens += tokens
        text = self.text(self.tokens, self.stop)
        sure = len(text.rstrip("\ufffd")) - self.held
        if sure > self.told:
            self.on_text(self.number, text[self.told : sure])
            self.told = sure

    def finish(self, text: str) -> None:
        if len(text) > self.told:
            self.on_text(self.number, text[self.told :])


def _with_seed(sampling: SamplingParams, number: int) -> SamplingParams:
    return replace(sampling, seed=sampling.seed + number)


def _gathered(model: OpenModel, results: dict[int, Result], stats: Stats) -> tuple[dict[int, Result], Stats]:
    """All replicas' results, and what they did together: their passes ran side by side, so the longest time counts."""
    if model.replicas == 1:
        return results, stats
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (results, stats) if model.leads else None)
    parts = [part for part in everyone if part is not None]
    merged = Stats(seconds=max(part.seconds for _, part in parts), widest=max(part.widest for _, part in parts))
    for _, part in parts:
        for name in ("passes", "prefill_passes", "tokens_forwarded", "tokens_produced", "row_passes", "cache_bytes"):
            setattr(merged, name, getattr(merged, name) + getattr(part, name))
        merged.advances.update(part.advances)
    return {number: result for part, _ in parts for number, result in part.items()}, merged
