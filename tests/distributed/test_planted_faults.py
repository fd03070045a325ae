"""The layout test can fail: the two classic faults of diffusion under context parallelism, planted on purpose."""

from __future__ import annotations

import pytest
import torch

from card_megatron.objectives import build_objective
from card_megatron.objectives.keys import SampleKey
from card_megatron.testing import run_distributed
from tests.curves import Curve, sample_hashes, tiny_config, train_curve
from tests.distributed.test_layouts import CP, TOLERANCE, worst_difference


def train_with_fault(fault: str | None, config, mask_id: int, eod_id: int) -> Curve:
    """One rank's curve, with the cut for context parallelism replaced by a faulty one."""
    from megatron.core import parallel_state

    from card_megatron.data import loader

    cut = loader.get_batch_on_this_cp_rank

    def weights_left_unsliced(values):
        """Every rank takes the first positions' weights, as if it held those positions."""
        share = values["weights"].shape[1] // parallel_state.get_context_parallel_world_size()
        return cut(dict(values)) | {"weights": values["weights"][:, :share].contiguous()}

    def noise_after_the_cut(values):
        """Every rank noises its own share, as if that were the sequence."""
        clean = torch.cat([values["tokens"][:, :1], values["labels"][:, :-1]], dim=1)
        share = cut(values | {"tokens": clean})
        objective = build_objective(config.objective, mask_id=mask_id, eod_id=eod_id)
        rows = [
            objective.corrupt(tokens.numpy(), labels.numpy(), supervised.numpy() != 0, SampleKey(0, "train", row))
            for row, (tokens, labels, supervised) in enumerate(
                zip(share["tokens"], share["labels"], share["supervised"], strict=True)
            )
        ]
        noised = {name: torch.stack([torch.from_numpy(getattr(row, name)) for row in rows]) for name in FAULTY}
        return share | noised

    faults = {"weights left unsliced": weights_left_unsliced, "noise drawn after the cut": noise_after_the_cut}
    loader.get_batch_on_this_cp_rank = faults.get(fault, cut)
    return train_curve(config)


FAULTY = ("tokens", "weights")


@pytest.mark.parametrize("fault", ["weights left unsliced", "noise drawn after the cut"])
def test_a_planted_fault_is_seen(corpus, tmp_path, fault):
    from card_megatron.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(corpus / "tokenizer.model")
    short = "--train.train_iters=3"
    one = tiny_config(corpus, tmp_path / "one", short)
    two = tiny_config(corpus, tmp_path / "two", short, CP)
    (oracle,) = run_distributed(train_with_fault, 1, None, one, tokenizer.mask, tokenizer.eod)
    faulty = run_distributed(train_with_fault, 2, fault, two, tokenizer.mask, tokenizer.eod)
    assert worst_difference(faulty[0].losses, oracle.losses) > 100 * TOLERANCE
    assert sample_hashes(faulty) != sample_hashes([oracle])
