"""Writing this rank's shards in processes of their own, from a snapshot that costs no copy on a CPU.

The plan and the file format are Megatron's (`torch_dist`). Its own writer copies every view, passes results through a
manager process and waits for ever when a worker dies. Here a forked child holds the tensors as they were at the fork
(the operating system copies only pages that training then changes), writes them with a running checksum, syncs them,
and answers through a pipe: a child that dies closes it, and that is an answer too.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import zlib
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
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
        self.file.write(data)
        view = memoryview(data)
        self.size += view.nbytes
        self.checksum = zlib.crc32(view, self.checksum)
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
        plain = plain_files(common) if self.ranks.is_coordinator else {}
        self.children = self._start(folder, plain)

    def _start(self, folder: Path, plain: dict[str, bytes]) -> dict[Connection, Any]:
        fork = multiprocessing.get_context("fork")
        loads = [{name: items} for name, items in self.writer.files.items()] or ([{}] if plain else [])
        children = {}
        for number, load in enumerate(loads):
            receiver, sender = fork.Pipe(duplex=False)
            work = (folder, load, plain if number == 0 else {}, self.writer.transforms, sender)
            child = fork.Process(target=write_and_report, args=work, daemon=True)
            child.start()
            sender.close()  # the child's copy is the only one left, so that its death closes the pipe
            children[receiver] = child
        return children

    def done(self) -> bool:
        """True once every writer of this rank has answered or died."""
        return all(receiver.poll() for receiver in self.children)

    def collect(self) -> Written:
        """Wait for this rank's writers and put their answers together."""
        together = Written()
        for receiver, child in self.children.items():
            try:
                answer: Written = receiver.recv()
                child.join()
            except EOFError:
                child.join()
                answer = Written(problem=f"a writer process died (exit code {child.exitcode})")
            together.results += answer.results
            together.files |= answer.files
            together.problem = together.problem or answer.problem
        return together


def plain_files(common: dict[str, Any]) -> dict[str, bytes]:
    """The files of a distributed checkpoint that are not shards, as Megatron names and reads them."""
    buffer = io.BytesIO()
    torch.save(common, buffer)
    return {
        COMMON_STATE_FNAME: buffer.getvalue(),
        CONFIG_FNAME: json.dumps(asdict(CheckpointingConfig("torch_dist", 1))).encode(),
    }


def write_and_report(folder: Path, shards: dict[str, Any], plain: dict[str, bytes], transforms, sender) -> None:
    """A writer process: everything to disk, then one answer."""
    # whoever ends the run tells the parent; a save that has begun is the parent's to give up
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    torch.serialization.set_crc32_options(False)  # the whole file has a checksum already
    written = Written()
    try:
        for name, items in shards.items():
            with (folder / name).open("wb", buffering=0) as file:
                stream = ChecksumStream(file)
                for item, data in items:
                    written.results.append(
                        _write_item(transforms, stream, data, item, name, SerializationFormat.TORCH_SAVE)
                    )
                os.fsync(file.fileno())
            written.files[name] = stream.description()
        for name, data in plain.items():
            with (folder / name).open("wb", buffering=0) as file:
                stream = ChecksumStream(file)
                stream.write(data)
                os.fsync(file.fileno())
            written.files[name] = stream.description()
    except OSError as error:
        written = Written(problem=f"{error.strerror or error}: {error.filename or folder}")
    except Exception as error:  # the parent must hear of anything
        written = Written(problem=f"{type(error).__name__}: {error}")
    sender.send(written)
    sender.close()
