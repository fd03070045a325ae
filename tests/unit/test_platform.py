"""The CPU platform answers for CUDA where there is none, and only there; capabilities tell the truth."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest
import torch

from card_megatron.platform import capabilities, install
from card_megatron.platform.adam import FusedAdam

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")


def run_python(code: str, *path: str) -> subprocess.CompletedProcess:
    """A fresh interpreter, because what a first import does cannot be undone in this one."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)


CHANGES = """
import sys, inspect, torch

def everything():
    places = (torch, torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.Tensor, torch.nn.Module)
    return {(place.__name__, key): inspect.getattr_static(place, key, None) for place in places for key in dir(place)}

before = everything()

def changes():
    after = everything()
    return {f"{place}.{key}" for (place, key), value in before.items() if after[place, key] is not value}
"""


# ---------------------------------------------------------------- when it acts


def test_importing_the_package_patches_nothing_and_leaves_megatron_alone():
    code = """
import card_megatron, card_megatron.config, card_megatron.objectives, card_megatron.platform, card_megatron.cli
import card_megatron.testing
assert "megatron" not in sys.modules
assert not changes(), changes()
card_megatron.platform.install()
assert {"torch.zeros", "torch.cuda.current_device", "Tensor.type"} <= changes(), "the test must see patches"
"""
    result = run_python(CHANGES + code)
    assert result.returncode == 0, result.stderr


def test_where_cuda_is_available_install_leaves_torch_alone_and_gives_megatron_an_adam_that_resumes():
    """Without Transformer Engine and apex torch's AdamW would train there, and save what cannot be loaded."""
    code = """
import megatron.core.optimizer, megatron.core.transformer.moe.moe_utils  # they make torch wrap some of itself
before = everything()
torch.cuda.is_available = before["torch.cuda", "is_available"] = lambda: True
from card_megatron.platform import install
assert install() is False
from card_megatron.platform.adam import FusedAdam
from megatron.core.optimizer import distrib_optimizer
assert distrib_optimizer.Adam is sys.modules["megatron.core.optimizer"].Adam is FusedAdam
assert distrib_optimizer.USING_APEX_OPTIMIZER
assert not changes(), changes()
"""
    result = run_python(CHANGES + code)
    assert result.returncode == 0, result.stderr


def test_install_after_megatron_is_refused_with_the_remedy():
    result = run_python("import megatron.core\nfrom card_megatron.platform import install\ninstall()")
    assert result.returncode == 1
    assert "RuntimeError: megatron.core was imported before card_megatron.platform.install()" in result.stderr
    assert "call install() first" in result.stderr


def test_installing_again_changes_nothing_and_cuda_stays_unavailable():
    places = (torch, torch.cuda, torch.Tensor, torch.nn.Module)
    before = [dict(vars(place)) for place in places]
    assert install() is True and install() is True
    assert [dict(vars(place)) for place in places] == before
    assert torch.cuda.is_available() is False


# ---------------------------------------------------------------- the six parts


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.tensor([1.0, 2.0], device=torch.device("cuda", 0)),
        lambda: torch.empty(2, device=torch.cuda.current_device(), pin_memory=True),
        lambda: torch.randn_like(torch.ones(2), device="cuda:0"),
        lambda: torch.ones(2).cuda(non_blocking=True),
        lambda: torch.ones(2).to("cuda"),
        lambda: torch.ones(2).to(device="cuda", dtype=torch.bfloat16),
        lambda: torch.ones(2).pin_memory(),
        lambda: torch.nn.Linear(2, 2).cuda().weight,
        lambda: torch.nn.Linear(2, 2).to("cuda").weight,
    ],
)
def test_device_names_mean_the_cpu(make):
    assert make().device.type == "cpu"


def test_moving_keeps_its_other_meanings():
    ones = torch.ones(2)
    assert ones.to("cuda") is ones
    assert ones.to("cuda", torch.float64).dtype == torch.float64
    assert ones.to(torch.bfloat16).dtype == torch.bfloat16


def test_streams_are_done_and_events_tell_the_time():
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        start.record()
        time.sleep(0.01)
        end.record(side)
    torch.cuda.current_stream().wait_stream(side)
    side.record_event().synchronize()
    torch.cuda.synchronize()
    assert side.query() and end.query()
    assert 10 <= start.elapsed_time(end) < 10_000
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_reserved() == 0
    with torch.cuda.nvtx.range("named"):
        assert not torch.cuda.is_current_stream_capturing()


def test_random_state_comes_back():
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)
    torch.cuda.default_generators[0].manual_seed(5)
    assert torch.equal(torch.rand(4, device="cuda"), first)


@pytest.mark.usefixtures("one_rank")
def test_megatrons_random_tracker_repeats_itself_and_keeps_out_of_the_way():
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    torch.manual_seed(5)
    outside = torch.rand(4)
    torch.manual_seed(5)
    with tracker.fork():
        inside = torch.rand(4)
    assert torch.equal(torch.rand(4), outside), "a fork must leave the default stream where it was"
    assert not torch.equal(inside, outside)
    with tracker.fork():
        assert not torch.equal(torch.rand(4), inside), "a second fork goes on where the first ended"
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(4), inside)


def test_only_megatrons_optimizers_see_cuda_type_names():
    def type_seen_by(module, dtype):
        return eval("tensor.type()", {"__name__": module, "tensor": torch.ones(1, dtype=dtype)})

    assert type_seen_by("megatron.core.optimizer.clip_grads", torch.float32) == "torch.cuda.FloatTensor"
    assert type_seen_by("megatron.core.optimizer.optimizer", torch.bfloat16) == "torch.cuda.BFloat16Tensor"
    assert type_seen_by("megatron.core.transformer.module", torch.float32) == "torch.FloatTensor"
    assert torch.ones(1).type() == "torch.FloatTensor"
    assert torch.ones(1).type(torch.float64).dtype == torch.float64


def test_megatrons_fused_functions_run_as_they_are_written():
    from megatron.core.jit import jit_fuser

    @jit_fuser
    def compiled(x):
        return torch.compiler.is_compiling()

    assert compiled(torch.ones(1)) is False


# ---------------------------------------------------------------- Adam


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (7,))]


def groups(params):
    return [dict(params=params[:1], weight_decay=0.1), dict(params=params[1:], weight_decay=0.0, lr=3e-3)]


def descend(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        for number, param in enumerate(params):
            param.grad = torch.sin(param.detach() * (step + 1) + number)
        optimizer.step()


@pytest.mark.parametrize(("adam_w_mode", "twin"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_fused_adam_is_torchs_with_the_step_in_the_group(adam_w_mode, twin):
    ours, theirs = parameters(), parameters()
    settings = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    optimizer = FusedAdam(groups(ours), adam_w_mode=adam_w_mode, **settings)
    descend(optimizer, ours, 6)
    descend(twin(groups(theirs), **settings), theirs, 6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
        assert set(optimizer.state[a]) == {"exp_avg", "exp_avg_sq"}
    assert [group["step"] for group in optimizer.param_groups] == [6, 6]


def test_fused_adam_continues_from_its_state():
    whole, halves = parameters(), parameters()
    descend(FusedAdam(groups(whole), lr=1e-2), whole, 6)
    first = FusedAdam(groups(halves), lr=1e-2)
    descend(first, halves, 3)
    second = FusedAdam(groups(halves), lr=1e-2)
    second.load_state_dict(first.state_dict())
    descend(second, halves, 3, first=3)
    assert all(map(torch.equal, whole, halves))


def test_megatron_takes_our_adam():
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    assert optimizer.Adam is distrib_optimizer.Adam is FusedAdam
    assert not optimizer.USING_PYTORCH_OPTIMIZER


# ---------------------------------------------------------------- capabilities and ranks


def test_capabilities_are_honest_here():
    machine = capabilities()
    assert (machine.device, machine.gpus, machine.cuda) == ("cpu", 0, False)
    assert machine.transformer_engine is machine.apex is machine.nccl is machine.peak_flops is None
    assert 1 <= machine.cpu_cores <= os.cpu_count()


def add_package(folder, name, version):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise RuntimeError('looked at, never imported')\n")
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_only_working_builds_of_apex_and_transformer_engine_count(tmp_path):
    code = """
import dataclasses, json
from card_megatron.platform import capabilities
print(json.dumps(dataclasses.asdict(capabilities())))
"""

    def found():
        machine = json.loads(run_python(code, tmp_path).stdout)
        return machine["apex"], machine["transformer_engine"]

    add_package(tmp_path, "apex", "0.9.10.dev0")  # PyPI's web toolkit
    add_package(tmp_path, "transformer_engine", "2.11.0")  # the core library alone
    assert found() == (None, None)
    (tmp_path / "amp_C.py").touch()  # what NVIDIA's build compiles
    (tmp_path / "transformer_engine_torch.cpython-311-x86_64-linux-gnu.so").touch()
    assert found() == ("0.9.10.dev0", "2.11.0")


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Tesla T4", None),
    ],
)
def test_the_peak_is_that_of_the_very_model_or_unknown(name, peak):
    assert dataclasses.replace(capabilities(), device=name).peak_flops == peak


def test_a_device_context_still_reaches_the_factories():
    """transformers builds models on the meta device; a factory that ignores it leaves buffers uninitialised."""
    with torch.device("meta"):
        assert {torch.empty(2).device.type, torch.arange(3).device.type, torch.ones(1).device.type} == {"meta"}
    assert torch.empty(2).device.type == "cpu"
