"""The index cache: a build that was killed leaves nothing that is used, and two jobs do not build at once."""

from __future__ import annotations

import multiprocessing
import time

import numpy as np
import pytest

from card_megatron.data.cache import building, is_whole
from card_megatron.data.datasets import build_clean_datasets, cache_folder
from card_megatron.data.tokenizers import load_tokenizer
from tests.curves import tiny_config


@pytest.mark.usefixtures("one_rank")
def test_a_half_built_cache_is_never_used(corpus, tmp_path):
    """Every file of the cache cut short at several lengths, or missing: the samples stay the same."""
    config = tiny_config(corpus, tmp_path)
    tokenizer = load_tokenizer(corpus / "tokenizer.model")

    def samples():
        train = build_clean_datasets(config, tokenizer).train
        return [train[index]["tokens"].tolist() for index in range(len(train))]

    expected = samples()
    files = sorted(cache_folder(config).glob("*.npy"))
    assert len(files) >= 8, "two sources and their blend"
    for path in files:
        whole = path.read_bytes()
        for kept in (0, 3, 80, len(whole) // 2, len(whole) - 1, None):
            path.unlink() if kept is None else path.write_bytes(whole[:kept])
            assert samples() == expected
            assert path.read_bytes() == whole


def test_a_whole_array_is_told_from_a_cut_one(tmp_path):
    for array in (np.arange(10), np.zeros((3, 4), np.int32), np.zeros(0), np.float64(1.0)):
        np.save(tmp_path / "a.npy", array)
        assert is_whole(tmp_path / "a.npy")
        data = (tmp_path / "a.npy").read_bytes()
        (tmp_path / "a.npy").write_bytes(data + b"x")
        assert not is_whole(tmp_path / "a.npy")


def _hold(folder, started, seconds):
    with building(folder, first=True):
        started.set()
        time.sleep(seconds)


def test_two_jobs_do_not_build_at_once(tmp_path, capfd):
    spawn = multiprocessing.get_context("spawn")
    started = spawn.Event()
    other = spawn.Process(target=_hold, args=(tmp_path, started, 1.0))
    other.start()
    assert started.wait(30)
    begun = time.monotonic()
    with building(tmp_path, first=True):
        waited = time.monotonic() - begun
    other.join(30)
    assert waited > 0.5 and "waiting for another job" in capfd.readouterr().out
