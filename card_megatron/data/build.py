"""From files of text to PREFIX.bin/.idx: planned, shared out among processes or MPI ranks, resumed, merged.

The plan (which bytes make which shard) depends on the inputs alone, and shards are merged in the plan's order, so the
result is the same bytes whoever worked on it. A shard is done when its .json is there; a killed build goes on with the
others.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from card_megatron.config.errors import ConfigError
from card_megatron.data.indexed import append_file, publish, token_dtype, write_index
from card_megatron.data.shards import ReadOptions, build_shard, count_problems, finished
from card_megatron.data.sources import Piece, cut, expand, grouped
from card_megatron.data.tokenizers import Tokenizer, load_tokenizer

SHARD_BYTES = 64 << 20
"""Input that one shard is made of: small enough to share out, large enough to merge quickly."""


@dataclass
class Plan:
    """What a build will do."""

    inputs: list[dict[str, Any]]
    shards: list[list[Piece]]
    fingerprint: str

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for shard in self.shards for piece in shard)


def make_plan(inputs: list[str], tokenizer: Tokenizer, options: ReadOptions, shard_bytes: int = SHARD_BYTES) -> Plan:
    """Cut the inputs; the fingerprint changes when any of them, the tokenizer or an option does."""
    files = expand(inputs)
    shards = grouped(cut(files, shard_bytes, options.text_key), shard_bytes)
    known = [{"path": str(path), "bytes": path.stat().st_size, "modified": path.stat().st_mtime_ns} for path in files]
    facts = json.dumps([known, tokenizer.fingerprint(), asdict(options), shard_bytes], sort_keys=True)
    return Plan(known, shards, hashlib.sha256(facts.encode()).hexdigest())


def build(
    inputs: list[str],
    prefix: Path,
    tokenizer_name: str,
    options: ReadOptions,
    *,
    workers: int = 1,
    mpi: bool = False,
    restart: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], object] = lambda size: None,
    announce: Callable[[Plan, int], object] = lambda plan, done: None,
) -> dict[str, Any]:
    """Build PREFIX.bin, .idx and .json; returns the manifest. Under MPI every rank calls this."""
    team = MpiTeam() if mpi else Alone()
    tokenizer = load_tokenizer(tokenizer_name)
    folder = Path(f"{prefix}.build")
    plan = team.share(lambda: _prepare(make_plan(inputs, tokenizer, options, shard_bytes), folder, restart))
    todo = [number for number in range(len(plan.shards)) if finished(number, folder) is None]
    if team.first:
        announce(
            plan,
            sum(piece.bytes for number in set(range(len(plan.shards))) - set(todo) for piece in plan.shards[number]),
        )
    mine = todo[team.rank :: team.size]
    with team.failing_together():
        for number in _work(plan, mine, folder, tokenizer, tokenizer_name, options, workers):
            progress(sum(piece.bytes for piece in plan.shards[number]))
    return team.share(lambda: _merge(plan, prefix, folder, tokenizer, tokenizer_name, options))


def _prepare(plan: Plan, folder: Path, restart: bool) -> Plan:
    """Begin the build, or find the one that was begun."""
    begun = folder / "plan.json"
    if restart:
        shutil.rmtree(folder, ignore_errors=True)
    if begun.is_file() and json.loads(begun.read_text())["fingerprint"] != plan.fingerprint:
        raise ConfigError(
            f"{folder} holds shards of another build (other inputs, tokenizer or options); "
            "--restart deletes them, or choose another --output"
        )
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = begun.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"fingerprint": plan.fingerprint, "shards": len(plan.shards)}))
    unfinished.replace(begun)
    return plan


def _work(
    plan: Plan, numbers: list[int], folder: Path, tokenizer: Tokenizer, name: str, options: ReadOptions, workers: int
) -> Iterator[int]:
    """Build shards, here or in worker processes; yields each as it is done."""
    if workers <= 1:
        for number in numbers:
            build_shard(number, plan.shards[number], folder, tokenizer, options)
            yield number
        return
    # spawned, not forked: a tokenizer's threads do not survive a fork
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, spawn, _load_in_worker, (name,)) as pool:
        jobs = {
            pool.submit(_build_in_worker, number, plan.shards[number], folder, options): number for number in numbers
        }
        try:
            for job in concurrent.futures.as_completed(jobs):
                job.result()
                yield jobs[job]
        except concurrent.futures.process.BrokenProcessPool as error:
            raise ConfigError("a worker process was killed (out of memory?); start the build again to go on") from error
        finally:
            pool.shutdown(cancel_futures=True)


_tokenizer: Tokenizer | None = None


def _load_in_worker(name: str) -> None:
    global _tokenizer
    single_threaded()
    _tokenizer = load_tokenizer(name)


def _build_in_worker(number: int, pieces: list[Piece], folder: Path, options: ReadOptions) -> None:
    assert _tokenizer is not None
    build_shard(number, pieces, folder, _tokenizer, options)


def single_threaded() -> None:
    """One process, one core: the tokenizers library would otherwise take all of them in every worker."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"


def _merge(
    plan: Plan, prefix: Path, folder: Path, tokenizer: Tokenizer, tokenizer_name: str, options: ReadOptions
) -> dict[str, Any]:
    """Join the shards in the plan's order, and delete them once the result has its name."""
    stats = [finished(number, folder) for number in range(len(plan.shards))]
    missing = [number for number, shard in enumerate(stats) if shard is None]
    if missing:
        raise ConfigError(f"shards {missing[:5]} of {folder} are not there; start the build again to go on")
    shards = [shard for shard in stats if shard is not None]
    problems = [problem for shard in shards for problem in shard["problems"]]
    if not any(shard["documents"] for shard in shards):
        raise ConfigError(f"no document in the input: {count_problems(problems) or 'it is empty'}")
    unfinished = prefix.with_name(prefix.name + ".unfinished")
    with Path(f"{unfinished}.bin").open("wb") as file:
        for number in range(len(shards)):
            append_file(folder / f"{number:06d}.bin", file)
        os.fsync(file.fileno())
    dtype = token_dtype(tokenizer.vocab_size)
    write_index(Path(f"{unfinished}.idx"), _lengths(folder, len(shards)), dtype)
    _write_problems(Path(f"{prefix}.problems.jsonl"), problems)
    manifest = {
        "documents": sum(shard["documents"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
        "dtype": dtype.name,
        "tokenizer": describe_tokenizer(tokenizer, tokenizer_name),
        "options": asdict(options),
        "inputs": plan.inputs,
        "problems": count_problems(problems),
        "checksums": [[shard["bytes"], shard["crc32"]] for shard in shards],
    }
    publish(prefix, unfinished, manifest)
    shutil.rmtree(folder)
    return manifest


def _lengths(folder: Path, count: int) -> list[np.ndarray]:
    return [np.load(folder / f"{number:06d}.lengths.npy") for number in range(count)]


def _write_problems(path: Path, problems: Iterable[dict[str, Any]]) -> None:
    lines = [json.dumps(problem) + "\n" for problem in problems]
    if lines:
        path.write_text("".join(lines))
    else:
        path.unlink(missing_ok=True)


def describe_tokenizer(tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    """What a manifest says of the tokenizer; the hash is what training compares."""
    return {
        "name": name,
        "kind": tokenizer.kind,
        "sha256": tokenizer.fingerprint(),
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "mask": tokenizer.mask,
    }


# ---------------------------------------------------------------- who works together


class Alone:
    """One process, with or without workers."""

    rank, size, first = 0, 1, True

    def share(self, work: Callable[[], Any]) -> Any:
        return work()

    def failing_together(self) -> Any:
        import contextlib

        return contextlib.nullcontext()


class MpiTeam:
    """The ranks of an MPI job: rank 0 plans and merges, all of them tokenise."""

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise ConfigError("--mpi needs mpi4py and an MPI: pip install 'card_megatron[mpi]'") from error
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.first = self.rank == 0
        wanted = max(int(os.environ.get(name, 1)) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"))
        if wanted > 1 and self.size == 1:
            raise ConfigError(
                f"--mpi: {wanted} processes were started, but each is alone: the launcher and mpi4py's MPI do not fit; "
                "use the mpirun of the same MPI, or another srun --mpi"
            )

    def share(self, work: Callable[[], Any]) -> Any:
        """Rank 0 does it, after all ranks have come here; every rank gets the result, or the same error."""
        self.comm.Barrier()
        result: Any = None
        if self.first:
            try:
                result = work()
            except Exception as error:  # every rank must hear of it, or the others wait for ever
                result = error
        result = self.comm.bcast(result, root=0)
        if isinstance(result, Exception):
            if self.first:
                raise result
            sys.exit(1)
        return result

    def failing_together(self) -> Any:
        import contextlib

        @contextlib.contextmanager
        def guarded() -> Iterator[None]:
            problem = None
            try:
                yield
            except ConfigError as error:
                problem = error
            problems = [found for found in self.comm.allgather(problem) if found is not None]
            if problems:
                if self.first:
                    raise problems[0]
                sys.exit(1)

        return guarded()
