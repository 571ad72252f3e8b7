"""Attention of trees, lanes and blocks on a GPU, straight from the pool; nothing waits for the
device."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mamba_eagle.backend.attention import BlockRows, LaneAttention, TreeNodes
from mamba_eagle.backend.pools import KVPool
from mamba_eagle.kernels.tree_attention.torch import pack_paths
from mamba_eagle.kernels.tree_attention.triton import paged_tree_attention
from mamba_eagle.kernels.tree_attention.triton_masks import continue_lanes
from mamba_eagle.layers.block_attention import BlockAttention, block_mask
from mamba_eagle.layers.context import AttentionView


class TritonNodes:
    """Attention of nodes to the prefix of their request and to each other."""

    kernel: Callable[..., Tensor] = staticmethod(paged_tree_attention)
    pool: KVPool
    sequences: tuple[Tensor, Tensor, Tensor]  # slot table, request slots, lengths of prefixes
    nodes: tuple[Any, ...]  # their KV slots, and which of them each one sees

    def attend(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, D]; k, v [n, kv_heads, D], of all new nodes -> [n, heads, D]."""
        keys, values = self.pool.k[layer.index], self.pool.v[layer.index]
        return self.kernel(q, k, v, keys, values, *self.sequences, *self.nodes, layer.scale)


class TritonTreeAttention(TritonNodes):
    """Attention of tree nodes to the tokens before the root and to their ancestors."""

    def __init__(self, pool: KVPool, nodes: TreeNodes) -> None:
        self.pool = pool
        self.sequences = (nodes.slot_table, nodes.slots.contiguous(), nodes.prefix)
        bits = nodes.ancestor_bits
        masks = pack_paths(nodes.ancestors) if bits is None else bits[..., None]
        self.nodes = (nodes.kv_slots.contiguous(), masks)


class TritonLanes(TritonNodes, LaneAttention):
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


class TritonBlocks:
    """Attention of the rows of blocks to their context and to each other."""

    def __init__(self, pool: KVPool, rows: BlockRows) -> None:
        self.pool = pool
        self.sequences = (rows.slot_table, rows.slots.contiguous(), rows.prefix)
        self.kv_slots = rows.kv_slots.contiguous()

    def attend(self, layer: BlockAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.pool.k[layer.index], self.pool.v[layer.index]
        return paged_tree_attention(
            *(q, k, v, keys, values, *self.sequences, self.kv_slots),
            _block_masks(*self.kv_slots.shape, layer.window, layer.causal, q.device),
            layer.scale,
            window=layer.window,
            sinks=layer.attention_sink_bias,
        )


@cache  # few, small, and always the same: a captured graph reads them where they are
def _block_masks(b: int, rows: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """``block_mask`` as bits: [b, rows, words] int64. Made by torch, since those of a dry run,
    which launches no kernel of ours, are used later."""
    words = -(-rows // 64)
    seen = torch.zeros(rows, 64 * words, dtype=torch.int64, device=device)
    seen[:, :rows] = block_mask(rows, min(window, rows), causal, device)
    bits = seen.view(rows, words, 64) << torch.arange(64, device=device)
    return bits.sum(-1).expand(b, -1, -1).contiguous()
