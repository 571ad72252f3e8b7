"""Attention of trees, lanes and blocks on a CPU, straight from the pool."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.backend.attention import BlockRows, LaneAttention, PromptSpan, TreeNodes
from mamba_eagle.backend.pools import KVPool
from mamba_eagle.cpu.ops import tree_attention as cpu
from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.block_attention import BlockAttention


class FromPool:
    """Attention of new tokens, which are written to the pool, straight from there."""

    sequences: tuple[np.ndarray, ...]  # slot table, request slots, prefixes
    tree: tuple[np.ndarray, ...]  # KV slots and parents of nodes

    def __init__(self, pool: KVPool) -> None:
        self.pool, self.keys, self.values = pool, pool.k.numpy(), pool.v.numpy()

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b*T, heads, D]; k, v [b*T, kv_heads, D] -> [b*T, heads, D]."""
        return self.attend_in(self.sequences, self.tree, layer, q, k, v)

    def attend_in(
        self,
        sequences: tuple[np.ndarray, ...],
        tree: tuple[np.ndarray, ...],
        layer: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """The same of other trees; both as the kernel takes them."""
        out, pool = torch.empty(q.shape), (self.keys[layer.index], self.values[layer.index])
        new = tuple(part.contiguous().numpy() for part in (q, k, v))
        work = cpu.multiply_adds(new[0], sequences[2], tree[0])
        cpu.paged_tree_attention(
            work, new, pool, sequences, *tree, np.float32(layer.scale), out.numpy()
        )
        return out


class CpuTreeAttention(FromPool):
    """Attention of tree nodes to the tokens before the root and to their ancestors."""

    def __init__(self, pool: KVPool, nodes: TreeNodes) -> None:
        super().__init__(pool)
        indices = tuple(part.contiguous().numpy() for part in nodes[:5])
        self.sequences, self.tree = indices[:3], indices[3:]


class CpuPromptAttention(FromPool):
    """Attention of prompt chunks to themselves and to earlier tokens, with the bits of decode
    steps: each BLOCK tokens, or fewer at a chunk's end, are a tree without branches."""

    BLOCK = 16

    def __init__(self, pool: KVPool, slot_table: Tensor, spans: Sequence[PromptSpan]) -> None:
        super().__init__(pool)
        table, first = slot_table.numpy(), 0
        found: dict[int, list[tuple[int, int, int]]] = {}  # by length: row, slot, position
        written = []
        for slot, start, length in spans:
            written.append(table[slot, start : start + length])
            for at in range(0, length, self.BLOCK):
                blocks = found.setdefault(min(self.BLOCK, length - at), [])
                blocks.append((first + at, slot, start + at))
            first += length
        self.written = torch.from_numpy(np.concatenate(written))
        self.parts = []
        for length, blocks in found.items():
            rows, slots, prefix = np.array(blocks, np.int64).T
            chain = np.arange(length)
            own = table[slots[:, None], prefix[:, None] + chain]
            parents = np.tile(np.maximum(chain - 1, 0), (len(blocks), 1))
            tokens = torch.from_numpy((rows[:, None] + chain).ravel())
            sequences = (table, slots.copy(), prefix.copy())
            self.parts.append((tokens, sequences, (own, parents)))

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, D]; k, v [n, kv_heads, D] -> [n, heads, D], with the chunks concatenated."""
        self.pool.write(layer.index, self.written, k, v)  # blocks read those before them
        out = torch.empty(q.shape)
        for tokens, sequences, tree in self.parts:
            new = (part[tokens] for part in (q, k, v))
            out[tokens] = self.attend_in(sequences, tree, layer, *new)
        return out


class CpuLanes(FromPool, LaneAttention):
    """The lanes of a request are a forest that follows its prefix, in spare slots of the pool."""

    def __init__(
        self, pool: KVPool, slot_table: Tensor, slots: Tensor, prefix: Tensor, max_lanes: int
    ) -> None:
        """max_lanes: spare KV slots per request, for the lanes of all depths."""
        super().__init__(pool)
        b = len(slots)
        self.sequences = tuple(part.numpy() for part in (slot_table, slots, prefix))
        spare = pool.padding_slot + 1 + np.arange(b * max_lanes)
        self.spare = spare.reshape(b, max_lanes)
        none = np.empty((b, 0), np.int64)
        self.tree = (none, none)  # of the lanes of all depths so far

    def advance(self, above: Tensor) -> None:
        (b, topk), (_, parents) = above.shape, self.tree
        first = parents.shape[1]
        own = np.ascontiguousarray(self.spare[:, : first + topk])
        # the first lanes are roots: each is its own parent
        roots = np.tile(np.arange(topk), (b, 1))
        parent = above.numpy() + first - topk if first else roots
        self.tree = (own, np.concatenate([parents, parent], axis=1))


class CpuBlocks:
    """Attention of the rows of blocks to their context and to each other."""

    def __init__(self, pool: KVPool, rows: BlockRows) -> None:
        self.keys, self.values = pool.k.numpy(), pool.v.numpy()
        indices = tuple(part.contiguous().numpy() for part in rows)
        self.sequences, self.own = indices[:3], indices[3]

    def attend(self, layer: BlockAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, sinks = torch.empty(q.shape), layer.attention_sink_bias
        new = tuple(part.contiguous().numpy() for part in (q, k, v))
        work = cpu.multiply_adds(new[0], self.sequences[2], self.own)
        pool = (self.keys[layer.index], self.values[layer.index])
        logits = (torch.empty(0) if sinks is None else sinks.detach()).numpy()
        seen = (self.own, layer.window, layer.causal, logits, np.float32(layer.scale))
        cpu.paged_block_attention(work, new, pool, self.sequences, *seen, out.numpy())
        return out
