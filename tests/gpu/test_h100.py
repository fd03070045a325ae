"""What only real hardware can show: Transformer Engine, bf16 on NCCL, and speed. Skipped, and unverified, elsewhere."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from card_megatron.config import RunConfig, load_config
from card_megatron.model.block_attention import compiled_flex_attention, flex_mask, may_see
from card_megatron.objectives import OBJECTIVES
from card_megatron.platform import capabilities
from card_megatron.platform.adam import FusedAdam
from card_megatron.testing import run_distributed
from tests.curves import tiny_config

needs_engine = pytest.mark.skipif(
    capabilities().cuda and capabilities().transformer_engine is None,
    reason="needs Transformer Engine (docs/installation.md)",
)
needs_two_gpus = pytest.mark.skipif(capabilities().gpus == 1, reason="needs two GPUs")
pytestmark = [pytest.mark.h100, pytest.mark.timeout(1800)]

# heads of 64, sequences of 256: shapes that every attention kernel takes
BF16 = [
    *("--model.hidden_size=256", "--model.ffn_hidden_size=512", "--model.max_position_embeddings=256"),
    *("--data.sequence_length=256", "--precision.preset=bf16"),
]


# ---------------------------------------------------------------- Adam without Transformer Engine and apex


def test_our_adam_is_torchs_on_a_gpu():
    """It takes the place of torch's where Megatron would fall back to that, whose checkpoints cannot be loaded."""
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 300, device="cuda")) for _ in range(2))
    settings = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizers = FusedAdam([ours], **settings), torch.optim.AdamW([theirs], fused=True, **settings)
    for _ in range(5):
        for param, optimizer in zip((ours, theirs), optimizers, strict=True):
            param.grad = param.detach() ** 2
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert optimizers[0].param_groups[0]["step"] == 5


# ---------------------------------------------------------------- Transformer Engine


def token_losses(*overrides: str) -> torch.Tensor:
    """Each token's loss on fixed tokens, from keyed initial weights: the same whatever the layers are made of."""
    from card_megatron.model import build_model, build_transformer_config

    # weights much larger than usual: small ones give the loss of a uniform guess, whatever attention does
    large = ["--model.num_query_groups=2", "--model.init_method_std=0.1"]
    mock = ["--data.mock=true", "--model.vocab_size=512", "--train.train_iters=1"]
    config, _ = load_config([*BF16, *large, *mock, *overrides])
    model = build_model(config, build_transformer_config(config), mask_id=511)[0]
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(0, 511, (4, 256), generator=generator).cuda() for _ in range(2))
    tokens = tokens.repeat(1, OBJECTIVES[config.objective.name].copies)
    with torch.no_grad():
        return model(tokens, None, None, labels=labels).float().cpu()


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Root mean square difference, as a share of how much the losses differ from token to token."""
    return float((ours - theirs).pow(2).mean().sqrt() / theirs.std())


@needs_engine
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "kind",
    [
        [],
        ["--model.qk_layernorm=true", "--model.normalization=LayerNorm"],
        ["--objective.name=mdlm"],
        ["--objective.name=bd3lm"],
    ],
)
def test_transformer_engine_gives_the_local_layers_loss(kind):
    """Both round to bf16 (2^-8), at other places: 10%, where leaving out the causal mask gives 100%."""
    local, engine = token_losses("--model.spec=local", *kind), token_losses("--model.spec=te", *kind)
    assert difference(engine, local) < 0.1
    assert float(engine.mean()) == pytest.approx(float(local.mean()), rel=0.005)


# ---------------------------------------------------------------- block diffusion


@pytest.mark.parametrize(("length", "block_size"), [(256, 16), (200, 8), (128, 1)])
def test_compiled_flex_attention_equals_the_dense_mask(length, block_size):
    """Outputs and gradients of grouped queries in fp32; TF32 is off by default."""
    places = torch.arange(2 * length, device="cuda")
    dense = may_see(places[:, None], places[None, :], length=length, block_size=block_size)
    results = []
    for attend in (
        lambda q, k, v: compiled_flex_attention()(
            q, k, v, block_mask=flex_mask(length, block_size, q.device), enable_gqa=True
        ),
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True),
    ):
        generator = torch.Generator("cuda").manual_seed(0)
        q, k, v = (
            torch.randn(2, heads, 2 * length, 64, generator=generator, device="cuda").requires_grad_()
            for heads in (4, 2, 2)
        )
        out = attend(q, k, v)
        (out * torch.randn(out.shape, generator=generator, device="cuda")).sum().backward()
        results.append([out.detach(), q.grad, k.grad, v.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------- layouts on NCCL

LAYOUTS = {
    "TP2": ["--parallel.tensor_model_parallel_size=2"],
    "TP2+SP": ["--parallel.tensor_model_parallel_size=2", "--parallel.sequence_parallel=true"],
    "PP2": ["--parallel.pipeline_model_parallel_size=2"],
    "CP2": ["--parallel.context_parallel_size=2"],
    "DP2": ["--train.micro_batch_size=1"],
}


def train_records(config: RunConfig) -> list[dict[str, Any]]:
    """A whole run as one rank of those that are there; rank 0 returns its records."""
    from card_megatron.platform import ranks_from_environment
    from card_megatron.training.run import train_run

    ranks = ranks_from_environment()
    train_run(config, ranks, console=False)
    lines = (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines() if ranks.rank == 0 else []
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module", params=["local", pytest.param("te", marks=needs_engine)])
def one_gpu(request, corpus, tmp_path_factory):
    """(layer specification, records of 20 steps on one GPU)."""
    config = tiny_config(corpus, tmp_path_factory.mktemp("one"), *BF16, f"--model.spec={request.param}")
    return request.param, run_distributed(train_records, 1, config, timeout=600)[0]


@needs_two_gpus
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus_follow_the_one_gpu_curve_in_bf16(one_gpu, layout, corpus, tmp_path):
    """Each loss within 1%, the gradient norm within 2% in the median step.

    A layout changes the order of sums that bf16 rounds to 2^-8 = 0.4%, and 20 updates carry that on; the mean over
    2,048 tokens a step takes most of it out again (in bf16 on gloo: 0.3%, and norms 0.1%). Single norms say little:
    at samples that are almost all [MASK] even fp32 and bf16 are 30% apart. The faults that this is for cost more:
    batched p2p with an interleaved pipeline 3.5%, freed pipeline outputs 27%. fp32 is held to 5e-6 in
    tests/distributed.
    """
    spec, oracle = one_gpu
    config = tiny_config(corpus, tmp_path, *BF16, f"--model.spec={spec}", *LAYOUTS[layout])
    records = run_distributed(train_records, 2, config, timeout=600)[0]
    assert len(records) == len(oracle) == 20 and oracle[-1]["loss"] < oracle[0]["loss"]
    assert max(differences(records, oracle, "loss")) < 0.01
    assert statistics.median(differences(records, oracle, "grad_norm")) < 0.02


def differences(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], name: str) -> list[float]:
    """Relative difference of a figure at each step."""
    return [abs(a[name] / b[name] - 1) for a, b in zip(ours, theirs, strict=True)]


# ---------------------------------------------------------------- speed: reported, not judged

TURNS, WARM_UP = 20, 5


def speed_config(run_dir: Path, *overrides: str) -> RunConfig:
    """The paper's 110M model in bf16 on mock data: enough work that the GPU, not Python, sets the pace."""
    config, _ = load_config(
        [
            *("--preset=110m", "--data.mock=true", "--precision.preset=bf16", f"--run_dir={run_dir}"),
            *("--data.sequence_length=1024", "--model.max_position_embeddings=1024", "--train.train_tokens=null"),
            *("--train.micro_batch_size=8", "--train.global_batch_size=32", f"--train.train_iters={TURNS + WARM_UP}"),
            *("--optimizer.lr_warmup_iters=1", "--eval.at_start=false", "--eval.interval=0"),
            *(f"--logging.interval={WARM_UP}", "--logging.tensorboard=false", *overrides),
        ]
    )
    return config


def step_seconds(config: RunConfig) -> dict[str, float]:
    """Median seconds of CARD and ARM steps, in turns on one model: the objective only makes the data."""
    from card_megatron.objectives import Arm
    from card_megatron.platform import ranks_from_environment
    from card_megatron.training.preflight import preflight
    from card_megatron.training.state import build_state, training_data
    from card_megatron.training.step import train_step

    state = build_state(preflight(config, ranks_from_environment()))
    data = {"card": state.data}
    state.objective = Arm(config.objective, mask_id=state.objective.mask_id, eod_id=state.objective.eod_id)
    data["arm"] = training_data(state)
    times: dict[str, list[float]] = {name: [] for name in data}
    for _ in range(TURNS + WARM_UP):
        for name, state.data in data.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            train_step(state)
            torch.cuda.synchronize()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values[WARM_UP:]) for name, values in times.items()}


def report(capsys, record_property, **figures: float) -> None:
    """Shown on the console and kept in the XML report."""
    for name, value in figures.items():
        record_property(name, value)
    with capsys.disabled():
        print("\n" + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))


def test_report_card_step_by_arm_step(tmp_path, capsys, record_property):
    seconds = run_distributed(step_seconds, 1, speed_config(tmp_path), timeout=900)[0]
    report(capsys, record_property, **seconds, card_by_arm=seconds["card"] / seconds["arm"])


def test_report_mfu(tmp_path, capsys, record_property):
    last = run_distributed(train_records, 1, speed_config(tmp_path), timeout=900)[0][-1]
    assert last["mfu"] is not None, f"the peak of {capabilities().device} is not known"
    assert 0 < last["mfu"] < 1
    report(capsys, record_property, mfu=last["mfu"], tokens_per_second=last["tokens_per_second"])
