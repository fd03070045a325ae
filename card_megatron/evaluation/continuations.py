"""Texts that the harness asks to be continued, with our decoders: its options, its stops, its cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from card_megatron.config.errors import ConfigError
from card_megatron.decoding.engine import Request
from card_megatron.decoding.model import OpenModel
from card_megatron.decoding.sampling import SamplingParams
from card_megatron.decoding.text import Generation, continue_requests

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
MOST_ROWS = 64


@dataclass(frozen=True)
class Job:
    """One text to be continued."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    until: tuple[str, ...]
    sampling: SamplingParams
    truncated: bool = field(compare=False, default=False)

    def cut(self, text: str) -> str:
        """Up to the first stop, as the harness cuts."""
        for stop in filter(None, self.until):
            text = text.split(stop)[0]
        return text


class Continuations:
    """A decoder for jobs; every rank calls it with the same, replicas take a share each."""

    def __init__(
        self,
        model: OpenModel,
        *,
        strategy: str | None,
        K: int | None,
        tau: float,
        batch_tokens: int,
        steps: int | None = None,
    ):
        if strategy is None and model.objective == "arm":
            strategy = "ar"  # it has no drafts; for card the default is lossless: the text is that of `ar`, sooner
        strategy = Generation(strategy).fitting(model.objective).strategy
        length: dict[str, Any] = {} if K is None else {"drafts" if strategy == "verify" else "block": K}
        # refused now rather than behind an hour of scoring
        self.options = Generation(strategy, tau=tau, steps=steps, **length).fitting(model.objective)
        self.model, self.batch_tokens = model, batch_tokens

    def __repr__(self) -> str:
        """What the text depends on, for the store's keys."""
        return repr(self.options)

    def job(
        self,
        prompt: list[int],
        options: dict[str, Any],
        end_of_text: str | None,
        *,
        seed: int,
        default_new: int,
        max_length: int,
    ) -> Job:
        """A request of the harness, whose options are transformers'; the prompt keeps what leaves room for the text."""
        from lm_eval.models.utils import normalize_gen_kwargs

        known = dict(normalize_gen_kwargs(options, default_new))
        new, until = int(known.pop("max_gen_toks")), known.pop("until")
        sampled = known.pop("do_sample")
        chosen = {name: known.pop(name) for name in SAMPLING if name in known}
        if known:
            raise ConfigError(
                f"generation option {', '.join(known)} is not known here; "
                f"known are until, max_gen_toks, do_sample, {', '.join(SAMPLING)}"
            )
        if max_length <= new:
            raise ConfigError(
                f"max_gen_toks={new} leaves no room for a prompt in max_length={max_length}; "
                "ask for less: --gen_kwargs max_gen_toks=..."
            )
        if not sampled:
            chosen["temperature"] = 0.0
        try:
            sampling = SamplingParams(**chosen, seed=seed if sampled else 0)
        except ValueError as error:
            raise ConfigError(f"generation option {error}") from error
        prompt = prompt or [self.model.tokenizer.eod]
        kept = tuple(prompt[-(max_length - new) :])
        ends = [] if end_of_text is None else [end_of_text]
        return Job(kept, new, (*until, *ends), sampling, truncated=len(kept) < len(prompt))

    def generate(self, jobs: Sequence[Job], text_of: Callable[[Sequence[int]], str]) -> list[list[int]]:
        """The tokens of each job, on every rank."""
        order = sorted(range(len(jobs)), key=lambda index: -len(jobs[index].prompt) - jobs[index].max_new_tokens)
        mine = order[self.model.replica :: self.model.replicas]
        found: dict[int, list[int]] = {}
        if mine:
            longest = max(len(jobs[index].prompt) + jobs[index].max_new_tokens for index in mine)
            rows = max(1, min(MOST_ROWS, 4 * self.batch_tokens // longest))
            requests = [self._request(jobs[index], text_of) for index in mine]
            results, _ = continue_requests(self.model, requests, replace(self.options, batch_size=rows))
            found = {index: result.tokens for index, result in zip(mine, results, strict=True)}
        if self.model.replicas > 1:
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, found if self.model.leads else {})
            found = {index: tokens for part in everyone for index, tokens in part.items()}
        return [found[index] for index in range(len(jobs))]

    def _request(self, job: Job, text_of: Callable[[Sequence[int]], str]) -> Request:
        stops, seen = [stop for stop in job.until if stop], 0
        # in tokens: a token has one byte at least, and a character can have several
        reach = max((len(stop.encode()) for stop in stops), default=0) + 3

        def stop(tokens: list[int]) -> int | None:
            nonlocal seen
            text, seen = text_of(tokens[max(0, seen - reach) :]), len(tokens)
            return len(tokens) if any(stop in text for stop in stops) else None

        return Request(
            list(job.prompt),
            job.max_new_tokens,
            job.sampling,
            eos_ids=(self.model.tokenizer.eod,),
            stop=stop if stops else None,
        )
