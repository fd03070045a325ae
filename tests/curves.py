"""Train a tiny model in a layout and keep everything that must not depend on the layout."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from card_megatron.config import RunConfig, load_config

BASE = [
    *("--model.num_layers=4", "--model.hidden_size=32", "--model.ffn_hidden_size=64", "--model.num_attention_heads=4"),
    *("--model.num_query_groups=2", "--model.max_position_embeddings=64", "--data.sequence_length=32"),
    *("--train.train_iters=20", "--train.global_batch_size=8", "--train.micro_batch_size=2"),
    *("--optimizer.lr=1e-3", "--optimizer.lr_warmup_iters=2", "--data.num_workers=0"),
    *("--logging.interval=1", "--logging.tensorboard=false", "--eval.interval=0", "--eval.at_start=false"),
]


def tiny_config(data_dir: str | Path, run_dir: str | Path, *overrides: str) -> RunConfig:
    """A model small enough to train 20 steps in a second or two, on the data that write_corpus() wrote."""
    sources = [f"--data.train=[{data_dir}/first, {data_dir}/second]", f"--data.tokenizer={data_dir}/tokenizer.model"]
    config, _ = load_config([*BASE, *sources, f"--run_dir={run_dir}", *overrides])
    return config


def write_corpus(folder: Path) -> Path:
    """Two small .bin/.idx sources and a tokenizer, made from text that every Python has."""
    from card_megatron.data.preprocess import build_indexed
    from card_megatron.data.python_docs import python_documents
    from card_megatron.data.tokenizer_training import train_sentencepiece
    from card_megatron.data.tokenizers import load_tokenizer

    documents = [text[:600] for text in python_documents()[:240]]
    tokenizer = load_tokenizer(train_sentencepiece(documents, folder / "tokenizer.model", vocab_size=500))
    build_indexed(documents[:150], tokenizer, folder / "first")
    build_indexed(documents[150:], tokenizer, folder / "second")
    return folder


@dataclasses.dataclass
class Curve:
    """One rank's view of a run."""

    losses: list[float]
    grad_norms: list[float]
    samples: list[tuple[int, int, int, bytes, bytes]]
    """(place in the run, context-parallel rank, its size, tokens, weights) as the model got them."""
    validation: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Metrics of the trained model on each validation set, where the configuration has some."""


def train_curve(config: RunConfig) -> Curve:
    """Train in the process group that is there; every rank returns its view."""
    from megatron.core import parallel_state

    from card_megatron.platform import ranks_from_environment
    from card_megatron.training import step as step_module
    from card_megatron.training.evaluate import evaluate
    from card_megatron.training.metrics import read_report
    from card_megatron.training.preflight import preflight
    from card_megatron.training.state import build_state

    seen: list[tuple[int, int, int, bytes, bytes]] = []
    read = step_module.next_batch

    def remember(iterator):
        batch = read(iterator)
        rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        for row, index in enumerate(batch.index.tolist()):
            seen.append((index, rank, size, _bytes(batch.tokens[row]), _bytes(batch.weights[row])))
        return batch

    step_module.next_batch = remember
    try:
        state = build_state(preflight(config, ranks_from_environment()))
        curve = Curve([], [], seen)
        while state.consumed_samples < state.total_samples:
            result = step_module.train_step(state)
            torch.distributed.all_reduce(result.report)
            report = read_report(result.report.tolist(), config.objective.normalize)
            curve.losses.append(report["loss"])
            curve.grad_norms.append(result.grad_norm)
        step_module.next_batch = read  # validation samples are not the run's
        curve.validation = evaluate(state, state.datasets.validation, "validation")
        return curve
    finally:
        step_module.next_batch = read
        parallel_state.destroy_model_parallel()


def sample_hashes(curves: list[Curve]) -> dict[int, str]:
    """Hash of each whole sample, tokens and weights, put together from what the ranks of a run saw."""
    parts: dict[int, dict[int, tuple[int, bytes, bytes]]] = {}
    for curve in curves:
        for index, rank, size, tokens, weights in curve.samples:
            known = parts.setdefault(index, {}).setdefault(rank, (size, tokens, weights))
            assert known == (size, tokens, weights), f"two ranks saw sample {index} differently"
    return {index: _hash_whole(shares) for index, shares in sorted(parts.items())}


def _hash_whole(shares: dict[int, tuple[int, bytes, bytes]]) -> str:
    from card_megatron.model.attention import zigzag_positions

    size = next(iter(shares.values()))[0]
    whole = b""
    for place, dtype in ((1, np.int64), (2, np.float32)):
        joined = np.concatenate([np.frombuffer(shares[rank][place], dtype) for rank in range(size)])
        order = np.arange(len(joined))
        if size > 1:
            order = torch.cat([zigzag_positions(len(joined), size, rank) for rank in range(size)]).numpy()
        whole += joined[np.argsort(order)].tobytes()
    return hashlib.sha256(whole).hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def train_all(configs: dict[str, RunConfig]) -> dict[str, Any]:
    """Every configuration one after the other in one set of ranks; a failure is that configuration's result."""
    import traceback

    results: dict[str, Any] = {}
    for name, config in configs.items():
        try:
            results[name] = train_curve(config)
        except Exception:
            results[name] = traceback.format_exc()
    return results
