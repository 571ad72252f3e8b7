"""Attention of trees and lanes on a GPU, straight from the pool; nothing waits for the device."""

from __future__ import annotations

from torch import Tensor

from mamba_eagle.backend.attention import LaneAttention, TreeNodes
from mamba_eagle.backend.pools import KVPool
from mamba_eagle.kernels.tree_attention.triton import paged_tree_attention
from mamba_eagle.kernels.tree_attention.triton_masks import continue_lanes, pack_paths
from mamba_eagle.layers.attention import Attention


class TritonTreeAttention:
    """Attention of tree nodes to the tokens before the root and to their ancestors."""

    def __init__(self, pool: KVPool, nodes: TreeNodes) -> None:
        self.pool = pool
        self.sequences = (nodes.slot_table, nodes.slots.contiguous(), nodes.prefix)
        bits = nodes.ancestor_bits
        masks = pack_paths(nodes.ancestors) if bits is None else bits[..., None]
        self.nodes = (nodes.kv_slots.contiguous(), masks)

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b*T, heads, D]; k, v [b*T, kv_heads, D] -> [b*T, heads, D]."""
        keys, values = self.pool.k[layer.index], self.pool.v[layer.index]
        return paged_tree_attention(
            q, k, v, keys, values, *self.sequences, *self.nodes, layer.scale
        )


class TritonLanes(LaneAttention):
    """The lanes of a request are a forest that follows its prefix, in spare slots of the pool."""

    def __init__(
        self, pool: KVPool, slot_table: Tensor, slots: Tensor, prefix: Tensor, max_lanes: int
    ) -> None:
        """max_lanes: spare KV slots per request, for the lanes of all depths."""
        self.pool = pool
        self.sequences = (slot_table, slots.contiguous(), prefix)
        self.max_lanes, self.used = max_lanes, 0
        self.masks: Tensor | None = None  # lanes that the previous ones attend to, as bits

    def advance(self, above: Tensor) -> None:
        self.nodes = continue_lanes(
            above, self.masks, self.used, self.pool.padding_slot + 1, self.max_lanes
        )
        self.masks = self.nodes.masks
        self.used += above.shape[1]

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.pool.k[layer.index], self.pool.v[layer.index]
        return paged_tree_attention(
            q, k, v, keys, values, *self.sequences, *self.nodes, layer.scale
        )
