"""Results of requests on disk as they come, so that a killed evaluation goes on where it was.

A file of lines: the first says which model and settings the others belong to, each other one is [key, result]. Lines
are appended by one rank, flushed a chunk at a time; a line that a kill cut short is dropped when the file is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from card_megatron.config.errors import ConfigError


def request_key(kind: str, *parts: Sequence[int] | str) -> str:
    """Names a request by all that its result depends on, the model aside."""
    digest = hashlib.blake2b(kind.encode(), digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else np.asarray(part, dtype=np.int64).tobytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def model_identity(path: Path, **settings: Any) -> str:
    """Names a checkpoint or folder by its files, and the settings it was opened with: other results than theirs."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    facts = [(str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([facts, settings], sort_keys=True, default=str).encode()).hexdigest()


class Store:
    """What is known of a model's answers: the same on every rank, written by the one that speaks."""

    def __init__(self, path: Path, identity: str, *, writes: bool):
        self.path, self.writes = path, writes
        answer: list[Any] = [None]
        if writes:
            answer = [self._open(identity)]
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[0], str):
            raise ConfigError(answer[0])
        self.known: dict[str, Any] = answer[0]
        self.found = len(self.known)
        """Results that an earlier start had left."""

    def __contains__(self, key: str) -> bool:
        return key in self.known

    def __getitem__(self, key: str) -> Any:
        return self.known[key]

    def add(self, results: Iterable[tuple[str, Any]]) -> None:
        new = [(key, result) for key, result in results if key not in self.known]
        self.known.update(new)
        if self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps([key, result]) + "\n" for key, result in new)

    def remove(self) -> None:
        """The evaluation is done, and its results are written elsewhere."""
        if self.writes:
            self.path.unlink(missing_ok=True)

    def _open(self, identity: str) -> dict[str, Any] | str:
        """What the file has of this model; an error's text where the file cannot be used."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
            known = _read(text, identity)
            # written anew, because the last line may be half of one
            lines = [json.dumps(identity), *(json.dumps([key, result]) for key, result in known.items())]
            unfinished = self.path.with_name(f"{self.path.name}.unfinished")
            unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")
            unfinished.replace(self.path)
        except OSError as error:
            return f"scores cannot be kept in {self.path}: {error.strerror}; choose another --output"
        return known


def _read(text: str, identity: str) -> dict[str, Any]:
    first, _, rest = text.partition("\n")
    if first != json.dumps(identity):
        return {}  # of another model, or of other settings
    known = {}
    for line in rest.split("\n")[:-1]:  # what follows the last line end was cut short
        try:
            key, result = json.loads(line)
        except ValueError:
            continue
        known[key] = result
    return known
