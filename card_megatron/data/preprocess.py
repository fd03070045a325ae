"""Small jobs around .bin/.idx: documents that are in memory already, and what a run's files must be."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from card_megatron.config.errors import ConfigError
from card_megatron.config.schema import DataConfig
from card_megatron.data.build import describe_tokenizer
from card_megatron.data.indexed import Indexed, publish, read_manifest, token_dtype, write_index
from card_megatron.data.shards import write_tokens
from card_megatron.data.tokenizers import Tokenizer


@dataclass
class Built:
    """What a build wrote."""

    prefix: Path
    documents: int
    tokens: int


def write_documents(path: str | Path, documents: Iterable[str]) -> Path:
    """Write documents as .jsonl."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("w", encoding="utf-8") as lines:
        for text in documents:
            lines.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    unfinished.replace(path)
    return path


def build_indexed(documents: Iterable[str], tokenizer: Tokenizer, prefix: str | Path) -> Built:
    """Tokenise documents, each closed by end-of-document, into PREFIX.bin and PREFIX.idx, in this process."""
    prefix = Path(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    unfinished = prefix.with_name(prefix.name + ".unfinished")
    with Path(f"{unfinished}.bin").open("wb") as file:
        lengths, checksum = write_tokens(documents, tokenizer, file)
        file.flush()
        os.fsync(file.fileno())
    if not len(lengths):
        Path(f"{unfinished}.bin").unlink()
        raise ConfigError(f"no documents to write to {prefix}")
    dtype = token_dtype(tokenizer.vocab_size)
    write_index(Path(f"{unfinished}.idx"), [lengths], dtype)
    tokens = int(np.sum(lengths, dtype=np.int64))
    manifest = {
        "documents": len(lengths),
        "tokens": tokens,
        "dtype": dtype.name,
        "tokenizer": describe_tokenizer(tokenizer, str(getattr(tokenizer, "path", tokenizer.kind))),
        "checksums": [[tokens * dtype.itemsize, f"{checksum:08x}"]],
    }
    publish(prefix, unfinished, manifest)
    return Built(prefix, documents=len(lengths), tokens=tokens)


def refuse_unusable(data: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """Raise for files that are not there or were made with another tokenizer; returns what could not be checked."""
    unknown = []
    for entries in (data.train, *data.validation.values(), *data.test.values()):
        for prefix in (entry.split()[-1] for entry in entries):
            for suffix in (".bin", ".idx"):
                if not Path(prefix + suffix).is_file():
                    raise ConfigError(f"{prefix}{suffix}: no such file; `card data build --output {prefix}` writes it")
            manifest = read_manifest(prefix)
            if manifest is None:
                unknown.append(f"{prefix} has no {prefix}.json: that data.tokenizer made it could not be checked")
            elif manifest["tokenizer"]["sha256"] != tokenizer.fingerprint():
                raise ConfigError(
                    f"{prefix} was made with another tokenizer ({manifest['tokenizer']['name']}, sha256 "
                    f"{manifest['tokenizer']['sha256'][:12]}…) than data.tokenizer={data.tokenizer} "
                    f"({tokenizer.fingerprint()[:12]}…): its ids mean other text; build it again, or use that tokenizer"
                )
    return unknown


def count_tokens(prefix: str) -> int:
    """Tokens behind a .bin/.idx prefix, without reading them."""
    return Indexed(prefix).tokens
