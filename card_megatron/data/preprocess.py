"""Documents to Megatron's .bin/.idx."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from card_megatron.config.errors import ConfigError
from card_megatron.config.schema import DataConfig
from card_megatron.data.tokenizers import Tokenizer


@dataclass
class Built:
    """What a build wrote."""

    prefix: Path
    documents: int
    tokens: int


def read_documents(paths: Iterable[str | Path], text_key: str = "text") -> Iterator[str]:
    """Documents of .jsonl files (one object a line, its `text_key`) and of any other file (the whole of it)."""
    for path in map(Path, paths):
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; give .jsonl files (one document a line) or plain text files")
        if path.suffix != ".jsonl":
            yield path.read_text(encoding="utf-8")
            continue
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _document(path, number, line, text_key)


def _document(path: Path, number: int, line: str, text_key: str) -> str:
    try:
        return json.loads(line)[text_key]
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{number} is not JSON ({error.msg}); each line must be one object") from error
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path}:{number} has no {text_key!r} field; name the field with --text-key") from error


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
    """Tokenise documents, each closed by end-of-document, into PREFIX.bin and PREFIX.idx.

    Both appear only when the build is complete; the index, which readers look for, last.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prefix = Path(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    unfinished = prefix.with_name(prefix.name + ".unfinished")
    builder = IndexedDatasetBuilder(f"{unfinished}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size))
    built = Built(prefix, documents=0, tokens=0)
    for text in documents:
        ids = [*tokenizer.encode(text), tokenizer.eod]
        builder.add_document(np.array(ids), [len(ids)])
        built.documents += 1
        built.tokens += len(ids)
    if not built.documents:
        Path(f"{unfinished}.bin").unlink(missing_ok=True)
        raise ConfigError(f"no documents to write to {prefix}")
    builder.finalize(f"{unfinished}.idx")
    for suffix in (".bin", ".idx"):
        Path(f"{unfinished}{suffix}").replace(f"{prefix}{suffix}")
    return built


def refuse_missing(data: DataConfig) -> None:
    """Raise for the first file of a run's data that is not there, with the command that writes it."""
    for entries in (data.train, *data.validation.values(), *data.test.values()):
        for prefix in (entry.split()[-1] for entry in entries):
            for suffix in (".bin", ".idx"):
                if not Path(prefix + suffix).is_file():
                    raise ConfigError(f"{prefix}{suffix}: no such file; `card data build --output {prefix}` writes it")


def count_tokens(prefix: str) -> int:
    """Tokens behind a .bin/.idx prefix, without reading them."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)  # held: its lengths are a view of a file that it unmaps when it goes
    return int(np.sum(dataset.sequence_lengths, dtype=np.int64))
