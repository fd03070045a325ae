"""Keys and values of every row, allocated once, written in place, read as views.

A row's new tokens are written behind its own length; going back is not counting them. So a pass copies no prefix, and
grouped queries share their keys by standing side by side as queries: nothing is repeated.

Shapes: B rows, H query heads, G query heads that share one of N key heads, W new tokens, L positions that are read,
D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F


class KVCache:
    """The store of one model, or of one rank's part of it."""

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        shape = (layers, slots, kv_heads, capacity, head_dim)
        self.slots, self.kv_heads, self.capacity = slots, kv_heads, capacity
        # zeros: a weight of 0 times whatever memory held may be nan
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def fits(self, slots: int, capacity: int) -> bool:
        return slots <= self.slots and capacity <= self.capacity

    def move(self, source: int, target: int, length: int) -> None:
        """A row of `length` tokens takes another slot."""
        for store in (self.keys, self.values):
            store[:, target, :, :length] = store[:, source, :, :length]


@dataclass
class Branches:
    """New tokens that are no chain: several branches behind one trunk. All numbers count from a row's start.

    Keys and values are written side by side all the same, the trunk's first, so that what it adds to the text stays.
    """

    positions_BW: np.ndarray
    """Where in the text a column stands."""
    trunk_BW: np.ndarray
    """The last column of the trunk that a column sees; of the trunk's own columns, itself."""
    branch_BW: np.ndarray
    """The first column of its branch, which it sees up to `last_BW`; of the trunk's own columns, itself."""
    last_BW: np.ndarray | None = None
    """The last column that a column sees at all; None: itself, as in a causal model."""


class CachePass:
    """One pass of W new tokens for each of the rows in slots first .. first + B - 1, from each row's own position on.

    What all layers share is made here, once: where keys are written, and which of them a query sees.
    """

    def __init__(
        self,
        cache: KVCache,
        first: int,
        starts_B: np.ndarray,
        width: int,
        groups: int,
        branches: Branches | None = None,
    ):
        rows, self.width = len(starts_B), width
        self.cache, self.slots, self.length = cache, slice(first, first + rows), int(starts_B.max()) + width
        device = cache.keys.device
        columns_BW = starts_B[:, None] + np.arange(width)
        own_BW = torch.from_numpy(columns_BW).to(device)
        self.positions_BW = own_BW
        heads = (first + np.arange(rows))[:, None] * cache.kv_heads + np.arange(cache.kv_heads)
        places_BNW = heads[:, :, None] * cache.capacity + columns_BW[:, None, :]
        self.places = torch.from_numpy(places_BNW.reshape(-1)).to(device)
        self.mask = None
        if width > 1 or int(starts_B.min()) + 1 < self.length or branches is not None:
            keys = torch.arange(self.length, device=device)
            if branches is None:
                sees_BWL = keys <= own_BW[:, :, None]
            else:
                last = np.arange(width) if branches.last_BW is None else branches.last_BW
                self.positions_BW, trunk_BW, branch_BW, last_BW = (
                    torch.from_numpy(starts_B[:, None] + counted).to(device)
                    for counted in (branches.positions_BW, branches.trunk_BW, branches.branch_BW, last)
                )
                sees_BWL = (keys <= trunk_BW[:, :, None]) | (keys >= branch_BW[:, :, None])
                sees_BWL &= keys <= last_BW[:, :, None]
            # where every query sees every key, attention is faster without a mask
            if branches is None or branches.last_BW is None or not bool(sees_BWL.all()):
                # added to the scores; made a float here, because a bool would be made one by every layer
                mask = torch.zeros(sees_BWL.shape, dtype=cache.keys.dtype, device=device)
                self.mask = mask.masked_fill_(~sees_BWL, float("-inf")).repeat(1, groups, 1)[:, None]

    def attend(
        self, layer: int, q_BHWD: torch.Tensor, k_BNWD: torch.Tensor, v_BNWD: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        """Store the new keys and values; each query sees what the mask allows. Returns [B, W, H, D]."""
        rows, heads, width, head_dim = q_BHWD.shape
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        for store, new in ((keys, k_BNWD), (values, v_BNWD)):
            store.view(-1, head_dim).index_copy_(0, self.places, new.reshape(-1, head_dim))
        out = F.scaled_dot_product_attention(
            q_BHWD.reshape(rows, self.cache.kv_heads, -1, head_dim),
            keys[self.slots, :, : self.length],
            values[self.slots, :, : self.length],
            attn_mask=self.mask,
            scale=scale,
        )
        return out.reshape(rows, heads, width, head_dim).transpose(1, 2)
