"""What is measured: sums on the device while a step runs, numbers only when they are logged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from card_megatron.data.loader import Batch

T_BUCKETS = 10
SUMS = ("weighted_nll", "nll", "weights", "supervised", "masked")
"""The first slots of a report; the sums of nll and of scored tokens by noise level follow."""
EMPTY_REPORT = (0.0,) * (len(SUMS) + 2 * T_BUCKETS)


def make_report(batch: Batch, nll_BS: torch.Tensor, mask_id: int) -> torch.Tensor:
    """float64[len(SUMS) + 2 * T_BUCKETS]: everything that is reported of a micro-batch, as sums over its tokens."""
    scored_BS = batch.weights > 0
    nll_B = (nll_BS * scored_BS).sum(1).double()
    count_B = scored_BS.sum(1).double()
    masked_BS = (batch.tokens[:, : nll_BS.shape[1]] == mask_id) & (batch.supervised > 0)
    bucket_B = (batch.t * T_BUCKETS).long().clamp(0, T_BUCKETS - 1)
    sums = torch.stack(
        [
            (nll_BS * batch.weights).sum().double(),
            nll_B.sum(),
            batch.weights.sum().double(),
            batch.supervised.sum().double(),
            masked_BS.sum().double(),
        ]
    )
    by_t = sums.new_zeros(2, T_BUCKETS)
    by_t[0].index_add_(0, bucket_B, nll_B)
    by_t[1].index_add_(0, bucket_B, count_B)
    return torch.cat([sums, by_t.flatten()])


def sum_reports(reports: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reports of many micro-batches as one; zeros on a rank that made none."""
    if reports:
        return torch.stack(list(reports)).sum(0)
    return torch.tensor(EMPTY_REPORT, dtype=torch.float64, device=torch.cuda.current_device())


def counted_once(report: torch.Tensor) -> torch.Tensor:
    """A report to be summed over all ranks: tensor-parallel ranks score the same tokens, and only one may count."""
    return report if parallel_state.get_tensor_model_parallel_rank() == 0 else torch.zeros_like(report)


def reduce_report(report: torch.Tensor) -> torch.Tensor:
    """The sum over replicas and sequence parts, passed on from the last pipeline stage to all others."""
    report = report.clone()
    torch.distributed.all_reduce(report, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        torch.distributed.broadcast(
            report,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return report


def read_report(values: Sequence[float], normalize: str = "tokens") -> dict[str, Any]:
    """Numbers from the values of a reduced report; None where there were no tokens."""
    sums = dict(zip(SUMS, values, strict=False))
    nll_by_t, count_by_t = values[len(SUMS) : len(SUMS) + T_BUCKETS], values[len(SUMS) + T_BUCKETS :]
    tokens = sums["supervised"]
    nll = _ratio(sums["nll"], sum(count_by_t))
    return {
        "loss": _ratio(sums["weighted_nll"], tokens if normalize == "tokens" else sums["weights"]),
        "nll": nll,
        "perplexity": None if nll is None else perplexity(nll),
        "masked_fraction": _ratio(sums["masked"], tokens),
        "mean_weight": _ratio(sums["weights"], tokens),
        "nll_by_t": [_ratio(total, count) for total, count in zip(nll_by_t, count_by_t, strict=True)],
        "tokens": int(tokens),
    }


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None


def perplexity(nll: float) -> float:
    """exp(nll), and infinity instead of an overflow."""
    return math.exp(nll) if nll < 700 else math.inf
