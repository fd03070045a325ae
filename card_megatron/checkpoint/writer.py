"""Writing this rank's shards in processes of their own, from a snapshot that costs no copy on a CPU.

The plan and the file format are Megatron's (`torch_dist`). Its own writer copies every view, passes results through a
manager process and waits for ever when a worker dies. Here a forked child holds the tensors as they were at the fork
(the operating system copies only pages that training then changes), writes them with a running checksum, syncs them,
and answers through a pipe: a child that dies closes it, and that is an answer too.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import signal
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import (
    FileSystemWriterAsync,
    _split_by_size_and_type,
)
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.planner import WriteItemType

WRITERS = 2
"""Processes, and files, of each rank."""


class ShardWriter(FileSystemWriterAsync):
    """Megatron's writer up to the point where data would be copied: it keeps references, and knows its files."""

    def prepare_write_data(self, plan, planner) -> None:
        self.files: dict[str, list[tuple[Any, Any]]] = {}
        for bucket in _split_by_size_and_type(self.thread_count, plan.items):
            items = [(item, planner.resolve_data(item)) for item in bucket]
            if items:
                self.files[f"{plan.storage_data.prefix}{len(self.files)}.distcp"] = [
                    (item, data if item.type == WriteItemType.BYTE_IO else without_slack(data)) for item, data in items
                ]


def without_slack(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU with a storage of exactly its size: torch.save writes whole storages."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize or not tensor.numel():
        return tensor
    # by way of numpy the same memory gets a storage of its own, without a copy
    raw = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy())
    return raw.view(tensor.dtype).view(tensor.shape)


class ChecksumStream(io.RawIOBase):
    """Passes bytes on to a file, and knows how many there were and their CRC-32."""

    def __init__(self, file: Any):
        self.file, self.size, self.checksum = file, 0, 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.size += view.nbytes
        self.checksum = zlib.crc32(view, self.checksum)
        rest = view
        while rest:  # a raw write may take less than it was given
            rest = rest[self.file.write(rest) :]
        return view.nbytes

    def tell(self) -> int:
        return self.size

    def writable(self) -> bool:
        return True

    def description(self) -> dict[str, Any]:
        return {"bytes": self.size, "crc32": f"{self.checksum:08x}"}


@dataclass
class Written:
    """What a rank's writers report: pieces for Megatron's metadata, files for the manifest, and what went wrong."""

    results: list[Any] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    problem: str | None = None


class Writing:
    """The shards of this rank on their way to disk."""

    def __init__(self, state: dict[str, Any], folder: Path, *, validate: bool):
        """Plan with all ranks, then start this rank's writers. Training may go on as soon as this returns."""
        sharded, common = save_preprocess(state, validate)
        sharded, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
        self.writer = ShardWriter(str(folder), thread_count=WRITERS)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        (_, self.metadata, self.ranks), *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(sharded, False), self.writer, None, 0, planner=planner
        )
        loads: list[dict[str, Any]] = [{name: items} for name, items in self.writer.files.items()]
        if self.ranks.is_coordinator:
            loads = [plain_files(common) | (loads[0] if loads else {}), *loads[1:]]
        self.child, self.problem = None, None
        if loads:
            try:
                self.receiver, self.child = _start(folder, loads, self.writer.transforms)
            except OSError as error:  # no process or memory left; the other ranks' writers have begun
                self.problem = f"no writer process: {error.strerror}"

    def done(self) -> bool:
        """True once this rank's writers have answered or died."""
        return self.child is None or self.receiver.poll()

    def collect(self) -> Written:
        """Wait for this rank's writers and put their answers together."""
        return Written(problem=self.problem) if self.child is None else _answer(self.receiver)


def plain_files(common: dict[str, Any]) -> dict[str, bytes]:
    """The files of a distributed checkpoint that are not shards, as Megatron names and reads them."""
    buffer = io.BytesIO()
    torch.save(common, buffer)
    return {
        COMMON_STATE_FNAME: buffer.getvalue(),
        CONFIG_FNAME: json.dumps(asdict(CheckpointingConfig("torch_dist", 1))).encode(),
    }


def _start(
    folder: Path, loads: list[dict[str, Any]], transforms: Any, inherited: Sequence[Connection] = ()
) -> tuple[Connection, Any]:
    """Fork a writer, which forks the next one: training waits for one fork, however many writers there are."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    # a process that ends joins its children: one that waits for its answer to be read must see that nobody will
    Finalize(receiver, _close, args=(weakref.ref(receiver),), exitpriority=1)
    # the child is the only one to have the sender, and the parent the receiver, so that a death closes the pipe
    not_its_own = (receiver, *inherited)
    child = fork.Process(target=_write_and_report, args=(folder, loads, transforms, sender, not_its_own))
    child.start()
    sender.close()
    return receiver, child


def _close(reference: weakref.ref[Connection]) -> None:
    connection = reference()
    if connection is not None:
        connection.close()


def _answer(receiver: Connection) -> Written:
    """Wait for a writer's word, or for its death.

    Not for its end: giving back gigabytes of pages takes a while. The next writer's start collects it.
    """
    try:
        return receiver.recv()
    except (EOFError, OSError):  # before its answer, or in the middle of it
        return Written(problem="a writer process died")
    finally:
        receiver.close()


def _write_and_report(
    folder: Path, loads: list[dict[str, Any]], transforms: Any, sender: Connection, not_its_own: Sequence[Connection]
) -> None:
    """A writer process: the first load to disk, the others by further writers, then one answer for all of them."""
    for connection in not_its_own:
        connection.close()
    # whoever ends the run tells the parent; a save that has begun is the parent's to give up
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)  # where cores are few, training has them first
    torch.serialization.set_crc32_options(False)  # the whole file has a checksum already
    others = _start(folder, loads[1:], transforms, [sender]) if len(loads) > 1 else None
    try:
        written = _write(folder, loads[0], transforms)
    except Exception as error:  # the parent must hear of anything
        written = Written(problem=_in_words(error, folder))
    if others is not None:
        more = _answer(others[0])
        written.results += more.results
        written.files |= more.files
        written.problem = written.problem or more.problem
    with contextlib.suppress(BrokenPipeError):  # the run has ended
        sender.send(written)
    sender.close()


def _in_words(error: BaseException, folder: Path) -> str:
    """What went wrong; where the system said it, as the system says it: torch then fails over its own half-file."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    if cause is None:
        return f"{type(error).__name__}: {error}"
    return f"{cause.strerror or cause}: {cause.filename or folder}"


def _write(folder: Path, files: dict[str, Any], transforms: Any) -> Written:
    """Files of shards (items of Megatron's plan) and plain ones (bytes), each on disk when this returns."""
    written = Written()
    for name, content in files.items():
        with (folder / name).open("wb", buffering=0) as file:
            stream = ChecksumStream(file)
            if isinstance(content, bytes):
                stream.write(content)
            else:
                for item, data in content:
                    written.results.append(
                        _write_item(transforms, stream, data, item, name, SerializationFormat.TORCH_SAVE)
                    )
            os.fsync(file.fileno())
        written.files[name] = stream.description()
    return written
