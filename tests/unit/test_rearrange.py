"""Merge, split and shuffle: every document once, byte for byte, whatever the blocks; whole results or none."""

from __future__ import annotations

import itertools
import os
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from card_megatron.cli import main
from card_megatron.config import ConfigError
from card_megatron.data import rearrange
from card_megatron.data.indexed import Indexed, publish, read_manifest, write_index
from card_megatron.data.inspect import damage
from card_megatron.data.preprocess import build_indexed
from card_megatron.data.rearrange import merge, shuffle, split
from card_megatron.data.tokenizers import BytesTokenizer


@pytest.fixture(autouse=True)
def without_waiting_for_disks(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks that cut 100 short documents many times, and some of them in the middle."""
    monkeypatch.setattr(rearrange, "BLOCK_DOCUMENTS", 32)
    monkeypatch.setattr(rearrange, "BLOCK_TOKENS", 20)
    monkeypatch.setattr(rearrange, "CHECKSUM_BYTES", 300)


def texts(count: int, name: str = "text") -> list[str]:
    """Documents of 5 to about 40 bytes, all different."""
    return [f"{name} {number} {'x' * (number * 7 % 30)}" for number in range(count)]


def written(prefix: Path, documents: list[str]) -> Path:
    return build_indexed(documents, BytesTokenizer(), prefix).prefix


def documents_of(prefix: Path) -> list[str]:
    """All documents as Megatron's own reader sees them, after a check of the whole pair."""
    data = Indexed(prefix)
    assert not list(damage(data, data.manifest()))
    dataset = IndexedDataset(str(prefix))
    found = [dataset[number] for number in range(len(dataset))]
    assert all(ids[-1] == BytesTokenizer.eod for ids in found)
    return [BytesTokenizer().decode(ids[:-1]) for ids in found]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---------------------------------------------------------------- merge


def test_merge_joins_in_the_order_given(tmp_path):
    first, second = written(tmp_path / "a", texts(40, "a")), written(tmp_path / "b", texts(30, "b"))
    manifest = merge([second, first, first], tmp_path / "out" / "all")
    assert documents_of(tmp_path / "out" / "all") == texts(30, "b") + texts(40, "a") * 2
    assert manifest["documents"] == 110 and len(manifest["checksums"]) == 3
    kept = read_manifest(tmp_path / "out" / "all")
    assert kept["tokenizer"] == read_manifest(first)["tokenizer"]
    assert [source["prefix"] for source in kept["made"]["from"]] == [str(second), str(first), str(first)]


def test_merge_needs_one_tokenizer(tmp_path, corpus):
    ours = written(tmp_path / "a", texts(5))
    with pytest.raises(ConfigError, match=r"first was made with tokenizer .*tokenizer\.model.*a with bytes.*build one"):
        merge([ours, corpus / "first"], tmp_path / "out")
    (tmp_path / "a.json").unlink()
    with pytest.raises(ConfigError, match=r"a\.json: no such file, so the tokenizer of .* is not known"):
        merge([ours, ours], tmp_path / "out")
    assert names_in(tmp_path) == {"a.bin", "a.idx"}


# ---------------------------------------------------------------- split


def test_split_loses_and_doubles_nothing(tmp_path, small_blocks):
    source = written(tmp_path / "a", texts(100))
    parts = split(source, [80, 15, 5], tmp_path / "p", seed=1)
    found = [documents_of(tmp_path / f"p_{name}") for name in ("train", "valid", "test")]
    assert Counter(itertools.chain(*found)) == Counter(texts(100))
    assert [len(part) for part in found] == pytest.approx([80, 15, 5], abs=2), "a block is divided up to rounding"
    assert [manifest["documents"] for manifest in parts.values()] == [len(part) for part in found]
    order = {text: place for place, text in enumerate(texts(100))}
    assert all([order[text] for text in part] == sorted(order[text] for text in part) for part in found)
    made = read_manifest(tmp_path / "p_valid")["made"]
    assert made["command"] == "split" and made["seed"] == 1 and made["part"] == "valid"


def test_split_is_exact_and_keyed_by_its_seed(tmp_path):
    source = written(tmp_path / "a", texts(100))
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        split(source, [90, 10, 0], tmp_path / name, seed)
    one, again, other = (documents_of(tmp_path / f"{name}_valid") for name in ("one", "again", "other"))
    assert len(one) == len(other) == 10 and one == again != other
    assert not (tmp_path / "one_test.bin").exists()


def test_an_empty_share_is_refused_and_leaves_nothing(tmp_path):
    source = written(tmp_path / "a", texts(5))
    with pytest.raises(ConfigError, match=r"--shares 98,1,1 of the 5 documents of .* leaves none to valid and test"):
        split(source, [98, 1, 1], tmp_path / "p", seed=1)
    assert names_in(tmp_path) == {"a.bin", "a.idx", "a.json"}


# ---------------------------------------------------------------- shuffle


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 1000, 10], ids=["in one", "in some buckets", "in many"])
def test_shuffle_is_a_keyed_order_of_the_same_documents(tmp_path, small_blocks, monkeypatch, bucket_bytes):
    monkeypatch.setattr(rearrange, "BUCKET_BYTES", bucket_bytes)
    source = written(tmp_path / "a", texts(100))
    moved: list[int] = []
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        shuffle(source, tmp_path / name, seed, moved.append)
    one, again, other = (documents_of(tmp_path / name) for name in ("one", "again", "other"))
    assert sorted(one) == sorted(other) == sorted(texts(100))
    assert one == again and one != other and one != texts(100)
    assert sum(moved) == 3 * rearrange.moved_by_shuffle(Indexed(source))
    assert names_in(tmp_path) == {f"{name}.{end}" for name in ("a", "one", "again", "other") for end in ENDS}


ENDS = ("bin", "idx", "json")


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 10])
def test_every_order_is_equally_likely(tmp_path, monkeypatch, bucket_bytes):
    monkeypatch.setattr(rearrange, "BUCKET_BYTES", bucket_bytes)
    source = written(tmp_path / "a", ["1", "2", "3"])
    orders: Counter[bytes] = Counter()
    for seed in range(240):
        shuffle(source, tmp_path / "b", seed)
        orders[(tmp_path / "b.bin").read_bytes()] += 1
    assert len(orders) == 6
    assert sum((count - 40) ** 2 / 40 for count in orders.values()) < 20.5, "chi-square of 5 degrees, one in a thousand"


def test_memory_does_not_grow_with_the_data(tmp_path, monkeypatch):
    monkeypatch.setattr(rearrange, "BUCKET_BYTES", 4 << 20)
    lengths = np.array([9_000_000, *[3000] * 2000, 5_000_000], dtype=np.int32)  # 40 MB, with two long documents
    np.zeros(int(lengths.sum()), np.uint16).tofile(tmp_path / "a.unfinished.bin")
    write_index(tmp_path / "a.unfinished.idx", [lengths], np.dtype(np.uint16))
    publish(tmp_path / "a", tmp_path / "a.unfinished", {"tokenizer": {}, "checksums": []})
    tracemalloc.start()
    shuffle(tmp_path / "a", tmp_path / "b", seed=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sorted(Indexed(tmp_path / "b").lengths) == sorted(lengths)
    assert peak < 36 << 20, "some arrays of BLOCK_TOKENS"


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("command", ["merge", "split", "shuffle"])
def test_what_fails_half_way_leaves_the_old_result(tmp_path, command):
    source = written(tmp_path / "a", texts(50))
    for name in ("p", "p_train", "p_valid"):
        written(tmp_path / name, ["old"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def killed(count: int) -> None:
        raise KeyboardInterrupt

    commands = {
        "merge": lambda: merge([source, source], tmp_path / "p", killed),
        "split": lambda: split(source, [50, 50, 0], tmp_path / "p", 1, killed),
        "shuffle": lambda: shuffle(source, tmp_path / "p", 1, killed),
    }
    with pytest.raises(KeyboardInterrupt):
        commands[command]()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_commands_say_what_they_wrote(tmp_path, capsys):
    source = str(written(tmp_path / "a", texts(50)))
    main(["data", "merge", f"{source}.bin", source, "--output", f"{tmp_path}/m"])
    main(["data", "split", source, "--shares=80,20,0", "--output", f"{tmp_path}/s", "--seed=3"])
    main(["data", "shuffle", f"{tmp_path}/m", "--output", f"{tmp_path}/r", "--seed", "3"])
    tokens = Indexed(source).tokens
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"{tmp_path}/m.bin/.idx: 100 documents, {2 * tokens:,} tokens" and len(shown) == 4
    assert shown[1].startswith(f"{tmp_path}/s_train.bin/.idx: 40 documents")
    main(["data", "inspect", f"{tmp_path}/r", "--verify", "--documents=0"])
    assert f"made by      card data shuffle of {tmp_path}/m (seed 3)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["merge", "A", "nowhere", "--output=b"], "nowhere.bin: no such file"),
        (["merge", "A", "--output=A"], "is the input"),
        (["shuffle", "A", "--output=./A"], "is the input"),
        (["shuffle", "A", "--output=b", "--seed=-1"], "--seed=-1 must be 0 or more"),
        (["split", "A", "--output=b", "--shares=98,2"], "--shares=98,2 is not three shares such as 98,1,1"),
        (["split", "A", "--output=b", "--shares=a,b,c"], "is not three shares"),
        (["split", "A", "--output=b", "--shares=0,0,0"], "is not three shares"),
        (["split", "A", "--output=b", "--shares=-1,1,1"], "is not three shares"),
        (["split", "A", "--output=b", "--shares=nan,1,1"], "is not three shares"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_users_error_is_one_message(tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    written(Path("A"), texts(3))
    with pytest.raises(SystemExit) as caught:
        main(["data", *arguments])
    assert isinstance(caught.value.code, str) and expected in caught.value.code
    assert names_in(tmp_path) == {"A.bin", "A.idx", "A.json"}
