"""Where every rank of a run will stand: its node, and its coordinates in Megatron's layout."""

from __future__ import annotations

from dataclasses import dataclass

from card_megatron.config.derived import data_parallel_size
from card_megatron.config.schema import ParallelConfig

ORDER = "tp-cp-ep-dp-pp"
"""Megatron's default: neighbours in rank are tensor-parallel neighbours."""
NAMES = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline", "ep": "expert"}


@dataclass(frozen=True)
class Place:
    """Where a rank stands."""

    rank: int
    node: int
    local_rank: int
    coordinates: dict[str, int]
    """tp, cp, dp and pp; ep too where there are experts in parallel."""


def groups_of(parallel: ParallelConfig, world_size: int) -> dict[str, list[list[int]]]:
    """Name of a kind of group -> its groups of ranks, from the generator that Megatron itself makes them with."""
    from megatron.core.parallel_state import RankGenerator

    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context, data = parallel.context_parallel_size, data_parallel_size(parallel, world_size)
    dense = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order=ORDER)
    found = {name: dense.get_ranks(name) for name in ("tp", "cp", "dp", "pp")}
    expert = parallel.expert_model_parallel_size
    if expert > 1:
        rest = world_size // (tensor * expert * pipeline)
        found["ep"] = RankGenerator(tp=tensor, ep=expert, dp=rest, pp=pipeline, cp=1, order=ORDER).get_ranks("ep")
    return found


def places(groups: dict[str, list[list[int]]], ranks_per_node: int) -> list[Place]:
    """Every rank in order: srun fills one node after the other."""
    coordinates: dict[int, dict[str, int]] = {}
    for name, kind in groups.items():
        for group in kind:
            for position, rank in enumerate(group):
                coordinates.setdefault(rank, {})[name] = position
    return [Place(rank, *divmod(rank, ranks_per_node), coordinates[rank]) for rank in sorted(coordinates)]


def table(found: list[Place]) -> str:
    """A line a rank, a block a node."""
    titles = ("node", "rank", "local", *found[0].coordinates)
    lines = ["  ".join(f"{title:>5}" for title in titles)]
    for place in found:
        if place.local_rank == 0 and place.rank:
            lines.append("")
        cells = (place.node, place.rank, place.local_rank, *place.coordinates.values())
        lines.append("  ".join(f"{cell:>5}" for cell in cells))
    return "\n".join(lines)


def crossings(groups: dict[str, list[list[int]]], ranks_per_node: int) -> list[str]:
    """Which kinds of groups span nodes, in words: tensor parallelism that does is a mistake nearly always."""
    lines = []
    for name, kind in groups.items():
        if len(kind[0]) == 1:
            continue
        widest = max(len({rank // ranks_per_node for rank in group}) for group in kind)
        where = "inside a node" if widest == 1 else f"over {widest} nodes"
        lines.append(f"{NAMES[name]}-parallel groups of {len(kind[0])}: {where}")
        if name == "tp" and widest > 1:
            lines[-1] += (
                " and WITHOUT NVLink between those: every layer waits for the network. Make "
                "parallel.tensor_model_parallel_size a divisor of the ranks on a node"
            )
    return lines
