"""Data that the tests share, made once; and the skipping of what needs an H100."""

from __future__ import annotations

from pathlib import Path

import pytest

from card_megatron.platform import capabilities, install

capabilities()  # asked before install() answers for CUDA
install()


def pytest_addoption(parser):
    parser.addoption("--cluster-rest", action="store_true", help="also the longer tests on a real SLURM")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--cluster-rest"):
        items[:] = [item for item in items if "cluster_rest" not in item.keywords]
    if capabilities().transformer_engine is None:
        for item in items:
            if "te" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs Transformer Engine: make test-te"))
    if "H100" in capabilities().device:
        return
    for item in items:
        if "h100" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA H100: unverified here"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A tokenizer and two .bin/.idx sources."""
    from tests.curves import write_corpus

    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def one_rank():
    """This process as a world of one: a process group and Megatron's groups inside it."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    from card_megatron.platform import Ranks, init_process_group

    init_process_group(Ranks())
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
