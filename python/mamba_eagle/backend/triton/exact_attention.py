"""Attention of trees and prompts with the same bits for each token, straight from the pool; nothing
waits for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_eagle.backend.attention import PromptSpan, TreeNodes
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import KVPool
from mamba_eagle.backend.triton.attention import TritonTreeAttention
from mamba_eagle.kernels.exact_attention import triton as kernels
from mamba_eagle.kernels.exact_attention.triton_pages import lay_out
from mamba_eagle.layers.context import AttentionView


class ExactTreeAttention(TritonTreeAttention):
    kernel = staticmethod(kernels.exact_tree_attention)

    def __init__(self, pool: KVPool, nodes: TreeNodes) -> None:
        """Raises: ValueError if trees have more than 64 nodes."""
        super().__init__(pool, nodes)
        kv_slots, masks = self.nodes[0], self.nodes[1].flatten(1).contiguous()
        self.nodes = (kv_slots, masks, lay_out(masks, nodes.prefix))


class ExactPrompts:
    """Attention of prompt chunks to themselves and to earlier tokens of their requests."""

    def __init__(
        self, pool: KVPool, slot_table: Tensor, spans: Sequence[PromptSpan], place: Place
    ) -> None:
        """slot_table: [R, positions], with the KV slots of the spans' tokens."""
        self.pool, self.slot_table, self.spans, self.place = pool, slot_table, spans, place
        new = [slot_table[slot, start : start + length] for slot, start, length in spans]
        self.write_slots = torch.cat(new)
        self.tiles: dict[int, Tensor] = {}  # by their tokens

    def attend(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, D]; k, v [n, kv_heads, D] -> [n, heads, D]."""
        (_, heads, D), kv_heads = q.shape, k.shape[1]
        config = kernels.prompt_config(heads, kv_heads, D, q.dtype.itemsize)
        tokens = config.rows * kv_heads // heads
        if tokens not in self.tiles:
            tiles = kernels.prompt_tiles(self.spans, tokens)
            self.tiles[tokens] = self.place.to_device(tiles, torch.int32)
        self.pool.write(layer.index, self.write_slots, k, v)
        keys, values = self.pool.k[layer.index], self.pool.v[layer.index]
        return kernels.exact_prompt_attention(
            q, keys, values, self.slot_table, self.tiles[tokens], layer.scale, config
        )
