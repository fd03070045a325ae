"""Builds: the bytes of Megatron whoever works on them, and after any kill; what is not whole or not ours is refused."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from card_megatron.cli import main as card
from card_megatron.config import ConfigError
from card_megatron.data import build as build_module
from card_megatron.data.build import build
from card_megatron.data.indexed import Indexed, read_manifest
from card_megatron.data.python_docs import python_documents
from card_megatron.data.shards import ReadOptions, finished
from card_megatron.data.tokenizers import BytesTokenizer, Tokenizer, load_tokenizer
from tests.curves import tiny_config

REPOSITORY = Path(__file__).parents[2]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))},
    "PYTHONPATH": str(REPOSITORY),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
SHARD = 20_000


# ---------------------------------------------------------------- the same text, its right bytes, and ways to build it


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [text[:3000] for text in python_documents()[:400]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, texts) -> list[str]:
    """The texts in files of several kinds; most of them in one."""
    folder = tmp_path_factory.mktemp("inputs")
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    (folder / "1.jsonl").write_bytes(b"".join(lines[:320]))
    (folder / "2.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[320:360])))
    for number, text in enumerate(texts[360:], start=100):
        (folder / f"{number}.txt").write_text(text)
    return [str(folder / name) for name in ("1.jsonl", "2.jsonl.gz", "*.txt")]


@pytest.fixture(scope="module")
def model(corpus) -> str:
    return str(corpus / "tokenizer.model")


@pytest.fixture(scope="module")
def right(tmp_path_factory, texts, model) -> tuple[bytes, bytes]:
    """What Megatron's own writer makes of the texts."""
    return by_megatron(texts, load_tokenizer(model), tmp_path_factory.mktemp("megatron") / "right")


def by_megatron(texts: list[str], tokenizer: Tokenizer, prefix: Path, *, eod: bool = True) -> tuple[bytes, bytes]:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size))
    for text in texts:
        ids = [*tokenizer.encode_batch([text])[0].tolist(), *([tokenizer.eod] if eod else [])]
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(f"{prefix}.idx")
    return pair(prefix)


def pair(prefix: Path | str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def command(inputs, prefix, tokenizer, *options, ranks: int = 0, shard_bytes: int = SHARD) -> list[str]:
    assert MPIRUN or not ranks, "no mpirun: `make env` installs one"
    launch = [MPIRUN, "--oversubscribe", "-n", ranks] if ranks else []
    options = (*options, "--mpi") if ranks else options
    build = [sys.executable, "-m", "card_megatron", "data", "build", *inputs, "--output", prefix]
    return list(map(str, [*launch, *build, "--tokenizer", tokenizer, "--shard-bytes", shard_bytes, *options]))


def run(arguments: list[str], **options) -> subprocess.CompletedProcess:
    options = {"env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": 60, **options}
    result = subprocess.run(arguments, **options)
    assert "Traceback" not in result.stderr, result.stderr
    return result


# ---------------------------------------------------------------- the same bytes whoever works


@pytest.mark.parametrize("shard_bytes", [5_000, SHARD, 1 << 30])
def test_any_size_of_shards_gives_megatrons_bytes(tmp_path, inputs, model, right, shard_bytes):
    manifest = build(inputs, tmp_path / "out", model, ReadOptions(), shard_bytes=shard_bytes)
    assert pair(tmp_path / "out") == right
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bin", "out.idx", "out.json"]
    assert read_manifest(tmp_path / "out") == {"format": 1, **manifest}
    data = Indexed(tmp_path / "out")
    assert manifest["documents"] == len(data) == 400 and manifest["tokens"] == data.tokens and not manifest["problems"]


def test_documents_without_an_end_and_ids_of_four_bytes_are_megatrons_too(tmp_path, inputs, texts, model, monkeypatch):
    build(inputs, tmp_path / "bare", model, ReadOptions(append_eod=False), shard_bytes=SHARD)
    assert pair(tmp_path / "bare") == by_megatron(texts, load_tokenizer(model), tmp_path / "a", eod=False)
    monkeypatch.setattr(BytesTokenizer, "vocab_size", 100_000)
    build(inputs, tmp_path / "wide", "bytes", ReadOptions(), shard_bytes=SHARD)
    assert Indexed(tmp_path / "wide").dtype == np.int32
    assert pair(tmp_path / "wide") == by_megatron(texts, BytesTokenizer(), tmp_path / "b")


@pytest.mark.parametrize("workers", [2, 4])
def test_any_number_of_workers_gives_the_same_bytes(tmp_path, inputs, model, right, workers):
    build(inputs, tmp_path / "out", model, ReadOptions(), workers=workers, shard_bytes=SHARD)
    assert pair(tmp_path / "out") == right


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 2), (4, 1)])
def test_any_number_of_ranks_gives_the_same_bytes(tmp_path, inputs, model, right, ranks, workers):
    result = run(command(inputs, tmp_path / "out", model, "--workers", workers, ranks=ranks))
    assert result.returncode == 0, result.stderr
    assert pair(tmp_path / "out") == right
    assert result.stdout.count("400 documents") == 1, "one rank speaks for all"


# ---------------------------------------------------------------- killed and begun again


@pytest.fixture(scope="module")
def long_input(tmp_path_factory, texts) -> Path:
    """Work for a few seconds."""
    path = tmp_path_factory.mktemp("long") / "long.jsonl"
    path.write_text("".join(json.dumps({"text": f"{turn} {text}"}) + "\n" for turn in range(12) for text in texts))
    return path


def start(arguments: list[str]) -> psutil.Popen:
    return psutil.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def shards_done(prefix: Path) -> int:
    return len(list(Path(f"{prefix}.build").glob("[0-9]*.json")))


def wait_for(condition, process: psutil.Popen) -> bool:
    """Whether it came true before the process ended."""
    end = time.monotonic() + 60
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.002)
    return True


def family(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return [process]


def kill_all(process: psutil.Popen) -> None:
    """At once: the process, its workers, its ranks."""
    members = family(process)
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    psutil.wait_procs(members, timeout=60)


@pytest.mark.parametrize(("ranks", "workers"), [(0, 1), (0, 3), (3, 1)], ids=["alone", "workers", "mpi"])
def test_a_killed_build_goes_on_to_the_same_bytes(tmp_path, long_input, model, right_of_long, ranks, workers):
    rng, prefix = random.Random(ranks * 10 + workers), tmp_path / "out"
    arguments = command([long_input], prefix, model, "--workers", workers, ranks=ranks, shard_bytes=60_000)
    aims = sorted(rng.sample(range(70), 2 if ranks else 3))
    kills = 0
    for aim in aims:
        process = start(arguments)
        if wait_for(lambda aim=aim: shards_done(prefix) >= aim, process):
            time.sleep(rng.random() * 0.05)
            kills += process.poll() is None
        kill_all(process)
    assert kills == len(aims) and not Path(f"{prefix}.idx").exists()
    result = run(arguments)
    assert result.returncode == 0, result.stderr
    assert "going on with a build of which" in result.stderr
    assert pair(prefix) == right_of_long and not list(tmp_path.glob("*build*"))


@pytest.fixture(scope="module")
def right_of_long(tmp_path_factory, long_input, model) -> tuple[bytes, bytes]:
    prefix = tmp_path_factory.mktemp("right") / "out"
    build([str(long_input)], prefix, model, ReadOptions())
    return pair(prefix)


def test_a_dead_worker_is_named_and_a_dead_parent_leaves_no_worker(tmp_path, long_input, model, right_of_long):
    prefix = tmp_path / "out"
    arguments = command([long_input], prefix, model, "--workers", 2, shard_bytes=60_000)
    process = start(arguments)
    assert wait_for(lambda: shards_done(prefix) >= 3, process)
    workers = [child for child in process.children() if "spawn_main" in " ".join(child.cmdline())]
    assert len(workers) == 2
    workers[0].send_signal(signal.SIGKILL)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in message
    assert "a worker process was killed (out of memory?); start the build again to go on" in message

    done = shards_done(prefix)
    process = start(arguments)
    assert wait_for(lambda: shards_done(prefix) >= done + 3, process)
    children = process.children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert not psutil.wait_procs(children, timeout=30)[1], "workers end with the build they work for"
    assert run(arguments).returncode == 0
    assert pair(prefix) == right_of_long


def killed(*arguments, **options):
    raise KeyboardInterrupt


def killed_in(step: str, *arguments, **options) -> None:
    """A build that is killed when it comes to a step."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build_module, step, killed)
        build(*arguments, **options)


@pytest.fixture(scope="module")
def unmerged(tmp_path_factory, inputs, model) -> Path:
    prefix = tmp_path_factory.mktemp("unmerged") / "out"
    killed_in("_merge", inputs, prefix, model, ReadOptions(), shard_bytes=SHARD)
    return prefix


@pytest.mark.parametrize("suffix", [".bin", ".lengths", ".json"])
@pytest.mark.parametrize("keep", [None, 0, -1])
def test_a_shard_that_is_not_whole_is_made_again(tmp_path, unmerged, inputs, model, right, suffix, keep):
    folder = Path(shutil.copytree(f"{unmerged}.build", tmp_path / "out.build"))
    damaged = folder / f"000002{suffix}"
    data = damaged.read_bytes()
    damaged.unlink()
    if keep is not None:
        damaged.write_bytes(data[:keep])
    assert finished(2, folder) is None and finished(1, folder) and finished(3, folder)
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("00000[13].*")}
    touched: dict[str, int] = {}

    def look(size: int) -> None:
        touched.update({path.name: path.stat().st_mtime_ns for path in folder.glob("00000[13].*")})

    build(inputs, tmp_path / "out", model, ReadOptions(), shard_bytes=SHARD, progress=look)
    assert pair(tmp_path / "out") == right and touched == before, "only what is missing is made"


@pytest.mark.parametrize("step", ["append_file", "write_index", "publish", "_discard"])
def test_a_build_that_is_killed_while_it_merges_merges_again(tmp_path, unmerged, inputs, model, right, step):
    shutil.copytree(f"{unmerged}.build", tmp_path / "out.build")
    killed_in(step, inputs, tmp_path / "out", model, ReadOptions(), shard_bytes=SHARD)
    build(inputs, tmp_path / "out", model, ReadOptions(), shard_bytes=SHARD)
    assert pair(tmp_path / "out") == right
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bin", "out.idx", "out.json"]


def test_shards_of_a_folder_that_was_half_deleted_are_not_taken_for_another_builds(tmp_path, unmerged, monkeypatch):
    shutil.copytree(f"{unmerged}.build", tmp_path / "out.build")

    def killed_at(folder, **options):
        if folder.exists():
            (folder / "plan.json").unlink()
            raise KeyboardInterrupt

    (tmp_path / "other.jsonl").write_text('{"text": "other"}\n')
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed_at)
        build([str(tmp_path / "other.jsonl")], tmp_path / "out", "bytes", ReadOptions(), restart=True)
    build([str(tmp_path / "other.jsonl")], tmp_path / "out", "bytes", ReadOptions())
    assert Indexed(tmp_path / "out")[0].tolist() == [*b"other", BytesTokenizer.eod]


# ---------------------------------------------------------------- what must not be mixed


def test_a_begun_build_is_not_gone_on_with_by_another(tmp_path, unmerged, inputs, model, corpus, texts):
    shutil.copytree(f"{unmerged}.build", tmp_path / "out.build")
    others = {
        "tokenizer": (inputs, "bytes", ReadOptions(), SHARD),
        "input": (inputs[:1], model, ReadOptions(), SHARD),
        "option": (inputs, model, ReadOptions(append_eod=False), SHARD),
        "cut": (inputs, model, ReadOptions(), SHARD + 1),
    }
    for files, tokenizer, options, shard_bytes in others.values():
        with pytest.raises(ConfigError, match=r"holds shards of another build.*--restart deletes them"):
            build(files, tmp_path / "out", tokenizer, options, shard_bytes=shard_bytes)
    build(inputs, tmp_path / "out", "bytes", ReadOptions(), shard_bytes=SHARD, restart=True)
    assert pair(tmp_path / "out") == by_megatron(texts, BytesTokenizer(), tmp_path / "right")


def test_a_changed_input_is_another_input(tmp_path, inputs, model):
    source = Path(shutil.copy(inputs[0], tmp_path / "in.jsonl"))
    (tmp_path / "out.build").mkdir()
    prepared = build_module.make_plan([str(source)], load_tokenizer(model), ReadOptions())
    build_module._prepare(prepared, tmp_path / "out.build", restart=False)
    os.utime(source, ns=(0, 0))
    with pytest.raises(ConfigError, match="holds shards of another build"):
        build([str(source)], tmp_path / "out", model, ReadOptions())


def test_training_refuses_data_that_was_made_with_another_tokenizer(tmp_path, inputs, model, corpus):
    from card_megatron.data.tokenizer_training import train_sentencepiece
    from card_megatron.platform import Ranks
    from card_megatron.training.preflight import preflight

    build(inputs, tmp_path / "out", model, ReadOptions())
    sources = [f"--data.train=[{tmp_path}/out]"]
    preflight(tiny_config(corpus, tmp_path, *sources), Ranks())
    other = train_sentencepiece([Path(inputs[0]).read_text()[:200_000]], tmp_path / "other.model", 500)
    config = tiny_config(corpus, tmp_path, *sources, f"--data.tokenizer={other}")
    with pytest.raises(ConfigError, match=rf"out was made with another tokenizer \({model}.*build it again, or use"):
        preflight(config, Ranks())
    Path(f"{tmp_path}/out.json").unlink()  # data of Megatron's own tool says nothing of its tokenizer
    preflight(config, Ranks())


def test_output_inside_of_the_input_is_refused(tmp_path, inputs):
    with pytest.raises(ConfigError, match="lies inside of the input"):
        build([str(tmp_path)], tmp_path / "deep" / "out", "bytes", ReadOptions())


# ---------------------------------------------------------------- bad input, bad launchers


BAD = b'{"text": "one"}\n\n{"text": ""}\nbroken\n{"text": "two"}\n{"no": 1}\n'


def test_what_is_no_document_is_skipped_counted_and_listed(tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_bytes(BAD)
    arguments = [str(tmp_path / "bad.jsonl"), "--output", str(tmp_path / "out"), "--tokenizer", "bytes"]
    card(["data", "build", *arguments, "--shard-bytes", "10"])
    assert "1 x empty document, 1 x broken JSON, 1 x no 'text' field; each is named in" in capsys.readouterr().out
    listed = [json.loads(line) for line in Path(f"{tmp_path}/out.problems.jsonl").read_text().splitlines()]
    assert [(Path(problem["path"]).name, problem["line"]) for problem in listed] == [
        ("bad.jsonl", n) for n in (3, 4, 6)
    ]
    assert len(Indexed(tmp_path / "out")) + len(listed) == 5
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n')
    card(["data", "build", *arguments])
    assert not Path(f"{tmp_path}/out.problems.jsonl").exists(), "not of this build"


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_build_that_stopped_can_go_on_without_what_stopped_it(tmp_path, ranks):
    (tmp_path / "bad.jsonl").write_bytes(BAD)
    arguments = command([tmp_path / "bad.jsonl"], tmp_path / "out", "bytes", ranks=ranks, shard_bytes=30)
    result = run([*arguments, "--on-error", "stop"])
    assert result.returncode == 1 and not Path(f"{tmp_path}/out.idx").exists()
    first = "3: empty document" if not ranks else "[346]: .*"  # of ranks, the first that comes upon one
    assert re.search(rf"bad\.jsonl:{first}; repair it, or go on without it with --on-error skip", result.stderr)
    result = run([*arguments, "--on-error", "skip"])
    assert result.returncode == 0 and "2 documents" in result.stdout, result.stderr


def test_shards_with_problems_do_not_pass_where_they_should_stop(tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(BAD)
    arguments = ([str(tmp_path / "bad.jsonl")], tmp_path / "out", "bytes")
    killed_in("_merge", *arguments, ReadOptions(on_error="skip"))
    with pytest.raises(ConfigError, match=r"bad\.jsonl:3: empty document"):
        build(*arguments, ReadOptions(on_error="stop"))


def test_nothing_to_build_is_refused(tmp_path):
    for data, message in (
        (b"", "no document in the input: it is empty"),
        (b"{}\n", "no document in the input: 1 x no 'text' field"),
    ):
        (tmp_path / "in.jsonl").write_bytes(data)
        with pytest.raises(ConfigError, match=message):
            build([str(tmp_path / "in.jsonl")], tmp_path / "out", "bytes", ReadOptions(), restart=True)
        assert not list(tmp_path.glob("out.[bi]*x"))


def test_standard_input_is_an_input(tmp_path, inputs, texts, model, right):
    data = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    arguments = command(["-"], tmp_path / "out", model)
    result = subprocess.run(arguments, input=data, env=ENVIRONMENT, capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert pair(tmp_path / "out") == right


def test_ranks_that_do_not_find_each_other_are_refused(tmp_path, inputs):
    environment = {**ENVIRONMENT, "OMPI_COMM_WORLD_SIZE": "4"}
    result = run([*command(inputs, tmp_path / "out", "bytes"), "--mpi"], env=environment)
    assert result.returncode == 1 and not list(tmp_path.iterdir())
    assert "--mpi: 4 processes were started, but each is alone" in result.stderr


def test_a_refusal_under_mpi_is_shown_once_and_ends_all_ranks(tmp_path, inputs):
    for arguments in (
        command(inputs, tmp_path / "out", tmp_path / "none.model", ranks=2),
        command([tmp_path / "none.model"], tmp_path / "out", "bytes", ranks=2),
    ):
        result = run(arguments, timeout=30)
        assert result.returncode != 0 and result.stderr.count("none.model: no such file") == 1, result.stderr
