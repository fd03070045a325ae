"""Tasks of the harness on an open model: results that say where they come from, and a start that can be repeated."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from card_megatron.config.errors import ConfigError
from card_megatron.decoding.model import OpenModel
from card_megatron.evaluation.lm_eval_main import import_harness
from card_megatron.evaluation.report import markdown_table, shown, write_json, write_text
from card_megatron.version import __version__

KIND = "tasks"
VERSIONS = ("lm_eval", "transformers", "datasets", "megatron-core")
BOOTSTRAPS = 1000
"""Resamplings for the standard error of a metric that is no mean, such as a perplexity."""


def evaluate_tasks(
    model: OpenModel,
    tasks: Sequence[str],
    *,
    data: Path | None = None,
    num_fewshot: int | None = None,
    limit: float | None = None,
    output: Path | None = None,
    gen_kwargs: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    opened: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Results, on the rank that speaks; None on the others. All ranks must call it.

    `settings` are CardLM's (max_length, batch_tokens, strategy, K, tau, steps, seed, mc_samples), `opened` the options
    that the model was opened with. With `output` finished requests are kept beside it until the results are written.
    """
    import_harness()
    import lm_eval

    from card_megatron.evaluation.harness import CardLM
    from card_megatron.evaluation.store import Store, model_identity
    from card_megatron.evaluation.tasks import load_tasks, task_manager

    began = time.perf_counter()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # what it would say of our own data sets helps nobody
    refuse_no_text(model)
    loaded = load_tasks(tasks, data)
    store = None
    if output is not None:
        identity = model_identity(model.path, tokenizer=model.tokenizer.fingerprint(), **(opened or {}))
        store = Store(scores_path(output), identity, writes=model.speaks)
    lm = CardLM(model=model, store=store, **(settings or {}))
    found = lm_eval.simple_evaluate(
        lm,
        tasks=loaded.tasks,
        num_fewshot=num_fewshot,
        limit=limit,
        gen_kwargs=gen_kwargs,
        log_samples=False,
        task_manager=task_manager(()),  # the tasks are loaded already; its own would read all of the harness's
        bootstrap_iters=BOOTSTRAPS if model.speaks else 0,
    )
    shares = gathered({"requests": lm.scorer.scored_here, "tokens": lm.scorer.forwarded})
    if not model.speaks or found is None:
        return None
    results = {
        "kind": KIND,
        "checkpoint": str(model.path),
        "objective": model.objective,
        **lm.likelihood(),
        "config": {
            **{"tasks": list(tasks), "data": None if data is None else str(data), "num_fewshot": num_fewshot},
            **{"limit": limit, "gen_kwargs": gen_kwargs, **(settings or {}), **(opened or {})},
            "max_length": lm.max_length,
        },
        "results": {name: metrics_of(values) for name, values in found["results"].items()},
        "shots": {name: found["n-shot"].get(name) for name in found["results"] if name in found["n-shot"]},
        "documents": {name: count["effective"] for name, count in found["n-samples"].items()},
        "task_versions": found["versions"],
        "no_local_data": {name: str(path) for name, path in loaded.missing.items()},
        "truncated": lm.truncated,
        "requests": lm.answered,
        "requests_per_rank": [share["requests"] for share in shares],
        "tokens_forwarded_per_rank": [share["tokens"] for share in shares],
        "resumed": 0 if store is None else store.found,
        "seconds": time.perf_counter() - began,
        "versions": versions(),
    }
    if output is not None and store is not None:
        write_json(output, results)
        write_text(output.with_suffix(".md"), table(results))
        store.remove()
    return results


def scores_path(output: Path) -> Path:
    """Where finished requests are kept until the evaluation is done."""
    return output.with_name(f"{output.name}.scores.jsonl")


def refuse_no_text(model: OpenModel) -> None:
    """A run on mock data has no tokenizer, and a tokenizer of another vocabulary gives ids that mean nothing."""
    if model.tokenizer.kind == "mock":
        raise ConfigError(f"{model.path} was trained on mock data: it has no text; give a tokenizer: --tokenizer")
    if model.tokenizer.vocab_size > model.backend.vocab_size:
        raise ConfigError(
            f"the tokenizer has {model.tokenizer.vocab_size} pieces and the model {model.backend.vocab_size} rows; "
            "give the tokenizer that the model was trained with: --tokenizer"
        )


def gathered(value: Any) -> list[Any]:
    """Every rank's value."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def metrics_of(values: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """{"acc": {"value", "stderr"}} of the harness's {"acc,none", "acc_stderr,none"}; another filter is named."""
    found: dict[str, dict[str, float | None]] = {}
    for name, value in values.items():
        metric, comma, filtered = name.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        error = values.get(f"{metric}_stderr,{filtered}")
        key = metric if filtered == "none" else f"{metric} ({filtered})"
        found[key] = {"value": value, "stderr": error if isinstance(error, float) else None}
    return found


def versions() -> dict[str, str]:
    known = {"card_megatron": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in VERSIONS:
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known


def table(results: dict[str, Any]) -> str:
    rows = [
        [name, metric, str(results["shots"].get(name, "")), str(results["documents"].get(name, "")), shown(**cell)]
        for name, metrics in results["results"].items()
        for metric, pair in metrics.items()
        for cell in [{"value": pair["value"], "error": pair["stderr"], "digits": 4}]
    ]
    rows += [[name, "no local data", "", "", path] for name, path in results["no_local_data"].items()]
    lines = [markdown_table(["task", "metric", "shots", "documents", "value ± stderr"], rows, left=2)]
    if results["likelihood"] == "bound":
        error = results["mean_loglikelihood_error"]
        lines.append(
            f"log-likelihoods are bounds (ELBO) by {results['mc_samples']} noise samples each"
            + (f", with a standard error of {error:.3f} nats on average\n" if error is not None else "\n")
        )
    if results["truncated"]:
        lines.append(
            f"{results['truncated']} of {results['requests']} requests were longer than "
            f"{results['config']['max_length']} tokens and lost their beginning\n"
        )
    return "\n".join(lines)
