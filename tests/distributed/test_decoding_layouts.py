"""Megatron's model decodes the same text in every layout: that of its own forward pass without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from card_megatron.decoding.block import Confidence, autoregressive
from card_megatron.decoding.engine import Request, decode
from card_megatron.decoding.sampling import SamplingParams
from card_megatron.decoding.verify import Verify
from card_megatron.platform import Ranks, model_parallel
from card_megatron.testing import run_distributed
from card_megatron.training.run import train_run
from tests.curves import tiny_config
from tests.decoders import allowed, slow_ar

NEW = 12
LAYOUTS = {
    1: [("tied", 1, 1), ("scaled", 1, 1)],
    2: [("tied", 2, 1), ("tied", 1, 2), ("scaled", 2, 1), ("scaled", 1, 2)],
    4: [("tied", 2, 2), ("scaled", 4, 1)],
}
"""World size -> (model, tensor, pipeline). Four tensor ranks are more than the model has groups of keys."""
TRAIN = ["--train.train_iters=40", "--optimizer.lr=1e-2", "--checkpoint.interval=40"]
MODELS = {
    "tied": [],
    "scaled": [
        *(
            "--model.share_embeddings_and_output_weights=false",
            "--model.qk_layernorm=true",
            "--model.add_qkv_bias=true",
        ),
        *("--model.rotary_percent=0.5", "--model.rope_scaling=linear", "--model.rope_scaling_factor=2.0"),
    ],
}


@pytest.fixture(scope="module")
def checkpoints(corpus, tmp_path_factory) -> dict[str, Path]:
    """Two small models, trained for a second: their drafts are accepted now and then."""
    folders = {name: tmp_path_factory.mktemp("decoding") / name for name in MODELS}
    for name, overrides in MODELS.items():
        train_run(tiny_config(corpus, folders[name], *TRAIN, *overrides), Ranks(), console=False)
    return folders


@pytest.fixture(scope="module")
def texts(checkpoints) -> dict[tuple[str, int, int], list[dict[str, Any]]]:
    """(model, tensor, pipeline) -> what each rank decoded."""
    found = {}
    for world_size, layouts in LAYOUTS.items():
        ranks = run_distributed(decode_all, world_size, checkpoints, layouts, timeout=240)
        found |= {key: [views[key] for views in ranks] for key in ranks[0]}
    return found


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 40, 17, 30, 23, 9]
    return [torch.randint(3, vocab_size - 3, (length,), generator=generator).tolist() for length in lengths]


def decode_all(checkpoints: dict[str, Path], layouts: list[tuple[str, int, int]]) -> dict[tuple[str, int, int], Any]:
    """In the process group that is there: every model in every layout, by every strategy."""
    from card_megatron.checkpoint.source import open_source
    from card_megatron.inference import inference_config, load_model

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found: dict[tuple[str, int, int], Any] = {}
    for name, tensor, pipeline in layouts:
        source = open_source(checkpoints[name])
        config = inference_config(source.config, world_size=size, tensor=tensor, pipeline=pipeline)
        with model_parallel(Ranks(rank, size, rank), config.parallel):
            found[name, tensor, pipeline] = decode_each_way(load_model(source, config))
    return found


def decode_each_way(model) -> dict[str, Any]:
    from card_megatron.decoding.megatron_backend import MegatronBackend

    backend = MegatronBackend(model)
    vocab_size, mask_id = backend.vocab_size, 4
    sampled = [SamplingParams(temperature=0.9, top_k=40, repetition_penalty=1.1, seed=seed) for seed in range(6)]
    found: dict[str, Any] = {}
    for name, strategy, sampling in (
        ("ar", autoregressive(), None),
        ("verify", Verify(3, adaptive=False), None),
        ("branches", Verify(2, adaptive=False, branches=True), None),
        ("adaptive", Verify(4), None),
        ("block", Confidence(5, 0.3, 3), None),
        ("prefix", Confidence(5, 0.3, 3, commit="prefix"), None),
        ("ar sampled", autoregressive(), sampled),
        ("verify sampled", Verify(3, adaptive=False), sampled),
    ):
        requests = [
            Request(prompt, NEW, sampling[index] if sampling else SamplingParams(), eos_ids=(2,))
            for index, prompt in enumerate(prompts(vocab_size))
        ]
        results, stats = decode(backend, requests, strategy, mask_id=mask_id, batch_size=4)
        assert stats.widest <= strategy.width
        found[name] = [result.tokens for result in results]
        found[f"{name}: near ties"] = sum(result.near_ties for result in results)
        found[f"{name}: tokens per pass"] = stats.tokens_per_pass
        found["cache bytes"] = stats.cache_bytes
    if torch.distributed.get_world_size() == 1:
        found |= without_cache(model, backend, mask_id)
    return found


@torch.no_grad()
def without_cache(model, backend, mask_id: int) -> dict[str, Any]:
    """Megatron's own forward pass over whole rows: greedy texts, and how far the cached logits are from it."""
    import numpy as np

    def whole(tokens: list[int]) -> torch.Tensor:
        row = torch.tensor([tokens])
        return allowed(model(row, torch.arange(len(tokens))[None], None)[0], (mask_id,), backend.vocab_size)

    rows = prompts(backend.vocab_size)
    tokens = np.array([rows[1], rows[3] + rows[4][:10]])
    backend.reserve(2, 60)
    parts = []
    for start, stop in ((0, 20), (20, 21), (21, 28), (28, 40)):
        logits = backend.forward(tokens[:, start:stop], np.full(2, start), 0, None)
        parts.append(logits.view(2, stop - start, -1))
    cached = torch.cat(parts, dim=1)
    difference = max(
        float((allowed(mine, (), backend.vocab_size)[:, 5:] - whole(row.tolist())[:, 5:]).abs().max())
        for mine, row in zip(cached, tokens, strict=True)
    )
    return {"slow": [slow_ar(whole, prompt, NEW, eos=2) for prompt in rows], "difference": difference}


@pytest.mark.parametrize("model", MODELS)
def test_one_process_decodes_what_megatron_says_without_a_cache(texts, model):
    (alone,) = texts[model, 1, 1]
    assert alone["difference"] < 1e-5
    assert alone["ar: near ties"] == 0
    assert alone["ar"] == alone["slow"]
    for name in ("verify", "adaptive"):
        assert alone[name] == alone["ar"]
    assert alone["verify sampled"] == alone["ar sampled"]
    assert alone["verify: tokens per pass"] > 1.05
    assert alone["ar sampled"] != alone["ar"]
    assert alone["block: tokens per pass"] > 1.05


@pytest.mark.parametrize(("model", "tensor", "pipeline"), LAYOUTS[2] + LAYOUTS[4])
def test_every_layout_decodes_the_text_of_one_process_on_every_rank(texts, model, tensor, pipeline):
    (alone,) = texts[model, 1, 1]
    for view in texts[model, tensor, pipeline]:
        for name in ("ar", "verify", "adaptive", "block", "prefix", "ar sampled", "verify sampled"):
            assert view[name] == alone[name], name
        if tensor < 4:  # where two ranks hold the same group of keys
            assert view["cache bytes"] == alone["cache bytes"]
