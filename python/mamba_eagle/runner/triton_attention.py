"""Attention of trees and lanes on a GPU, straight from the pool; nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.kernels.tree_attention.triton import paged_tree_attention, path_masks
from mamba_eagle.layers.attention import Attention
from mamba_eagle.runner.lanes import LaneAttention, seen_by_next
from mamba_eagle.runner.pools import KVPool


class TritonTreeAttention:
    """Attention of tree nodes to the tokens before the root and to their ancestors."""

    def __init__(
        self,
        pool: KVPool,
        slot_table: Tensor,
        slots: Tensor,
        prefix: Tensor,
        kv_slots: Tensor,
        ancestors: Tensor,
    ) -> None:
        """As ``contexts.tree_attention``."""
        self.pool = pool
        self.sequences = (slot_table, slots, prefix)
        self.nodes = (kv_slots.contiguous(), path_masks(ancestors))

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b*T, heads, D]; k, v [b*T, kv_heads, D] -> [b*T, heads, D]."""
        keys, values = self.pool.k[layer.index], self.pool.v[layer.index]
        return paged_tree_attention(
            q, k, v, keys, values, *self.sequences, *self.nodes, layer.scale
        )


class TritonLanes(TritonTreeAttention, LaneAttention):
    """The lanes of a request are a forest behind its prefix, in spare slots of the pool."""

    def __init__(
        self, pool: KVPool, slot_table: Tensor, slots: Tensor, prefix: Tensor, max_lanes: int
    ) -> None:
        """max_lanes: how many each request has room for, in all steps."""
        self.pool = pool
        self.sequences = (slot_table, slots, prefix)
        spare = torch.arange(len(slots) * max_lanes, device=slots.device)
        self.spare = pool.bin_slot + 1 + spare.view(-1, max_lanes)
        self.seen: Tensor | None = None  # [b, topk, lanes so far] bool

    def advance(self, above: Tensor) -> None:
        self.seen = seen_by_next(self.seen, above)
        lanes = self.seen.shape[2]
        self.nodes = (self.spare[:, :lanes].contiguous(), path_masks(self.seen))
