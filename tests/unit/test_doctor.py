"""`card doctor`: planted faults get the right verdict, a healthy machine none; ranks' findings come together."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from card_megatron.cli import main
from card_megatron.planning.doctor import expected, hardware, limits, network, software, storage
from card_megatron.planning.doctor.check import Check, Findings, merge, worst
from card_megatron.planning.doctor.examine import Order, examine_all, examine_here, rank_check, slow_rank_checks
from card_megatron.testing import run_distributed

SMALL = ["--storage-mb", "4", "--network-mb", "1"]


def doctor(
    *arguments: object, path: Path | None = None, files: int | None = None, **environment: str
) -> tuple[int, Any]:
    """(exit code, {name: check}) of a real `card doctor --json`."""

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    done = subprocess.run(
        [sys.executable, "-m", "card_megatron", "doctor", "--json", *SMALL, *map(str, arguments)],
        **dict(capture_output=True, text=True, timeout=120, preexec_fn=limit),
        env=os.environ | ({"PYTHONPATH": str(path)} if path else {}) | {"OMP_NUM_THREADS": "1"} | environment,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert report["verdict"] == ("fail" if done.returncode else report["verdict"])
    return done.returncode, checks


def doctor_here(capsys, *arguments: object) -> tuple[int, Any]:
    """The same in this process, where torch is imported already."""
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--json", *SMALL, *map(str, arguments)])
    return left.value.code, {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}


# ---------------------------------------------------------------- one machine


def test_a_laptop_is_healthy_and_nothing_is_left_behind(tmp_path, capsys):
    code, checks = doctor_here(capsys, "--run-dir", tmp_path / "runs" / "card")
    assert code == 0 and "fail" not in {check["verdict"] for check in checks.values()}
    assert checks["megatron-core"]["value"] == "0.16.1" and checks["psutil"]["verdict"] == "ok"
    if not checks["GPUs"]["value"].startswith("none"):
        return
    assert checks["GPUs"]["verdict"] == "ok", "a machine without a GPU is no fault"
    assert list(tmp_path.iterdir()) == []


def test_planted_faults(tmp_path):
    """The wrong apex, half of a Transformer Engine, few open files, missing GPUs, a slow variable, no folder."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("")
    (tmp_path / "file").write_text("")
    run_dir = tmp_path / "file" / "run"
    more = {"CUDA_LAUNCH_BLOCKING": "1"}
    code, checks = doctor("--run-dir", run_dir, "--expect-gpus", 64, path=tmp_path, files=200, **more)
    assert code == 1
    verdicts = {name: check["verdict"] for name, check in checks.items() if check["verdict"] != "ok"}
    assert verdicts == {
        **{"apex": "fail", "Transformer Engine": "fail", "open files": "fail", "GPUs": "fail"},
        **{"run directory": "fail", "environment": "warn"},
    }
    assert all(checks[name]["remedy"] for name in verdicts)
    assert str(tmp_path / "apex") in checks["apex"]["value"] and "pip uninstall apex" in checks["apex"]["remedy"]
    assert "without its torch extension" in checks["Transformer Engine"]["value"]
    assert checks["open files"]["value"].startswith("200 ") and str(run_dir) in checks["run directory"]["value"]


def test_the_table_ends_with_what_to_do(tmp_path, capsys):
    from card_megatron.commands.doctor import show

    bad = Check("limits", "open files", "200", "at least 1,024", "fail", "ulimit -n 1024")
    show([bad, Check("software", "torch", "2.13.0")], [Findings(0, "node1", (bad,))])
    text = capsys.readouterr().out
    assert "fail open files: ulimit -n 1024" in text and text.endswith("1 rank on 1 host: 1 ok, 0 warn, 1 fail\n")


@pytest.mark.parametrize(
    ("built", "driver", "available", "verdict", "words"),
    [
        (None, None, False, "ok", "CPU build"),
        ("13.0", None, False, "ok", "no NVIDIA driver"),
        (None, "580.82.07", False, "fail", "CPU build"),
        ("13.0", "570.86.10", True, "fail", "driver 580"),
        ("12.8", "535.54.03", True, "ok", "driver 535"),
        ("12.8", "470.57.02", True, "fail", "driver 525"),
        ("13.0", "580.82.07", False, "fail", "sees no GPU"),
    ],
)
def test_torch_cuda_and_the_driver(built, driver, available, verdict, words):
    check = software.cuda_fits_driver(built, driver, available)
    assert check.verdict == verdict and words in f"{check.value} {check.expected}"


@pytest.mark.parametrize(("version", "verdict"), [("2.11.0", "ok"), ("2.8.0", "warn"), ("2.12.1", "warn")])
def test_versions_of_transformer_engine(monkeypatch, tmp_path, version, verdict):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("")
    (tmp_path / "transformer_engine_torch.cpython-311.so").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(software, "version_of", lambda package: version)
    check = software._engine(gpu=True)
    assert (check.value, check.verdict) == (version, verdict)


def test_missing_psutil_and_another_megatron_fail(monkeypatch):
    monkeypatch.setattr(software, "version_of", lambda package: None if package == "psutil" else "0.15.0")
    assert software._psutil().verdict == software._megatron().verdict == "fail"
    assert "hang" in software._psutil().remedy


def test_declared_dependencies_that_are_not_met_are_named(monkeypatch):
    found = software.version_of
    monkeypatch.setattr(software, "version_of", lambda package: "2.5.1" if package == "torch" else found(package))
    check = software._own_dependencies()
    assert check.verdict == "fail" and "torch>=2.6 (found: 2.5.1)" in check.value


def test_limits():
    assert limits.open_files((1024, 4096), gpu=False).verdict == "ok"
    assert [limits.open_files((soft, 1 << 20), gpu=True).verdict for soft in (1024, 8192, 65536)] == [
        "fail",
        "warn",
        "ok",
    ]
    assert limits.locked_memory(8 << 20, infiniband=False).verdict == "ok"
    assert limits.locked_memory(8 << 20, infiniband=True).verdict == "fail"
    assert limits.locked_memory(resource.RLIM_INFINITY, infiniband=True).verdict == "ok"
    assert limits.stack(1 << 20).verdict == "warn"
    free = [(64 << 20, False), (10 << 20, False), (64 << 20, True), (2 << 30, True), (16 << 30, True)]
    verdicts = [limits.judge_shared_memory(64 << 30, amount, gpu).verdict for amount, gpu in free]
    assert verdicts == ["ok", "warn", "fail", "warn", "ok"]


# as `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` prints it
HEALTHY = (
    "0, NVIDIA H100 80GB HBM3, 580.82.07, 81559, 1, 33, 345, 1980, Enabled, 0, 700.00, 700.00, 16, 16, "
    "0x0000000000000001"
)


@pytest.mark.parametrize(
    ("old", "new", "verdict", "words"),
    [
        ("", "", "ok", "1980 MHz"),
        ("Enabled, 0,", "Enabled, 3,", "fail", "3 uncorrected ECC errors"),
        ("Enabled, 0,", "Disabled, [N/A],", "warn", "ECC is off"),
        ("0x0000000000000001", "0x0000000000000048", "fail", "hardware slowdown, hardware thermal slowdown"),
        ("81559, 1,", "81559, 40000,", "warn", "40000 of 81559 MiB"),
        ("700.00, 700.00", "500.00, 700.00", "warn", "power limited to 500 of 700 W"),
        ("16, 16,", "8, 16,", "warn", "PCIe x8 of x16"),
    ],
)
def test_a_sick_gpu(old, new, verdict, words):
    gpus = hardware.parse_gpus(HEALTHY.replace(old, new) + "\n")
    count, gpu = hardware.gpu_checks(gpus, expected=1)
    assert count.value == "1 x NVIDIA H100 80GB HBM3" and count.verdict == "ok"
    assert gpu.verdict == verdict and words in gpu.value and bool(gpu.remedy) == (verdict != "ok")


def test_missing_and_mixed_gpus():
    assert next(iter(hardware.gpu_checks(None, None))).verdict == "ok"
    assert next(iter(hardware.gpu_checks(hardware.parse_gpus(HEALTHY), 8))).verdict == "fail"
    mixed = hardware.parse_gpus(HEALTHY + "\n" + HEALTHY.replace("H100 80GB HBM3", "A100-SXM4-80GB"))
    assert next(iter(hardware.gpu_checks(mixed, None))).verdict == "warn"


def test_an_nvidia_smi_that_fails_is_a_failure(tmp_path, monkeypatch):
    """What a driver that has lost its GPUs prints, and where: on standard output."""
    said = "Unable to determine the device handle for GPU 0000:18:00.0: Unknown Error"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{said}'\nexit 255\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = examine_here(Order(tmp_path), lambda text: None, storage=False)
    (check,) = [check for check in found if check.name == "GPUs"]
    assert check.verdict == "fail" and said in check.value and "drain the host" in check.remedy


def test_multiplication_against_the_data_sheet():
    assert hardware.matmul_check(650, 989e12).verdict == "ok"
    assert hardware.matmul_check(300, 989e12).verdict == "warn"
    assert hardware.matmul_check(0.01, None).verdict == "ok"
    assert hardware.matmul_tflops(seconds=0.01) > 0


def test_storage_verdicts(tmp_path):
    assert storage.judged("storage", "read", 99.0, "MB/s", floor=storage.SLOW, fail=storage.TOO_SLOW).verdict == "warn"
    assert storage.judged("storage", "read", 4.0, "MB/s", floor=storage.SLOW, fail=storage.TOO_SLOW).verdict == "fail"
    names = [check.name for check in storage.storage_checks(tmp_path, 4)]
    assert names == ["free space", "write + fsync", "read", "file locks"] and list(tmp_path.iterdir()) == []
    (failed,) = storage.storage_checks(Path("/proc/card_doctor"), 4)
    assert failed.verdict == "fail"


# ---------------------------------------------------------------- many ranks, by themselves


def test_clocks_that_differ_name_the_wrong_one():
    hosts = ["node1", "node1", "node2", "node3"]
    assert network.clock_check([0.0, 0.001, 0.02, -0.1], hosts).verdict == "ok"
    late = network.clock_check([0.0, 0.0, -3.0, 0.1], hosts)
    assert (late.verdict, late.where) == ("warn", "rank 2 on node2")
    # rank 0's own clock is the wrong one
    wrong = network.clock_check([0.0, 90.0, 90.0, 90.1], hosts)
    assert (wrong.verdict, wrong.where) == ("fail", "rank 0 on node1")


def test_a_slow_link_names_both_ends():
    hosts = ["a", "a", "b", "b"]
    nvlink, network_link = expected.inside_link("NVIDIA H100 80GB HBM3"), expected.across_link([400.0], 1)
    speeds = {(0, 1): 350.0, (1, 2): 45.0, (2, 3): 20.0, (0, 2): 10.0, (1, 3): 44.0}
    inside, across = network.link_checks(speeds, hosts, inside=nvlink, across=network_link)
    assert (inside.verdict, inside.where) == ("fail", "rank 2 on b to rank 3 on b")  # 20 of 450 GB/s: not NVLink
    assert (across.verdict, across.where) == ("warn", "rank 0 on a to rank 2 on b")  # 10 of 50 GB/s
    # all of them above the floor, and one far below its like
    tcp = expected.across_link([], 1)
    (odd,) = network.link_checks({(0, 2): 1.0, (1, 3): 2.9, (1, 2): 3.0}, hosts, inside=nvlink, across=tcp)
    assert odd.verdict == "warn" and "as the others" in odd.expected and odd.where.startswith("rank 0 on a")


def test_links_are_measured_in_turns_without_a_rank_twice():
    links = network.pairs(16, 8)
    assert len(links) == 15 + 8 and (3, 11) in links
    taken = network.turns(links)
    assert sorted(pair for turn in taken for pair in turn) == sorted(links)
    assert all(len({rank for pair in turn for rank in pair}) == 2 * len(turn) for turn in taken) and len(taken) <= 5


def test_rates_of_infiniband_ports(tmp_path):
    for port, (state, rate) in enumerate([("4: ACTIVE", "400 Gb/sec (4X NDR)"), ("1: DOWN", "10 Gb/sec (4X SDR)")]):
        folder = tmp_path / f"mlx5_{port}" / "ports" / "1"
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
        (folder / "rate").write_text(f"{rate}\n")
    assert expected.infiniband_gbits(str(tmp_path)) == [400.0]
    assert expected.across_link([400.0] * 8, 8).floor == 200.0 and expected.across_link([400.0] * 8, 2).floor == 50.0


def test_findings_of_many_ranks_become_one_line_each():
    def rank(number: int, host: str, version: str = "2.13", files: str = "ok") -> Findings:
        checks = (Check("software", "torch", version, alike=True), Check("limits", "files", "1", verdict=files))
        return Findings(number, host, checks)

    same = merge([rank(0, "a"), rank(1, "a"), rank(2, "b")])
    assert [check.name for check in same] == ["torch", "files"] and worst(same) == "ok"
    torch_version, differs, files = merge(
        [rank(0, "a"), rank(1, "a"), rank(2, "b", "2.12", "fail"), rank(3, "b", files="warn")]
    )
    assert torch_version.verdict == "ok" and differs.verdict == "fail"
    assert (differs.value, differs.expected, differs.where) == ("2.12", "2.13", "rank 2 on b")
    assert (files.verdict, files.where) == ("fail", "rank 2 on b")


def test_slow_ranks_and_missing_ranks():
    (slow,) = slow_rank_checks([600.0, 610.0, 300.0, 605.0], ["a", "a", "b", "b"])
    assert (slow.verdict, slow.where) == ("warn", "rank 2 on b")
    assert slow_rank_checks([1.0, 0.9], ["a", "b"])[0].verdict == "ok"
    assert rank_check(1, 16).verdict == "fail" and rank_check(16, 16).verdict == "ok"


# ---------------------------------------------------------------- many ranks, real ones


def examine_planted(run_dir: str) -> list[dict[str, Any]]:
    """Two ranks; the second has another torch, a clock that is ahead, a name without an address and another disk."""
    import torch.distributed as dist

    second = dist.get_rank() == 1
    host = "no-such-host.invalid" if second else socket.gethostname()
    socket.gethostname = lambda: host
    now, found = time.time, software.version_of
    if second:
        network.time.time = lambda: now() + 100.0
        software.version_of = lambda package: "0.15.0" if package == "megatron-core" else found(package)
    order = Order(Path(run_dir) / ("b" if second else "a"), storage_mb=4, network_mb=1, expect_ranks=4)
    checks = merge(examine_all(order, lambda what: None))
    return [dataclasses.asdict(check) for check in checks]


def test_two_real_ranks_with_planted_faults(tmp_path):
    first, second = run_distributed(examine_planted, 2, str(tmp_path), timeout=120)
    assert first == second, "every rank hears everything"
    bad = {check["name"]: check for check in first if check["verdict"] == "fail"}
    assert set(bad) == {
        *("megatron-core", "megatron-core on all ranks", "dependencies", "ranks", "own host name"),
        *("run directory on all hosts", "clock skew"),
    }
    named = "rank 1 on no-such-host.invalid"
    places = (
        "megatron-core",
        "megatron-core on all ranks",
        "own host name",
        "run directory on all hosts",
    )
    assert {bad[name]["where"] for name in places} == {named}
    assert bad["clock skew"]["where"].endswith(f" and {named}"), "of two clocks nobody knows which is wrong"
    assert 99.0 < float(bad["clock skew"]["value"].split()[0]) < 101.0
    names = {check["name"] for check in first}
    assert {"all-reduce over all hosts", "p2p between hosts", "slowest rank"} <= names
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_this_machine(tmp_path):
    code, checks = doctor("--distributed", "--nproc", 2, "--expect-ranks", 2, "--run-dir", tmp_path / "runs")
    assert code == 0, checks
    assert checks["ranks"]["value"] == "2" and checks["clock skew"]["verdict"] == "ok"
    for name in ("all-reduce in the host", "p2p in a host"):
        assert float(checks[name]["value"].split()[0]) > 0 and "(gloo)" in checks[name]["expected"]


def test_a_rank_that_never_comes_is_a_failure_and_not_a_hang(tmp_path, monkeypatch, capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    code, checks = doctor_here(capsys, "--distributed", "--timeout", "3", "--run-dir", tmp_path / "runs")
    assert code == 1 and checks["process group"]["verdict"] == "fail"
    assert f"127.0.0.1:{port}" in checks["process group"]["remedy"] and checks["python"]["verdict"] == "ok"


def test_distributed_alone_says_how_to_start():
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--distributed"])
    assert "torchrun or srun" in str(left.value) and "--nproc 2" in str(left.value)
