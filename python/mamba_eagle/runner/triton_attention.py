"""Attention of trees and lanes on a GPU, straight from the pool; nothing waits for the device."""

from __future__ import annotations

from torch import Tensor

from mamba_eagle.kernels.tree_attention.triton import paged_tree_attention
from mamba_eagle.kernels.tree_attention.triton_masks import continue_lanes, pack_paths
from mamba_eagle.layers.attention import Attention
from mamba_eagle.runner.lanes import LaneAttention
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
        self.sequences = (slot_table, slots.contiguous(), prefix)
        self.nodes = (kv_slots.contiguous(), pack_paths(ancestors))

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
        self.sequences = (slot_table, slots.contiguous(), prefix)
        self.max_lanes, self.used = max_lanes, 0
        self.masks: Tensor | None = None  # what the last lanes see

    def advance(self, above: Tensor) -> None:
        self.nodes = continue_lanes(
            above, self.masks, self.used, self.pool.padding_slot + 1, self.max_lanes
        )
        self.masks = self.nodes.masks
        self.used += above.shape[1]
