"""manifest.json: what a checkpoint is, and the size and checksum of every file in it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from card_megatron.config.errors import CheckpointError, UnreadableCheckpoint

MANIFEST = "manifest.json"
FORMAT = 1
CHUNK = 1 << 24


@dataclass
class Manifest:
    """Everything about a checkpoint but its tensors."""

    step: int
    consumed_samples: int
    parameters: int
    layout: dict[str, int]
    """World size and the parallel sizes that it was saved in; any other layout can load it."""
    config: dict[str, Any]
    """The resolved configuration of the run."""
    versions: dict[str, str]
    ema: bool = False
    tokenizer: dict[str, Any] | None = None
    """Facts of the tokenizer that the model was trained with (data.tokenizers.facts_of); None where none is known."""
    created: str = ""
    seconds: float = 0.0
    """From the request to the rename."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> {"bytes", "crc32"} of every other file of the folder."""
    format: int = FORMAT
    crc32: str = ""
    """Of all the fields above: the manifest vouches for the other files, and this for the manifest."""

    @property
    def total_bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.files.values())

    def checksum(self) -> str:
        fields = asdict(self)
        del fields["crc32"]
        if fields["tokenizer"] is None:  # manifests of before this field have their checksum without it
            del fields["tokenizer"]
        return f"{zlib.crc32(json.dumps(fields).encode()):08x}"

    def dump(self) -> bytes:
        return (json.dumps(asdict(self) | {"crc32": self.checksum()}, indent=1) + "\n").encode()


def describe_file(path: Path) -> dict[str, Any]:
    """Size and CRC-32 of a file: enough to see a truncated, flipped or missing byte, at the speed of the disk."""
    size, checksum = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return {"bytes": size, "crc32": f"{checksum:08x}"}


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint; CheckpointError names what is wrong with it."""
    path = checkpoint / MANIFEST
    try:
        fields = json.loads(path.read_text())
        if fields["format"] != FORMAT:
            raise UnreadableCheckpoint(
                f"{path} has format {fields['format']}; this version reads {FORMAT}: use the version that saved it"
            )
        manifest = Manifest(**fields)
        if manifest.checksum() != manifest.crc32:
            raise ValueError("its checksum does not fit what it says")
        return manifest
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; {checkpoint} is no complete checkpoint") from None
    except OSError as error:
        reason = error.strerror or error
        raise UnreadableCheckpoint(f"{path} cannot be read ({reason}); make it readable, then start again") from error
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); the checkpoint is damaged") from error


def problems_of(
    checkpoint: Path,
    manifest: Manifest,
    names: Iterable[str] | None = None,
    *,
    checksums: bool = True,
    seen: Callable[[str], object] = lambda name: None,
) -> list[str]:
    """What is wrong with the files of a checkpoint, each named; `seen` is told of every file that was looked at."""
    problems = []
    for name in manifest.files if names is None else names:
        path, expected = checkpoint / name, manifest.files[name]
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                problems.append(f"{path} has {size:,} bytes; the manifest says {expected['bytes']:,}")
            elif checksums and (found := describe_file(path)) != expected:
                problems.append(f"{path} has CRC-32 {found['crc32']}; the manifest says {expected['crc32']}")
        except FileNotFoundError:
            problems.append(f"{path} is missing")
        except OSError as error:
            problems.append(f"{path} cannot be read ({error})")
        seen(name)
    return problems
