"""From files of text to PREFIX.bin/.idx: planned, shared out among processes or MPI ranks, resumed, merged.

The plan (which bytes make which shard) depends on the inputs alone, and shards are merged in the plan's order, so the
result is the same bytes whoever worked on it. A shard is done when its .json is there; a killed build goes on with the
others.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from card_megatron.config.errors import ConfigError
from card_megatron.data.indexed import append_file, publish, token_dtype, write_index
from card_megatron.data.shards import (
    ReadOptions,
    build_shard,
    count_problems,
    finished,
    lengths_of,
    problems_of,
    stopped_by,
)
from card_megatron.data.sources import Piece, Problem, cut, expand, grouped
from card_megatron.data.tokenizers import Tokenizer, load_tokenizer
from card_megatron.launchers import processes_started, refuse_other_world

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
    # not --on-error: a build that stopped at a problem may go on without it
    reading = {name: value for name, value in asdict(options).items() if name != "on_error"}
    facts = json.dumps([known, tokenizer.fingerprint(), reading, shard_bytes], sort_keys=True)
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
    report: Callable[[dict[str, Any]], object] = lambda manifest: None,
) -> dict[str, Any]:
    """Build PREFIX.bin, .idx and .json; returns the manifest. Under MPI every rank calls this."""
    team = MpiTeam() if mpi else Alone()
    with team.failing_together():
        tokenizer = load_tokenizer(tokenizer_name)
        refuse_output_among(inputs, prefix)
    folder = Path(f"{prefix}.build")
    # what is left is decided once: a rank that looked later would see what another has done meanwhile
    plan, todo = team.share(lambda: _prepare(make_plan(inputs, tokenizer, options, shard_bytes), folder, restart))
    if team.first:
        announce(
            plan,
            sum(piece.bytes for number in set(range(len(plan.shards))) - set(todo) for piece in plan.shards[number]),
        )
    mine = todo[team.rank :: team.size]
    with team.failing_at_once():
        for number in _work(plan, mine, folder, tokenizer, tokenizer_name, options, workers):
            progress(sum(piece.bytes for piece in plan.shards[number]))
    manifest = team.share(lambda: _merge(plan, prefix, folder, tokenizer, tokenizer_name, options))
    if team.first:
        report(manifest)
    return manifest


def refuse_output_among(inputs: list[str], prefix: Path) -> None:
    for entry in map(Path, inputs):
        if entry.is_dir() and prefix.resolve().is_relative_to(entry.resolve()):
            raise ConfigError(f"--output {prefix} lies inside of the input {entry}, and would be read as part of it")


def _prepare(plan: Plan, folder: Path, restart: bool) -> tuple[Plan, list[int]]:
    """Begin the build, or find the one that was begun; returns the shards that are left, too."""
    begun = folder / "plan.json"
    if restart:
        _discard(folder)
    if begun.is_file() and json.loads(begun.read_text())["fingerprint"] != plan.fingerprint:
        raise ConfigError(
            f"{folder} holds shards of another build (other inputs, tokenizer or options); "
            "--restart deletes them, or choose another --output"
        )
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = begun.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"fingerprint": plan.fingerprint, "shards": len(plan.shards)}))
    unfinished.replace(begun)
    return plan, [number for number in range(len(plan.shards)) if finished(number, folder) is None]


def _discard(folder: Path) -> None:
    """Delete a build's folder, under another name first: a kill must not leave shards without the plan they are of."""
    doomed = folder.with_name(folder.name + ".discarded")
    if folder.exists():
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


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
        try:
            jobs = {
                pool.submit(_build_in_worker, number, plan.shards[number], folder, options): number
                for number in numbers
            }
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
    # a worker whose build was killed would go on, beside the workers of the build that goes on
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizer = load_tokenizer(name)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


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
    shards = [_without_pieces(finished(number, folder)) for number in range(len(plan.shards))]
    missing = [number for number, shard in enumerate(shards) if not shard]
    if missing:
        raise ConfigError(f"shards {missing[:5]} of {folder} are not there; start the build again to go on")
    problems = count_problems(_listed(plan, prefix, folder, options))
    if not any(shard["documents"] for shard in shards):
        named = ", ".join(f"{count:,} x {what}" for what, count in problems.items())
        raise ConfigError(f"no document in the input: {named or 'it is empty'}")
    unfinished = prefix.with_name(prefix.name + ".unfinished")
    with Path(f"{unfinished}.bin").open("wb") as file:
        for number in range(len(shards)):
            append_file(folder / f"{number:06d}.bin", file)
        os.fsync(file.fileno())
    dtype = token_dtype(tokenizer.vocab_size)
    write_index(Path(f"{unfinished}.idx"), (lengths_of(number, folder) for number in range(len(shards))), dtype)
    manifest = {
        "documents": sum(shard["documents"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
        "dtype": dtype.name,
        "tokenizer": describe_tokenizer(tokenizer, tokenizer_name),
        "options": asdict(options),
        "inputs": plan.inputs,
        "problems": problems,
        "checksums": [[shard["bytes"], shard["crc32"]] for shard in shards],
    }
    publish(prefix, unfinished, manifest)
    _discard(folder)
    return manifest


def _without_pieces(stats: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (stats or {}).items() if name != "pieces"}


def _listed(plan: Plan, prefix: Path, folder: Path, options: ReadOptions) -> Iterator[Problem]:
    """Every problem, as it is written to PREFIX.problems.jsonl; a shard at a time, for they may be many."""
    path = Path(f"{prefix}.problems.jsonl")
    path.unlink(missing_ok=True)
    stats = (finished(number, folder) or {} for number in range(len(plan.shards)))
    with contextlib.ExitStack() as stack:
        file = None
        for problem in problems_of(zip(plan.shards, stats, strict=True)):
            if options.on_error == "stop":  # skipped before the build was asked to stop at it
                raise stopped_by(problem)
            file = file or stack.enter_context(path.open("w"))
            file.write(json.dumps(vars(problem)) + "\n")
            yield problem


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
        return contextlib.nullcontext()

    failing_at_once = failing_together


class MpiTeam:
    """The ranks of an MPI job: rank 0 plans and merges, all of them tokenise."""

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise ConfigError("--mpi needs mpi4py and an MPI: pip install -e '.[mpi]' in the checkout") from error
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.first = self.rank == 0
        refuse_other_world(self.size, os.environ, "MPI")
        started = processes_started(os.environ)
        if started not in (None, self.size):
            found = "each is alone" if self.size == 1 else f"MPI has {self.size}"
            raise ConfigError(
                f"--mpi: {started} processes were started, but {found}: the launcher and mpi4py's MPI do not fit; "
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

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """All ranks go on, or none: an error of one ends every one, and is shown once."""
        problem = None
        try:
            yield
        except Exception as error:  # of any kind, or the others wait for ever
            problem = error
        problems = [found for found in self.comm.allgather(problem) if found is not None]
        if problems:
            if self.first:
                raise problems[0]
            sys.exit(1)

    @contextlib.contextmanager
    def failing_at_once(self) -> Iterator[None]:
        """An error ends the job without waiting for ranks that may work for hours; shards that are done stay."""
        try:
            yield
        except Exception as error:
            print(f"card data: rank {self.rank}: {error}", file=sys.stderr, flush=True)
            self.comm.Abort(1)
