"""What a machine lacks, or has half of, is said before training: from records of machines that are not here."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest

from card_megatron.config import ConfigError
from card_megatron.config.machine_checks import hardware_problems, refuse_machine, require_engine
from card_megatron.platform import Capabilities, capabilities
from card_megatron.training.preflight import _refuse_broken_engine
from tests.configs import load

H100 = Capabilities(
    device="NVIDIA H100 80GB HBM3",
    gpus=8,
    transformer_engine="2.11.0",
    apex=None,
    nccl="2.27.7",
    mpi4py=None,
    cpu_cores=96,
    compute_capability=(9, 0),
    cuda_version=(13, 0),
)
A100 = dataclasses.replace(H100, device="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0))
B200 = dataclasses.replace(H100, device="NVIDIA B200", compute_capability=(10, 0))

REFUSALS = [
    ("precision=fp8_tensorwise", A100, r"needs compute capability 8\.9 .*A100.* has compute capability 8\.0; use bf16"),
    ("precision=fp8_delayed", A100, r"fp8_delayed needs compute capability 8\.9"),
    (
        "precision=fp8_blockwise",
        dict(cuda_version=(12, 8)),
        r"needs .*CUDA 12\.9; .*built with CUDA 12\.8; use fp8_tens",
    ),
    ("precision=fp8_blockwise", A100, r"needs compute capability 9\.0 \(Hopper\)"),
    ("precision=mxfp8", H100, r"mxfp8 needs Blackwell .*capability 9\.0; use fp8_tensorwise or fp8_blockwise"),
    ("precision=mxfp8", dict(compute_capability=(12, 0)), r"mxfp8 needs Blackwell"),
    (
        "precision=fp8_tensorwise",
        dict(transformer_engine="2.12.0"),
        r"Engine 2\.12\.0 is not one .*from 2\.9, before 2\.12",
    ),
    ("precision=fp8_tensorwise", dict(transformer_engine="1.13.0"), r"Engine 1\.13\.0 is not one"),
    (
        "",
        dict(transformer_engine="2.12rc1"),
        r"Engine 2\.12rc1 is not one .*layers are its; pip .*transformer-engine\[",
    ),
    ("", dict(transformer_engine="mine"), r"Engine mine is not one"),
    ("", dict(transformer_engine_problem="half installed"), r"^half installed$"),
    ("", dict(apex_problem="a web toolkit"), r"^a web toolkit$"),
    (
        "transformer.gradient_accumulation_fusion=true; model.spec=local",
        H100,
        r"with local layers needs NVIDIA's apex with its CUDA extensions .*leave it out, or use model\.spec=te",
    ),
    (
        "transformer.gradient_accumulation_fusion=true",
        dict(transformer_engine=None),
        r"with local layers needs NVIDIA's apex",
    ),
]


def machine_of(found: Capabilities | dict) -> Capabilities:
    return dataclasses.replace(H100, **found) if isinstance(found, dict) else found


@pytest.mark.parametrize(("overrides", "found", "expected"), REFUSALS, ids=lambda value: str(value)[:40])
def test_what_a_machine_cannot_run_is_refused(overrides, found, expected):
    with pytest.raises(ConfigError) as caught:
        refuse_machine(load(overrides), machine_of(found))
    assert re.search(expected, str(caught.value))


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ("precision=fp8_tensorwise", H100),
        ("precision=fp8_delayed", dict(compute_capability=(8, 9))),
        ("precision=fp8_blockwise", H100),
        ("precision=mxfp8", B200),
        ("precision=bf16", A100),
        ("", dict(transformer_engine="2.11rc1")),
        ("model.spec=local", dict(transformer_engine="2.12.0")),
        ("EMULATED", A100),
        ("transformer.gradient_accumulation_fusion=true", H100),
        ("transformer.gradient_accumulation_fusion=true; model.spec=local", dict(apex="0.1", wgrad_fusion=True)),
        ("precision=fp8_tensorwise", capabilities()),  # check() says that there is no GPU: nothing is said twice
    ],
)
def test_what_it_can_run_is_not(overrides, found):
    assert not list(hardware_problems(load(overrides), machine_of(found)))


def test_several_lacks_are_shown_at_once():
    machine = dataclasses.replace(A100, apex_problem="one", transformer_engine_problem="two")
    with pytest.raises(ConfigError) as caught:
        refuse_machine(load("precision=fp8_tensorwise"), machine)
    assert str(caught.value).count("\n  - ") == 3


def test_an_image_needs_an_engine_that_fits():
    require_engine(H100)
    with pytest.raises(ConfigError, match=r"Transformer Engine 2\.8\.0: .*2\.9 up to, not with, 2\.12; choose another"):
        require_engine(dataclasses.replace(H100, transformer_engine="2.8.0"))
    with pytest.raises(ConfigError, match="Transformer Engine is not here"):
        require_engine(capabilities())


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_an_engine_that_does_not_load_is_refused_with_the_build(error, tmp_path, monkeypatch):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(f"raise {error}('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match=r"2\.11\.0 is installed but does not load \(undefined symbol.*build it again: p"
    ):
        _refuse_broken_engine(H100)
    _refuse_broken_engine(dataclasses.replace(H100, gpus=0))


# ---------------------------------------------------------------- half-installed libraries, as packages on a path


def command(folder, *arguments: str) -> subprocess.CompletedProcess:
    """`card` as a user calls it, with a folder of packages before all others."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    line = [sys.executable, "-m", "card_megatron", *arguments]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("package", "expected"),
    [
        ("transformer_engine", r"Transformer Engine None is half installed: .*; pip install .*or pip uninstall"),
        (
            "apex",
            r"the package apex None here is not NVIDIA's .*PyPI's apex is a web toolkit.*; pip uninstall apex, or",
        ),
    ],
)
def test_half_installed_libraries_are_named_before_megatron_is_imported(tmp_path, package, expected):
    (tmp_path / package).mkdir()
    # what Megatron's own import would meet: neither an ImportError that it expects, nor a reason
    (tmp_path / package / "__init__.py").write_text("raise FileNotFoundError('no shared object')\n")
    shown = command(tmp_path, "config", "--data.mock=true", "--model.vocab_size=500", "--train.train_iters=10")
    assert shown.returncode != 0 and "Traceback" not in shown.stderr
    assert re.search(expected, " ".join(shown.stderr.split()))


def test_what_was_found_of_a_build_is_told(tmp_path):
    """A working build of apex, as far as looking can tell."""
    code = (
        "import dataclasses, json; from card_megatron.platform import capabilities; "
        "print(json.dumps(dataclasses.asdict(capabilities())))"
    )
    for name in ("apex", "amp_C", "fused_weight_gradient_mlp_cuda"):
        (tmp_path / f"{name}.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert found["wgrad_fusion"] and found["apex_problem"] is None
