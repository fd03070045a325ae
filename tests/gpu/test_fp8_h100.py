"""FP8 on a Hopper GPU: kernels, weights kept in FP8, Adam, loss, speed. Skipped, and unverified, elsewhere."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from card_megatron.config.precision import FP8
from card_megatron.platform import capabilities
from card_megatron.testing import run_distributed
from tests.curves import tiny_config
from tests.gpu.test_h100 import (
    BF16,
    LAYOUTS,
    differences,
    needs_engine,
    needs_two_gpus,
    report,
    speed_config,
    train_records,
)

pytestmark = [pytest.mark.h100, pytest.mark.timeout(1800), needs_engine]

HOPPER = [preset for preset in FP8 if preset != "mxfp8"]
# FP8's shapes: 128 of everything on every rank, also with two of them
SHAPE = [*BF16[:3], "--model.num_attention_heads=4", "--model.kv_channels=128", "--model.num_query_groups=2"]
STEPS = "--train.train_iters=50"


@pytest.fixture(scope="module")
def in_bf16(corpus, tmp_path_factory):
    config = tiny_config(corpus, tmp_path_factory.mktemp("bf16"), *SHAPE, STEPS, *BF16[3:], "--model.spec=te")
    return run_distributed(train_records, 1, config, timeout=900)[0]


@pytest.mark.parametrize("preset", HOPPER)
def test_fp8_follows_the_bf16_curve(preset, in_bf16, corpus, tmp_path, capsys, record_property):
    """The median step's loss within 1% of bf16's; emulated FP8 against fp32 is benchmarks/fp8_gap.py's."""
    config = tiny_config(corpus, tmp_path, *SHAPE, STEPS, BF16[3], f"--precision={preset}")
    records = run_distributed(train_records, 1, config, timeout=900)[0]
    gaps = differences(records, in_bf16, "loss")
    report(capsys, record_property, **{f"{preset}_median_gap": statistics.median(gaps), f"{preset}_worst": max(gaps)})
    assert records[-1]["loss"] < records[0]["loss"]
    assert statistics.median(gaps) < 0.01
    assert max(gaps) > 0, "not one step differs from bf16: FP8 did not run"
    kernels = json.loads((Path(config.run_dir) / "kernels.json").read_text())
    assert kernels["fp8"].startswith("TE ") and kernels["Adam"] == kernels["norm"] == "TE"


def inspect_state(config) -> dict[str, object]:
    """What Megatron really built, and what one update does to weights that are kept in FP8."""
    from megatron.core.fp8_utils import is_float8tensor

    from card_megatron.model import unwrap
    from card_megatron.platform import ranks_from_environment
    from card_megatron.training.preflight import preflight
    from card_megatron.training.state import build_state
    from card_megatron.training.step import train_step

    state = build_state(preflight(config, ranks_from_environment()))
    (model,) = unwrap(state.model)
    first, inner = (model.decoder.layers[number].mlp.linear_fc1.weight for number in (0, 1))
    before = inner.detach().float().cpu()
    main = [param for group in state.optimizer.param_groups for param in group["params"]]
    for _ in range(2):
        train_step(state)
    return dict(
        adam=type(state.optimizer.chained_optimizers[0].optimizer).__module__,
        edge_in_fp8=is_float8tensor(first),
        inner_in_fp8=is_float8tensor(inner),
        moved=float((inner.detach().float().cpu() - before).abs().max()),
        spread=float(before.std()),
        main_dtypes={str(param.dtype) for param in main if param is not None},
    )


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_two_gpus)])
def test_weights_are_kept_and_gathered_in_fp8_with_fp32_behind_them(ranks, corpus, tmp_path):
    config = tiny_config(corpus, tmp_path, *SHAPE, BF16[3], "--precision=fp8_tensorwise", "--train.micro_batch_size=1")
    for found in run_distributed(inspect_state, ranks, config, timeout=600):
        assert "transformer_engine" in str(found["adam"])
        assert found["inner_in_fp8"] and not found["edge_in_fp8"]
        assert found["main_dtypes"] == {"torch.float32"}
        # keyed initial weights, rounded; had the fp32 weights another origin, the first update would replace them
        assert found["moved"] < 0.2 * found["spread"]  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_emulation_rounds_as_the_kernel_does(dtype):
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    from card_megatron.model.fp8_emulation import E4M3, round_to_fp8

    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    kind = tex.DType.kFloat8E4M3 if dtype == E4M3 else tex.DType.kFloat8E5M2
    quantizer = Float8CurrentScalingQuantizer(kind, device=x.device)
    theirs = quantizer(x).dequantize(dtype=torch.float32)
    torch.testing.assert_close(round_to_fp8(x, dtype), theirs, rtol=1e-5, atol=0)


@needs_two_gpus
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus_follow_the_one_gpu_curve_in_fp8(layout, corpus, tmp_path_factory):
    """As in bf16, each loss within 1%: scales of a rank's own part differ as much as FP8 rounds."""
    options = [*SHAPE, BF16[3], "--precision=fp8_tensorwise"]
    one = tiny_config(corpus, tmp_path_factory.mktemp("one"), *options)
    two = tiny_config(corpus, tmp_path_factory.mktemp("two"), *options, *LAYOUTS[layout])
    oracle = run_distributed(train_records, 1, one, timeout=600)[0]
    assert max(differences(run_distributed(train_records, 2, two, timeout=600)[0], oracle, "loss")) < 0.01


@needs_two_gpus
def test_communication_overlaps_without_changing_the_curve(corpus, tmp_path_factory):
    overlapped = ["--parallel.tp_comm_overlap=true", "--parallel.overlap_grad_reduce=true"]
    options = [*SHAPE, *BF16[3:], *LAYOUTS["TP2+SP"]]
    plain = tiny_config(corpus, tmp_path_factory.mktemp("plain"), *options)
    ours = tiny_config(corpus, tmp_path_factory.mktemp("ours"), *options, *overlapped)
    oracle = run_distributed(train_records, 2, plain, timeout=600)[0]
    assert max(differences(run_distributed(train_records, 2, ours, timeout=600)[0], oracle, "loss")) < 0.01


@pytest.mark.parametrize(
    "options",
    [
        ["--model.transformer.cross_entropy_loss_fusion=true"],
        ["--model.transformer.cross_entropy_loss_fusion=true", "--model.transformer.cross_entropy_fusion_impl=te"],
        ["--model.transformer.gradient_accumulation_fusion=true"],
        ["--model.transformer.cuda_graph_impl=local"],
    ],
    ids=["fused cross entropy", "TE cross entropy", "wgrad fusion", "CUDA graphs"],
)
def test_a_fused_kernel_does_not_change_the_curve(options, in_bf16, corpus, tmp_path):
    config = tiny_config(corpus, tmp_path, *SHAPE, STEPS, *BF16[3:], "--model.spec=te", *options)
    records = run_distributed(train_records, 1, config, timeout=900)[0]
    assert max(differences(records, in_bf16, "loss")) < 0.01


def test_report_throughput_of_every_preset(tmp_path, capsys, record_property):
    """Tokens a second on the 110M model, side by side: reported, not judged."""
    figures = {}
    for preset in ("bf16", *HOPPER):
        config = speed_config(tmp_path / preset, f"--precision={preset}")
        figures[preset] = run_distributed(train_records, 1, config, timeout=900)[0][-1]["tokens_per_second"]
    ratios = {f"{preset}_by_bf16": figures[preset] / figures["bf16"] for preset in HOPPER}
    assert capabilities().cuda
    report(capsys, record_property, **figures, **ratios)
