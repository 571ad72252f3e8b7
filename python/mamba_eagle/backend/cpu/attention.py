"""Attention of trees, lanes and blocks on a CPU, straight from the pool."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.backend.attention import BlockRows, LaneAttention, TreeNodes
from mamba_eagle.backend.pools import KVPool
from mamba_eagle.kernels.tree_attention.cpu import paged_block_attention, paged_tree_attention
from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.block_attention import BlockAttention


class CpuTreeAttention:
    """Attention of tree nodes to the tokens before the root and to their ancestors."""

    def __init__(self, pool: KVPool, nodes: TreeNodes) -> None:
        self.keys, self.values = pool.k.numpy(), pool.v.numpy()
        self.indices = tuple(part.numpy() for part in nodes[:5])

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b*T, heads, D]; k, v [b*T, kv_heads, D] -> [b*T, heads, D]."""
        return _attend(self.keys, self.values, self.indices, layer, q, k, v)


class CpuLanes(LaneAttention):
    """The lanes of a request are a forest that follows its prefix, in spare slots of the pool."""

    def __init__(
        self, pool: KVPool, slot_table: Tensor, slots: Tensor, prefix: Tensor, max_lanes: int
    ) -> None:
        """max_lanes: spare KV slots per request, for the lanes of all depths."""
        b = len(slots)
        self.keys, self.values = pool.k.numpy(), pool.v.numpy()
        self.sequences = tuple(part.numpy() for part in (slot_table, slots, prefix))
        spare = pool.padding_slot + 1 + np.arange(b * max_lanes)
        self.spare = spare.reshape(b, max_lanes)
        self.own = self.parents = np.empty((b, 0), np.int64)  # KV slots, parents of lanes so far

    def advance(self, above: Tensor) -> None:
        b, topk = above.shape
        first = self.parents.shape[1]
        self.own = np.ascontiguousarray(self.spare[:, : first + topk])
        # the first lanes are roots: each is its own parent
        roots = np.tile(np.arange(topk), (b, 1))
        parent = above.numpy() + first - topk if first else roots
        self.parents = np.concatenate([self.parents, parent], axis=1)

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        indices = (*self.sequences, self.own, self.parents)
        return _attend(self.keys, self.values, indices, layer, q, k, v)


class CpuBlocks:
    """Attention of the rows of blocks to their context and to each other."""

    def __init__(self, pool: KVPool, rows: BlockRows) -> None:
        self.keys, self.values = pool.k.numpy(), pool.v.numpy()
        self.indices = tuple(part.contiguous().numpy() for part in rows)

    def attend(self, layer: BlockAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, sinks = torch.empty(q.shape), layer.attention_sink_bias
        paged_block_attention(
            *(part.contiguous().numpy() for part in (q, k, v)),
            self.keys[layer.index],
            self.values[layer.index],
            *self.indices,
            layer.window,
            layer.causal,
            (torch.empty(0) if sinks is None else sinks.detach()).numpy(),
            layer.scale,
            out.numpy(),
        )
        return out


def _attend(
    keys: np.ndarray,
    values: np.ndarray,
    indices: tuple[np.ndarray, ...],
    layer: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    out = torch.empty(q.shape)
    paged_tree_attention(
        *(part.contiguous().numpy() for part in (q, k, v)),
        keys[layer.index],
        values[layer.index],
        *indices,
        layer.scale,
        out.numpy(),
    )
    return out
