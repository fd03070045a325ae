"""What profilers, timers, determinism and the doctor do on real GPUs. Skipped, and unverified, elsewhere."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from card_megatron.platform import capabilities
from card_megatron.testing import run_distributed
from tests.curves import tiny_config
from tests.gpu.test_h100 import BF16, needs_two_gpus, train_records

pytestmark = [pytest.mark.h100, pytest.mark.timeout(900)]


def test_deterministic_runs_are_bit_identical(corpus, tmp_path):
    runs = []
    for name in ("one", "other"):
        config = tiny_config(corpus, tmp_path / name, *BF16, "--train.deterministic=true")
        records = run_distributed(train_records, 1, config, timeout=600)[0]
        runs.append([(record["loss"], record["grad_norm"]) for record in records])
    assert runs[0] == runs[1]


def test_a_trace_has_kernels_and_sections(corpus, tmp_path):
    profile = ["--profile.tool=torch", "--profile.step_start=5", "--profile.step_end=6", "--profile.timers=true"]
    records = run_distributed(train_records, 1, tiny_config(corpus, tmp_path, *BF16, *profile), timeout=600)[0]
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "rank_0.steps_5-6.json.gz").read_bytes()))["traceEvents"]
    kinds = {event.get("cat") for event in trace}
    assert {"kernel", "user_annotation"} <= kinds
    seconds = records[-1]["seconds"]
    assert all(seconds[name]["mean"] > 0 for name in ("forward", "backward", "optimizer"))
    assert seconds["forward"]["mean"] + seconds["backward"]["mean"] < records[-1]["step_seconds"]


@pytest.mark.skipif(shutil.which("nsys") is None, reason="needs Nsight Systems")
def test_nsys_captures_the_marked_steps(tmp_path):
    report = tmp_path / "report"
    mock = ["--data.mock=true", "--model.vocab_size=500", "--train.train_iters=8", f"--run_dir={tmp_path / 'run'}"]
    steps = ["--profile.tool=nsys", "--profile.step_start=4", "--profile.step_end=5"]
    capture = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop", "-o", str(report)]
    command = ["nsys", "profile", *capture, sys.executable, "-m", "card_megatron", "train", *mock, *steps]
    subprocess.run(command, check=True, timeout=600)
    assert report.with_suffix(".nsys-rep").stat().st_size > 0


@needs_two_gpus
def test_the_slow_gpu_of_two_is_named(corpus, tmp_path):
    from tests.distributed.test_instruments import train_each
    from tests.runs import events

    slow = ["--logging.interval=3", "--train.train_iters=9", "--train.micro_batch_size=4"]
    config = tiny_config(corpus, tmp_path, *BF16, *slow)
    run_distributed(train_each, 2, [(config, 1, "forward")], timeout=600)
    (event,) = events(tmp_path, "straggler")
    assert event["ranks"] == [1]


@needs_two_gpus
def test_a_hang_in_nccl_leaves_the_last_collectives_for_torchs_analyser(corpus, tmp_path):
    from tests.unit.test_watchdog import HANG, ends, start

    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    run_dir, store = tmp_path / "run", tmp_path / "store"
    ends(*(start(HANG, corpus, run_dir, "sleeps", store, **rank) for rank in ranks))
    folder = run_dir / "flight_recorder"
    assert all((folder / f"rank_{rank}").stat().st_size > 0 for rank in range(2))
    subprocess.run(["torchfrtrace", "--prefix", "rank_", str(folder)], check=True, timeout=120)


def test_doctor_knows_this_machine(tmp_path, capsys):
    """Reported, and judged only where a fault would be ours: every figure is there and has a verdict."""
    count = capabilities().gpus
    command = [sys.executable, "-m", "card_megatron", "doctor", "--json", "--expect-gpus", str(count)]
    more = ["--distributed", "--nproc", str(count), "--network-mb", "256"] if count > 1 else []
    done = subprocess.run([*command, *more, "--run-dir", str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert done.stdout, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    wanted = {"GPUs", "GPU 0", "CUDA", "NCCL", "matrix multiplication"}
    assert wanted | ({"all-reduce in the host", "p2p in a host"} if count > 1 else set()) <= set(checks)
    with capsys.disabled():
        for check in checks.values():
            print(f"\n{check['verdict']:<5}{check['name']}: {check['value']} ({check['expected']})", end="")
    (Path(tmp_path) / "doctor.json").write_text(done.stdout)
