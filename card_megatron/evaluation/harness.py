"""`card`, a model of the lm-evaluation-harness: a Megatron checkpoint in any layout, or an exported folder.

Texts become ids, and are cut, as the harness's own `hf` model does it, so the scores are those of `hf` on the exported
folder. mdlm and bd3lm, which have no exact likelihood, are scored by a bound (evaluation.bound); what the harness calls
greedy is then that one pass over a continuation of masks gets all of it right.

Every rank gives the harness the same answers to all requests: the harness sees one process, and the ranks share the
work below it (evaluation.scorer). Its own way, a share of the documents for each rank with repeated ones to fill up,
is where scores begin to depend on the number of ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lm_eval.models  # noqa: F401  # before ours: the registry takes in the harness's own only while it is empty
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from card_megatron.config.errors import ConfigError
from card_megatron.convert.tokenizer import fast_backend
from card_megatron.decoding.model import OpenModel, open_model
from card_megatron.evaluation.bound import BoundScorer, scorer_for
from card_megatron.evaluation.continuations import Continuations
from card_megatron.evaluation.store import Store, request_key

CHUNK_PASSES = 16
"""Passes' worth of tokens that a replica scores between two writes to the store."""
MC_SAMPLES = 32
"""Of the noise of mdlm and bd3lm, for each request."""
IGNORED = ("batch_size", "max_batch_size", "device")
"""What the harness gives every model: batches are made by tokens here, and ranks have a device."""

Pair = tuple[list[int], list[int]]


@register_model("card")
class CardLM(TemplateLM):
    """`--model card --model_args checkpoint=PATH,tensor=2,...`; the arguments are open_model's, and those below."""

    def __init__(
        self,
        checkpoint: str | None = None,
        *,
        model: OpenModel | None = None,
        tensor: int = 1,
        pipeline: int = 1,
        ema: bool = False,
        dtype: str | None = None,
        tokenizer: str | None = None,
        max_length: int | None = None,
        batch_tokens: int = 8192,
        prefix_token_id: int | None = None,
        strategy: str | None = None,
        K: int | None = None,
        tau: float = 0.9,
        steps: int | None = None,
        seed: int = 0,
        mc_samples: int = MC_SAMPLES,
        store: Store | None = None,
        **others: Any,
    ):
        super().__init__()
        if unknown := [name for name in others if name not in IGNORED]:
            raise ConfigError(f"model_args has {', '.join(unknown)}, which `card` does not know; see CardLM.__init__")
        if model is None:
            if checkpoint is None:
                raise ConfigError("model_args needs checkpoint=PATH, a run, a checkpoint or an exported folder")
            stack = contextlib.ExitStack()
            atexit.register(stack.close)  # the harness has no end of a model
            model = stack.enter_context(
                open_model(checkpoint, tensor=tensor, pipeline=pipeline, ema=ema, dtype=dtype, tokenizer=tokenizer)
            )
        self.model, self.store, self.ours = model, store, model.tokenizer
        self.scorer = scorer_for(model, max_length=max_length, batch_tokens=batch_tokens, samples=mc_samples, seed=seed)
        self.errors: list[float] = []
        """Standard error of each log-likelihood that is a bound, in nats."""
        self.fast = fast_backend(model.tokenizer)
        """The tokenizer as it is exported: what it calls the beginning of a text, and how it puts bytes together."""
        self.custom_prefix = prefix_token_id
        self.continuations = Continuations(
            model, strategy=strategy, K=K, tau=tau, batch_tokens=batch_tokens, steps=steps
        )
        self.seed = seed
        self.truncated = 0
        """Requests that lost tokens on their left, resumed ones included."""
        self.answered = 0
        """Requests that were answered, by whatever rank or from the store."""

    # ------------------------------------------------------------ tokens

    @property
    def eot_token_id(self) -> int:
        return self.ours.eod

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is: the end of a text, as in training, and as `hf` has it on an exported folder."""
        return self.ours.eod if self.custom_prefix is None else self.custom_prefix

    @property
    def max_length(self) -> int:
        return self.scorer.max_length

    @property
    def max_gen_toks(self) -> int:
        return 256

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """No special token is added: an exported tokenizer adds none, and a text cannot spell one."""
        return self.ours.encode_batch([string])[0].tolist()

    def tok_decode(self, tokens: Sequence[int]) -> str:
        return self.fast.decode(list(tokens), skip_special_tokens=True)

    # ------------------------------------------------------------ likelihoods

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        texts = [request.args for request in requests]
        pairs = self.encode_pairs(texts)
        return self._loglikelihood_tokens([(text, *pair) for text, pair in zip(texts, pairs, strict=True)])

    def encode_pairs(self, texts: Sequence[tuple[str, str]]) -> list[Pair]:
        """TemplateLM's rule, with each text encoded once: white space between the parts belongs to the second, and
        the context's own ids cut the ids of both together."""
        moved = []
        for context, continuation in texts:
            stripped = context.rstrip()
            moved.append((stripped, context[len(stripped) :] + continuation) if context else (context, continuation))
        ids = self._encode_all(text for context, continuation in moved for text in (context, context + continuation))
        pairs = []
        for (context, continuation), (given, _) in zip(moved, texts, strict=True):
            whole = ids[context + continuation]
            if not given:
                prefix = self.prefix_token_id
                pairs.append(([prefix], whole) if whole[:1] != [prefix] else (whole[:1], whole[1:]))
            else:
                # a context of white space alone has no ids of its own
                pairs.append((ids[context] or [self.prefix_token_id], whole[len(ids[context]) :]))
        return pairs

    def _encode_all(self, texts: Iterable[str]) -> dict[str, list[int]]:
        distinct = list(dict.fromkeys(texts))
        return dict(zip(distinct, (ids.tolist() for ids in self.ours.encode_batch(distinct)), strict=True))

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        answers = self._scores(pairs, disable_tqdm, endings=True)
        for (text, _, _), answer in zip(requests, answers, strict=True):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """In windows of max_length, each token predicted once: the harness's own cut."""
        ids = self._encode_all(request.args[0] for request in requests)
        windows: list[list[Pair]] = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    token_list=ids[request.args[0]],
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        scores = iter(self._scores([pair for document in windows for pair in document], disable_tqdm))
        totals = [sum(next(scores)[0] for _ in document) for document in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _scores(self, pairs: list[Pair], silent: bool, *, endings: bool = False) -> list[tuple[float, bool]]:
        """One answer for each pair; equal pairs are scored once, and what the store has is not scored at all.

        `endings` are compared with each other, so those of one context share their noise where the model has a bound.
        """
        facts, more = [str(self.max_length)], {}
        if isinstance(self.scorer, BoundScorer):
            more = {"common_noise": endings, "greedy": endings}
            facts.append(repr((self.scorer.samples, self.scorer.seed, endings)))
        self.truncated += sum(len(context) + len(rest) > self.max_length + 1 for context, rest in pairs)
        self.answered += len(pairs)
        keys = [request_key("score", *pair, *facts) for pair in pairs]
        open_pairs = {key: pair for key, pair in zip(keys, pairs, strict=True) if key not in (self.store or ())}
        refuse_different(open_pairs)
        answers: dict[str, tuple[float, bool, float]] = {}

        def score(part: list[str], progress: Callable[[int, int], None]) -> list[tuple[str, Any]]:
            found = self.scorer.score([open_pairs[key] for key in part], progress=progress, **more)
            answers.update((key, (one.logprob, one.greedy, one.error)) for key, one in zip(part, found, strict=True))
            return [(key, answers[key]) for key in part]

        sizes = {key: len(context) + len(rest) for key, (context, rest) in open_pairs.items()}
        self._in_chunks(score, sizes, CHUNK_PASSES * self.scorer.batch_tokens, "scoring", silent)
        if self.store is not None:
            answers.update((key, tuple(self.store[key])) for key in keys if key not in answers)
        if more:
            self.errors += [answers[key][2] for key in keys]
        return [answers[key][:2] for key in keys]

    # ------------------------------------------------------------ generated text

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """With our block decoders: greedy text of `ar` and `verify` is what transformers generates."""
        ids = self._encode_all(request.args[0] for request in requests)
        jobs = [
            self.continuations.job(
                *(ids[request.args[0]], request.args[1], self.fast.id_to_token(self.ours.eod)),
                seed=self.seed + place,
                default_new=self.max_gen_toks,
                max_length=self.max_length,
            )
            for place, request in enumerate(requests)
        ]
        self.truncated += sum(job.truncated for job in jobs)
        self.answered += len(jobs)
        keys = [request_key("generate", job.prompt, repr((job, self.continuations))) for job in jobs]
        open_jobs = {key: job for key, job in zip(keys, jobs, strict=True) if key not in (self.store or ())}
        refuse_different(open_jobs)
        answers: dict[str, str] = {}

        def generate(part: list[str], progress: Callable[[int, int], None]) -> list[tuple[str, Any]]:
            tokens = self.continuations.generate([open_jobs[key] for key in part], self.tok_decode)
            answers.update(
                (key, open_jobs[key].cut(self.tok_decode(found))) for key, found in zip(part, tokens, strict=True)
            )
            return [(key, answers[key]) for key in part]

        sizes = {key: len(job.prompt) + job.max_new_tokens for key, job in open_jobs.items()}
        self._in_chunks(generate, sizes, CHUNK_PASSES * self.scorer.batch_tokens // 4, "generating", disable_tqdm)
        if self.store is not None:
            answers.update((key, self.store[key]) for key in keys if key not in answers)
        for request, key in zip(requests, keys, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answers[key])
        return [answers[key] for key in keys]

    # ------------------------------------------------------------ chunks

    def _in_chunks(
        self,
        work: Callable[[list[str], Callable[[int, int], None]], list[tuple[str, Any]]],
        sizes: dict[str, int],
        most: int,
        what: str,
        silent: bool,
    ) -> None:
        """All at once without a store; else chunk by chunk, and what is done is kept."""
        parts = [list(sizes)] if self.store is None else chunks(sizes, most * self.model.replicas)
        shown = self.model.speaks and not silent
        with tqdm(total=len(sizes), desc=what, unit="req", disable=None if shown else True) as bar:
            for part in parts:
                before = int(bar.n)

                def progress(done: int, total: int, before: int = before, part: list[str] = part) -> None:
                    # of this replica: the others are as far
                    bar.update(before + done * len(part) // max(1, total) - bar.n)

                finished = work(part, progress)
                bar.update(before + len(part) - bar.n)
                if self.store is not None:
                    self.store.add(finished)

    def likelihood(self) -> dict[str, Any]:
        """What the log-likelihoods so far are: exact, or bounds by so many noise samples and so far off on average."""
        samples = self.scorer.samples if isinstance(self.scorer, BoundScorer) else None
        return {
            "likelihood": "bound" if samples else "exact",
            "mc_samples": samples,
            "mean_loglikelihood_error": sum(self.errors) / len(self.errors) if self.errors else None,
        }

    def get_model_info(self) -> dict[str, Any]:
        """The harness asks at the end, and keeps it in its own results."""
        names = {"model_path": str(self.model.path), "objective": self.model.objective, "truncated": self.truncated}
        return names | self.likelihood()


def chunks(sizes: dict[str, int], most: int) -> list[list[str]]:
    """Cut keys, in their order, where the sum of their sizes reaches `most`."""
    found: list[list[str]] = []
    size = most
    for key, more in sizes.items():
        if size >= most:
            found.append([])
            size = 0
        found[-1].append(key)
        size += more
    return found


def refuse_different(keys: Iterable[str]) -> None:
    """Ranks that disagree about the work would wait for each other for ever."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = hashlib.sha256("".join(keys).encode()).hexdigest()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if len(set(everyone)) > 1:
        raise ConfigError(
            "the ranks have different requests; remove the harness's cache of each rank (--use_cache) or leave it out"
        )
