"""A look at data: counts by brute force, damage found, samples as training sees them, epochs as the blend has them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch

from card_megatron.cli import main
from card_megatron.commands import data as data_command
from card_megatron.config import ConfigError
from card_megatron.data import inspect
from card_megatron.data.datasets import ObjectiveDataset, build_clean_datasets
from card_megatron.data.indexed import Indexed, publish, token_dtype, write_index
from card_megatron.data.inspect import (
    blend_sources,
    count_ids,
    damage,
    drawn_samples,
    length_statistics,
    pieces,
    visible,
)
from card_megatron.data.picture import ORANGE, read_samples, sample_grid, shade
from card_megatron.data.preprocess import build_indexed
from card_megatron.data.tokenizers import BytesTokenizer, load_tokenizer
from card_megatron.objectives import build_objective
from tests.curves import BASE, tiny_config


def written(prefix: Path, lengths: list[int], ids: np.ndarray) -> Indexed:
    """A pair of any ids in documents of any lengths."""
    ids.tofile(f"{prefix}.bin")
    write_index(Path(f"{prefix}.idx"), [np.array(lengths, np.int32)], ids.dtype)
    return Indexed(prefix)


# ---------------------------------------------------------------- counts


@pytest.mark.parametrize(("count", "long"), [(1, 0), (2, 0), (101, 0), (1000, 0), (3, 5), (3, 6)])
def test_lengths_are_those_of_brute_force(tmp_path, monkeypatch, count, long):
    monkeypatch.setattr(inspect, "BLOCK", 64)
    lengths = (np.random.default_rng(count).pareto(0.4, count) * 30).astype(int).clip(0, 200_000)
    lengths = np.concatenate([lengths, 70_000 + 111 * np.arange(long)])
    data = written(tmp_path / "a", lengths.tolist(), np.zeros(lengths.sum(), np.uint16))
    found = length_statistics(data)
    assert (found.mean, found.median) == (pytest.approx(lengths.mean()), np.median(lengths))
    assert (found.shortest, found.longest) == (lengths.min(), lengths.max())
    assert sum(bin_count for _, _, bin_count in found.histogram) == count + long
    for low, high, bin_count in found.histogram:
        assert bin_count == ((lengths >= low) & (lengths <= high)).sum() and (low == 0 or high == 2 * low - 1)


def test_documents_of_several_sequences_are_counted_as_documents(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    for sentences in ([3, 4], [5], [1, 1, 1]):
        builder.add_document(torch.arange(sum(sentences)), sentences)
    builder.finalize(str(tmp_path / "a.idx"))
    found = length_statistics(Indexed(tmp_path / "a"))
    assert (found.shortest, found.median, found.longest) == (3, 5, 7)


def test_ids_are_counted_and_those_outside_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect, "BLOCK", 64)
    ids = np.random.default_rng(1).integers(0, 50, 1000).astype(np.int32)
    assert count_ids(written(tmp_path / "a", [1000], ids), 50).counts.tolist() == np.bincount(ids).tolist()
    ids[[3, 500, 999]] = [-1, 50, 2**31 - 1]
    found = count_ids(written(tmp_path / "a", [1000], ids), 50)
    assert found.outside == 3 and found.counts.sum() == 997
    assert found.most_frequent(3) == sorted(range(50), key=lambda number: (-found.counts[number], number))[:3]


# ---------------------------------------------------------------- damage


def checked_pair(folder: Path) -> Indexed:
    """Ten documents of 10 tokens, with a checksum for each 50 bytes (2.5 documents)."""
    import zlib

    ids = np.arange(100, dtype=np.uint16)
    written(folder / "a.unfinished", [10] * 10, ids)
    ranges = [[50, f"{zlib.crc32(ids.tobytes()[start : start + 50]):08x}"] for start in range(0, 200, 50)]
    facts = {"documents": 10, "tokens": 100, "dtype": "uint16", "tokenizer": {}, "checksums": ranges}
    publish(folder / "a", folder / "a.unfinished", facts)
    return Indexed(folder / "a")


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def test_damage_is_named_with_its_range_and_documents(tmp_path):
    data = checked_pair(tmp_path)
    assert list(damage(data, data.manifest())) == []
    flip(tmp_path / "a.bin", 137)
    (found,) = damage(data, data.manifest())
    assert "bytes 100 to 149 (documents 5 to 7) have CRC-32" in found
    (shorter,) = damage(data, {**data.manifest(), "checksums": data.manifest()["checksums"][:2]})
    assert "has 200 bytes; the manifest has checksums of 100" in shorter


@pytest.mark.parametrize(
    ("byte", "expected"),
    [
        (34 + 4 * 10 + 8 * 3, "sequence 3 of 10 tokens begins at byte 61"),
        (34 + 4 * 10 + 8 * 10 + 8 * 4 + 1, "its documents do not begin one after the other"),
    ],
    ids=["pointer", "document"],
)
def test_a_damaged_index_is_noticed(tmp_path, byte, expected):
    checked_pair(tmp_path)
    flip(tmp_path / "a.idx", byte)
    data = Indexed(tmp_path / "a")
    assert expected in "\n".join(damage(data, data.manifest()))


# ---------------------------------------------------------------- text

TEXT = "A clock struck ten — “naïve” 時計 🕙.\n\tDone"


def test_pieces_together_are_the_text(corpus):
    for tokenizer in (BytesTokenizer(), load_tokenizer(corpus / "tokenizer.model")):
        ids = tokenizer.encode_batch([TEXT])[0]
        found = pieces(tokenizer, [*ids, tokenizer.eod, tokenizer.mask])
        assert len(found) == len(ids) + 2 and found[-2:] == ["<EOD>", "[MASK]"]
        assert "".join(found[:-2]).lstrip() == TEXT


def test_a_character_that_is_cut_is_shown_as_such():
    ids = BytesTokenizer().encode_batch(["é"])[0]
    assert pieces(BytesTokenizer(), ids[:1]) == ["\ufffd"]
    assert pieces(BytesTokenizer(), [BytesTokenizer.pad]) == ["<259>"]


def test_no_text_can_move_the_cursor():
    assert visible("a\n\tb\x1b[2J\u202e") == "a↵⇥b\\x1b[2J\\x202e"


# ---------------------------------------------------------------- card data inspect


@pytest.fixture
def bytes_pair(tmp_path) -> Path:
    return build_indexed(["hello", "hello world", TEXT], BytesTokenizer(), tmp_path / "a").prefix


def test_inspect_reports_all_of_it(bytes_pair, capsys):
    main(["data", "inspect", str(bytes_pair), "--verify", "--documents=2"])
    shown = capsys.readouterr().out
    tokens = 5 + 11 + len(TEXT.encode()) + 3
    assert f"verified     {2 * tokens} bytes in 1 ranges are what the manifest says" in shown
    assert f"documents    3\ntokens       {tokens} (uint16" in shown
    assert re.search(r"4 - 7 +1  █+\n +8 - 15 +1 ", shown)
    assert re.search(rf'most frequent:\n +32  " " +{TEXT.count(" ") + 1}  ', shown)
    assert f"end of doc   {3 / tokens:.3%} of the tokens: 3 in 3 documents" in shown
    assert "0 ids outside of the vocabulary, 0 [MASK]" in shown
    assert "document 0   6 tokens: hello\ndocument 1   12 tokens: hello world\n" in shown and "document 2" not in shown


def test_mask_in_the_data_is_an_error(bytes_pair):
    ids = np.fromfile(f"{bytes_pair}.bin", np.uint16)
    ids[2], ids[3] = BytesTokenizer.mask, 3000
    ids.tofile(f"{bytes_pair}.bin")
    with pytest.raises(SystemExit, match=r"holds 1 ids outside of 0 to 259 and 1 \[MASK\] \(257\)"):
        main(["data", "inspect", str(bytes_pair)])
    with pytest.raises(SystemExit, match=r"a is damaged; build or copy it again:\n  - .*bytes 0 to"):
        main(["data", "inspect", str(bytes_pair), "--verify"])


def test_a_tokenizer_that_is_elsewhere_is_no_obstacle_and_a_wrong_one_is_refused(corpus, tmp_path, capsys):
    build_indexed(["hello"], load_tokenizer(corpus / "tokenizer.model"), tmp_path / "a")
    manifest = (tmp_path / "a.json").read_text()
    (tmp_path / "a.json").write_text(manifest.replace(str(corpus), "/cluster"))
    main(["data", "inspect", f"{tmp_path}/a.idx"])
    shown = capsys.readouterr().out
    assert "tokenizer /cluster/tokenizer.model is not here; --tokenizer says where it is" in shown
    assert "of 500 ids occur" in shown
    main(["data", "inspect", f"{tmp_path}/a", f"--tokenizer={corpus}/tokenizer.model"])
    assert "tokens: hello" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"--tokenizer bytes \(sha256 bytes…\) is not the one that made"):
        main(["data", "inspect", f"{tmp_path}/a", "--tokenizer=bytes"])


def test_data_of_megatrons_own_tool_can_be_inspected(tmp_path, capsys):
    written(tmp_path / "a", [3], np.array([1, 2, 2], token_dtype(70_000)))
    main(["data", "inspect", f"{tmp_path}/a"])
    assert "2 ids occur" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"--verify: .*a\.json has no checksums"):
        main(["data", "inspect", f"{tmp_path}/a", "--verify"])


# ---------------------------------------------------------------- card data sample


def options_of(corpus: Path, folder: Path) -> list[str]:
    """The run of tiny_config(), as a command line."""
    sources = [f"--data.train=[{corpus}/first, {corpus}/second]", f"--data.tokenizer={corpus}/tokenizer.model"]
    return [*BASE, *sources, f"--data.validation.held=[{corpus}/second]", f"--run_dir={folder}"]


def noised(config, tokenizer, split: str) -> ObjectiveDataset:
    datasets = build_clean_datasets(config, tokenizer)
    clean = datasets.train if split == "train" else datasets.validation["held"]
    objective = build_objective(config.objective, mask_id=tokenizer.mask, eod_id=tokenizer.eod)
    return ObjectiveDataset(clean, objective, config.seed, split)


@pytest.mark.parametrize("split", ["train", "validation/held"])
@pytest.mark.usefixtures("one_rank")
def test_samples_are_those_of_training(corpus, tmp_path, split):
    config = tiny_config(corpus, tmp_path, f"--data.validation.held=[{corpus}/second]")
    tokenizer = load_tokenizer(corpus / "tokenizer.model")
    expected = noised(config, tokenizer, split)
    for shown in read_samples(config, tokenizer, split, start=3, count=4):
        sample = expected[shown.index]
        assert shown.t == float(sample["t"])
        assert np.array_equal(shown.weights, sample["weights"].numpy())
        assert np.array_equal(shown.masked, (sample["tokens"] == tokenizer.mask).numpy())
        assert [text == "[MASK]" for text in shown.inputs] == shown.masked.tolist()
        text = "".join(shown.targets).replace("<EOD>", "")
        assert text.split() == visible(tokenizer.decode(sample["labels"].tolist())).split() or "\ufffd" in text


def test_sample_shows_text_weights_and_a_picture(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    options = options_of(corpus, tmp_path / "run")
    main(["data", "sample", *options, "--count=2", "--picture", f"{tmp_path}/p.svg"])
    plain = capsys.readouterr().out
    heads = re.findall(r"sample \d, from .*/(?:first|second): t = [\d.]+, (\d+) of 32 inputs masked", plain)
    assert len(heads) == 2 and plain.count("[MASK]") == sum(map(int, heads)) and "\x1b" not in plain
    assert ElementTree.parse(tmp_path / "p.svg").getroot().tag.endswith("svg")

    main(["data", "sample", *options, "--count", "1", "--weights"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 32 and all(re.search(r'" +[01]\.\d{4}  █', line) for line in lines[2:])

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    main(["data", "sample", *options, "--count=1"])
    coloured = capsys.readouterr().out
    assert coloured.count("38;2;217;119;43m[MASK]") == int(heads[0]), "orange"
    assert "48;2;47;111;181m" in coloured, "the blue of a full weight"


def test_a_picture_has_a_cell_for_every_weight_and_every_mask():
    weights = np.array([[1.0, 1.0, 0.5, 0.25], [1.0, 0.0, 0.0, 0.5]])
    masked = np.array([[0, 0, 1, 1], [0, 1, 0, 1]], bool)
    drawing = sample_grid("a < b", ["0", "1"], weights, masked, [list("ab<d"), list("efgh")])
    rects = [element.attrib for element in ElementTree.fromstring(drawing) if element.tag.endswith("rect")]
    grid = [rect for rect in rects if float(rect.get("x", 0)) >= 120 and float(rect["y"]) >= 58]
    widths: dict[str, float] = {}
    for rect in grid:
        widths[rect["fill"]] = widths.get(rect["fill"], 0) + float(rect["width"]) / 64
    assert widths == {shade(1.0): 3, shade(0.5): 2, shade(0.25): 1, shade(0.0): 2, ORANGE: 4}
    words = [element.text for element in ElementTree.fromstring(drawing) if element.tag.endswith("text")]
    assert all(word in words for word in "ab<defgh")


def test_a_long_picture_is_small():
    """8 samples of 8,192 positions: equal neighbours are one rectangle."""
    rng = np.random.default_rng(1)
    masked = np.zeros((8, 8192), bool)
    masked[:, 6000:] = rng.random((8, 2192)) < 0.5
    weights = np.where(masked, 0.5, 1.0)
    drawing = sample_grid("long", [""] * 8, weights, masked, [[""] * 8192] * 8)
    assert len(drawing) < 3_000_000 and drawing.count("<rect") < 8 * 2192 * 1.2


# ---------------------------------------------------------------- card data epochs


@pytest.mark.parametrize(
    "overrides",
    [
        ["--data.train=[{0}/first, {0}/second]"],
        ["--data.train=['0.9 {0}/first', '0.1 {0}/second']", "--train.train_iters=500"],
        ["--data.train=['5 {0}/first', '3 {0}/second', '0.5 {0}/first']", "--train.train_iters=777"],
        ["--data.train=[{0}/second]", "--data.split=70,20,10", "--train.train_iters=300"],
        ["--data.train=['1 {0}/first', '1 {0}/second']", "--data.split=50,50,0", "--train.train_tokens=50000"],
    ],
    ids=["by tokens", "by weight", "three", "one", "split"],
)
@pytest.mark.usefixtures("one_rank")
def test_epochs_are_those_of_the_blend(corpus, tmp_path, overrides):
    if "tokens" in overrides[-1]:
        overrides = [*overrides, "--train.train_iters=null"]
    config = tiny_config(corpus, tmp_path, *(override.format(corpus) for override in overrides))
    train = build_clean_datasets(config, load_tokenizer(corpus / "tokenizer.model")).train
    sources = blend_sources(config)
    total = sum(source.samples for source in sources)
    if len(sources) == 1:
        chains, drawn = [train], [total]
    else:
        chains = train.datasets
        numbers = [int(train[index]["dataset_id"]) for index in range(0, total, 50)]
        assert numbers == train.dataset_index[:total:50].tolist(), "what a sample says is what the index holds"
        drawn = np.bincount(train.dataset_index[:total], minlength=len(chains)).tolist()
    for source, chain, count in zip(sources, chains, drawn, strict=True):
        assert source.samples_per_epoch == chain.samples_per_epoch
        assert source.samples == count
        assert source.epochs == count / chain.samples_per_epoch


@pytest.mark.parametrize("weights", [[1], [0.63, 0.37], [5, 3, 0.5], [1, 1, 1, 1, 1, 1, 1], [0.9, 0.05, 0.03, 0.02]])
def test_long_runs_are_counted_by_shares_and_short_ones_exactly(monkeypatch, weights):
    shares = np.array(weights) / np.sum(weights)
    exact = drawn_samples(shares, 10_007)
    monkeypatch.setattr(inspect, "EXACT_SAMPLES", 0)
    assert drawn_samples(shares, 10_007).sum() == exact.sum() == 10_007
    assert np.abs(drawn_samples(shares, 10_007) - exact).max() <= 1


def test_epochs_warns_of_sources_read_too_often(corpus, tmp_path, capsys):
    run = [*options_of(corpus, tmp_path / "run"), f"--data.train=['1 {corpus}/first', '9 {corpus}/second']"]
    main(["data", "epochs", *run, "--train.train_iters=1000", "--nproc=2"])
    shown = capsys.readouterr().out
    length = Indexed(corpus / "second").tokens
    assert re.search(
        rf"second +{length:,} +0\.9000 +7,200 +90\.00% +230,400 +{7200 / ((length - 1) // 32):.2f}\n", shown
    )
    assert re.search(r"\nrun .* 8,000 +100\.00% +256,000 ", shown)
    assert re.findall(r"warning: .*/(\w+) is read", shown) == ["second"]
    main(["data", "epochs", *run, "--train.train_iters=1000", "--limit=20"])
    assert "warning" not in capsys.readouterr().out
    assert not (tmp_path / "run").exists(), "epochs are arithmetic"


# ---------------------------------------------------------------- errors and help

MOCK = ["--data.mock=true", "--model.vocab_size=200", "--train.train_iters=4"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["inspect", "nowhere"], "nowhere.bin: no such file; `card data build --output nowhere` writes it"),
        (["inspect", "nowhere", "--documents=-1"], "--documents=-1 must be 0 or more"),
        (["sample", *MOCK, "--count=0"], "--count: '0' is not a whole number of at least 1"),
        (["sample", *MOCK, "--picture=p.png"], "--picture=p.png does not end in .svg"),
        (["sample", *MOCK, "--split=valid"], "--split=valid is not in this run; choose from train"),
        (["sample", *MOCK, "--start=1000"], "samples 1,000 to 1,001 of train are not there: it has 128"),
        (["sample", *MOCK, "--objective.taill_factor=2"], "did you mean objective.tail_factor?"),
        (["sample", *MOCK, "--cuont=2"], "did you mean count?"),
        (["sample", "--train.train_iters=4"], "data.train is empty"),
        (["epochs", *MOCK], "data.mock=true has no sources"),
        (["epochs", *MOCK, "--limit=x"], "--limit: 'x' is not a number of epochs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_users_error_is_one_message(tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["data", *arguments])
    assert isinstance(caught.value.code, str) and expected in caught.value.code


def test_a_source_shorter_than_a_sample_is_named(corpus, tmp_path):
    build_indexed(["short"], load_tokenizer(corpus / "tokenizer.model"), tmp_path / "short")
    with pytest.raises(ConfigError, match=r"short: its training share of \d tokens is shorter than one sample"):
        blend_sources(tiny_config(corpus, tmp_path, f"--data.train=[{tmp_path}/short]"))


@pytest.mark.parametrize("name", ["inspect", "sample", "epochs", "merge", "split", "shuffle"])
def test_every_command_has_help(capsys, name):
    with pytest.raises(SystemExit) as caught:
        data_command.run([name, "--help"])
    shown = capsys.readouterr().out
    assert not caught.value.code and shown.startswith(f"usage: card data {name} ")
    if name in ("sample", "epochs"):
        assert "--objective.tail_factor" in shown and "--nproc" in shown
