"""Attention over KV slots in torch: keys and values are gathered, and scores are masked."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_eagle.backend.attention import BlockRows, LaneAttention, PromptSpan, TreeNodes
from mamba_eagle.backend.pools import KVPool
from mamba_eagle.kernels.tree_attention.torch import masked_attention, sink_attention
from mamba_eagle.layers.block_attention import BlockAttention, block_mask
from mamba_eagle.layers.context import AttentionView


class PagedAttention:
    """Attention of T new tokens of each of b requests over KV slots.

    Args:
        write_slots: [b*T] int64, KV slots of the new tokens.
        read_slots: [b, S] int64, KV slots that each request's tokens attend to, new ones included.
        mask_bias: [b, T, S], 0 where a token attends to a KV slot, -inf elsewhere.
    """

    def __init__(
        self, pool: KVPool, write_slots: Tensor, read_slots: Tensor, mask_bias: Tensor
    ) -> None:
        self.pool, self.write_slots, self.read_slots = pool, write_slots, read_slots
        self.mask_bias = mask_bias

    def attend(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b*T, heads, D]; k, v [b*T, kv_heads, D] -> [b*T, heads, D]."""
        self.pool.write(layer.index, self.write_slots, k, v)
        keys, values = self.pool.read(layer.index, self.read_slots)
        shape = self.mask_bias.shape[:2]
        out = masked_attention(
            q.unflatten(0, shape), keys, values, self.mask_bias.to(q.dtype), layer.scale
        )
        return out.flatten(0, 1)


class CausalAttention:
    """Attention of prompt chunks to themselves and to earlier tokens, one chunk after the other."""

    def __init__(self, pool: KVPool, slot_table: Tensor, spans: Sequence[PromptSpan]) -> None:
        self.lengths = [span.length for span in spans]
        self.parts = [self._part(pool, slot_table[span.slot], span) for span in spans]

    def _part(self, pool: KVPool, table: Tensor, span: PromptSpan) -> PagedAttention:
        start, end = span.start, span.start + span.length
        mask = torch.full((1, span.length, end), float("-inf"), device=table.device)
        return PagedAttention(pool, table[start:end], table[None, :end], mask.triu_(start + 1))

    def attend(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, D]; k, v [n, kv_heads, D] -> [n, heads, D], with the chunks concatenated."""
        chunks = zip(self.parts, *(part.split(self.lengths) for part in (q, k, v)), strict=True)
        outputs = [part.attend(layer, *inputs) for part, *inputs in chunks]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def tree_attention(pool: KVPool, nodes: TreeNodes) -> PagedAttention:
    """Attention of tree nodes to the tokens before the root and to their ancestors."""
    longest = int(nodes.prefix.max())
    before = torch.arange(longest, device=nodes.prefix.device) < nodes.prefix[:, None]
    T = nodes.kv_slots.shape[1]
    visible = torch.cat([before[:, None].expand(-1, T, -1), nodes.ancestors], dim=2)
    bias = torch.zeros_like(visible, dtype=torch.float32).masked_fill_(~visible, float("-inf"))
    read = torch.cat([nodes.slot_table[nodes.slots, :longest], nodes.kv_slots], dim=1)
    return PagedAttention(pool, nodes.kv_slots.reshape(-1), read, bias)


def seen_by_next(seen: Tensor | None, above: Tensor) -> Tensor:
    """The lanes that the next ones attend to: those of the lanes ``above`` [b, topk], and
    themselves. [b, topk, lanes so far + topk] bool.

    seen: [b, topk, lanes so far] bool, of the previous lanes; None if there are none.
    """
    b, topk = above.shape
    own = torch.eye(topk, dtype=torch.bool, device=above.device).expand(b, -1, -1)
    if seen is None:
        return own
    index = above[..., None].expand(-1, -1, seen.shape[2])
    return torch.cat([seen.gather(1, index), own], dim=2)


class GatheredLanes(LaneAttention):
    """Attention of lanes to gathered keys and values of their prefix and of all lanes, masked."""

    def __init__(self, pool: KVPool, slot_table: Tensor, slots: Tensor, prefix: Tensor) -> None:
        """slot_table: [R, positions]. slots: [b] request slots. prefix: [b], how many positions of
        its request each lane attends to."""
        longest = int(prefix.max())
        read = slot_table[slots, :longest]
        hidden = torch.arange(longest, device=slots.device) >= prefix[:, None]
        bias = torch.zeros(hidden.shape, device=slots.device)
        self.prefix_bias = bias.masked_fill_(hidden, float("-inf"))  # [b, S]
        self.kv = [pool.read(layer, read) for layer in range(pool.k.shape[0])]
        self.seen: Tensor | None = None  # [b, topk, lanes so far] bool

    def advance(self, above: Tensor) -> None:
        self.seen = seen = seen_by_next(self.seen, above)
        bias = torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, float("-inf"))
        before = self.prefix_bias[:, None].expand(-1, above.shape[1], -1)
        self.mask_bias = torch.cat([before, bias], dim=2)

    def attend(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = self.mask_bias.shape[:2]
        keys, values = (
            torch.cat([seen, new.unflatten(0, shape).to(seen.dtype)], dim=1)
            for seen, new in zip(self.kv[layer.index], (k, v), strict=True)
        )
        self.kv[layer.index] = (keys, values)
        q = q.unflatten(0, shape)
        out = masked_attention(q, keys, values, self.mask_bias.to(q.dtype), layer.scale)
        return out.flatten(0, 1)


class GatheredBlocks:
    """Attention of blocks to gathered keys and values of their context and of themselves."""

    def __init__(self, pool: KVPool, rows: BlockRows) -> None:
        self.pool, self.rows = pool, rows
        longest = int(rows.prefix.max())
        position = torch.arange(longest, device=rows.prefix.device)
        self.away = rows.prefix[:, None] - position  # [b, S], from the anchor; <= 0: no context
        context = rows.slot_table[rows.slots, :longest]
        self.read_slots = torch.cat([context, rows.kv_slots], dim=1)

    def attend(self, layer: BlockAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, N = self.rows.kv_slots.shape
        self.pool.write(layer.index, self.rows.kv_slots.reshape(-1), k, v)
        keys, values = self.pool.read(layer.index, self.read_slots)
        row = torch.arange(N, device=q.device)[:, None]
        context = (self.away > 0)[:, None].expand(-1, N, -1)
        if layer.window:
            context = context & (self.away[:, None] + row < layer.window)
        own = block_mask(N, layer.window, layer.causal, q.device).expand(b, -1, -1)
        mask, queries = torch.cat([context, own], dim=2), q.unflatten(0, (b, N))
        if layer.attention_sink_bias is None:
            out = masked_attention(queries, keys, values, mask, layer.scale)
        else:
            sinks = layer.attention_sink_bias
            out = sink_attention(queries, keys, values, mask, layer.scale, sinks)
        return out.flatten(0, 1)
