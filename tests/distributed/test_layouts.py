"""Every layout gives the one-process curve, from its own initialisation, and sees the very same noise."""

from __future__ import annotations

import pytest

from card_megatron.testing import run_distributed
from tests.curves import Curve, sample_hashes, tiny_config, train_all

TOLERANCE = 5e-6

TP, PP, VPP, CP, SP = (
    "--parallel.tensor_model_parallel_size=2",
    "--parallel.pipeline_model_parallel_size=2",
    "--parallel.virtual_pipeline_model_parallel_size=2",
    "--parallel.context_parallel_size=2",
    "--parallel.sequence_parallel=true",
)
ONE_ROW = "--train.micro_batch_size=1"  # so that a data-parallel rank still has four micro-batches
UNEVEN = "--parallel.pipeline_model_parallel_layout=Ettt|tL"
FIVE_LAYERS = "--model.num_layers=5"
UNTIED = ["--model.share_embeddings_and_output_weights=false", "--model.qk_layernorm=true", "--model.add_qkv_bias=true"]
BY_WEIGHTS = "--objective.normalize=weights"
MDLM, BD3LM = ["--objective.name=mdlm"], ["--objective.name=bd3lm", "--objective.block_size=8"]
RECOMPUTE = ["--model.recompute_granularity=full", "--model.recompute_method=uniform", "--model.recompute_num_layers=1"]

LAYOUTS: dict[int, dict[str, list[str]]] = {
    1: {
        "one process": [],
        "micro-batch 1": [ONE_ROW],
        "micro-batch 8": ["--train.micro_batch_size=8"],
        "2 workers": ["--data.num_workers=2"],
        "five layers": [FIVE_LAYERS],
        "untied": UNTIED,
        "by weights": [BY_WEIGHTS],
        "mdlm": MDLM,
        "bd3lm": BD3LM,
    },
    2: {
        "TP2": [TP],
        "TP2+SP": [TP, SP],
        "PP2": [PP],
        "PP2 uneven": [PP, UNEVEN],
        "PP2 five layers": [PP, FIVE_LAYERS],
        "PP2xVPP2": [PP, VPP],
        "CP2": [CP],
        "DP2": [ONE_ROW],
        "DP2 overlapped": [ONE_ROW, "--parallel.overlap_grad_reduce=true", "--parallel.overlap_param_gather=true"],
        "TP2 untied": [TP, *UNTIED],
        "TP2+SP recomputed": [TP, SP, *RECOMPUTE],
        "CP2 mdlm": [CP, *MDLM],
        "PP2xVPP2 mdlm": [PP, VPP, *MDLM],
        "TP2 mdlm": [TP, *MDLM],
        "TP2 bd3lm": [TP, *BD3LM],
        "TP2+SP bd3lm": [TP, SP, *BD3LM],
        "PP2xVPP2 bd3lm": [PP, VPP, *BD3LM],
        "DP2 bd3lm": [ONE_ROW, *BD3LM],
    },
    4: {
        "TP2xPP2": [TP, PP],
        "TP2+SPxPP2xVPP2": [TP, SP, PP, VPP],
        "TP2xDP2": [TP, ONE_ROW],
        "CP2xPP2": [CP, PP],
        "CP2xPP2 by weights": [CP, PP, BY_WEIGHTS],
        "TP4, 2 KV groups": ["--parallel.tensor_model_parallel_size=4"],
        "CP2xPP2 mdlm": [CP, PP, *MDLM],
        "TP2+SPxDP2 mdlm": [TP, SP, ONE_ROW, *MDLM],
        "TP2+SPxPP2 recomputed bd3lm": [TP, SP, PP, *RECOMPUTE, *BD3LM],
    },
}
OWN_ORACLES = ("five layers", "untied", "by weights", "bd3lm", "mdlm")
"""One-process runs of another model or loss: a layout whose name ends in one is compared with that one."""


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory) -> dict[str, list[Curve]]:
    """Layout -> the view of each rank: one set of processes for each world size."""
    results: dict[str, list[Curve]] = {}
    for world_size, layouts in LAYOUTS.items():
        configs = {
            name: tiny_config(corpus, tmp_path_factory.mktemp("run"), *validation_on(corpus), *overrides)
            for name, overrides in layouts.items()
        }
        ranks = run_distributed(train_all, world_size, configs, timeout=420)
        results |= {name: [views[name] for views in ranks] for name in layouts}
    return results


def validation_on(corpus) -> list[str]:
    """A validation set that does not fill its last micro-batches, in whatever layout."""
    return [f"--data.validation.second=[{corpus}/second]", "--eval.samples=13"]


def worst_difference(ours: list[float], oracle: list[float]) -> float:
    """Largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, oracle, strict=True))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [name for layouts in LAYOUTS.values() for name in layouts])
def test_layout_gives_the_one_process_curve(runs, layout):
    for view in runs[layout]:
        assert isinstance(view, Curve), view
    oracle = runs[next((name for name in OWN_ORACLES if layout.endswith(name)), "one process")][0]
    assert len(oracle.losses) == 20 and oracle.losses[-1] < oracle.losses[0]
    for view in runs[layout]:
        assert worst_difference(view.losses, oracle.losses) < TOLERANCE
        assert worst_difference(view.grad_norms, oracle.grad_norms) < TOLERANCE
        ours, theirs = view.validation["second"], oracle.validation["second"]
        assert ours["tokens"] == theirs["tokens"] == 13 * 32
        for metric in ("loss", "nll", "bound_nll" if layout.endswith(("mdlm", "bd3lm")) else "clean_nll"):
            assert ours[metric] == pytest.approx(theirs[metric], rel=TOLERANCE), metric
    assert sample_hashes(runs[layout]) == sample_hashes([oracle])


def test_every_sample_is_seen_once_and_noised(runs):
    hashes = sample_hashes(runs["one process"])
    assert list(hashes) == list(range(20 * 8))
    assert len(set(hashes.values())) == len(hashes)
