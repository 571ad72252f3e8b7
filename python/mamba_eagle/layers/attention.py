"""Grouped-query attention; keys and values belong to the context. For RoPE see rotary.py."""

from __future__ import annotations

from torch import Tensor

from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.linear import Linear
from mamba_eagle.model_config import AttentionConfig


class Attention(Layer):
    """``index`` is its place among the attention layers, that is, in the KV pool. ``input_size``:
    the width it reads, where that is not the width it gives (EAGLE-3's, with two inputs)."""

    def __init__(
        self, config: AttentionConfig, hidden_size: int, index: int, input_size: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        self.index = index
        self.scale = config.scale or config.head_dim**-0.5
        size = input_size or hidden_size
        self.q_proj = Linear(size, config.num_heads * config.head_dim, config.bias)
        self.k_proj = Linear(size, config.num_kv_heads * config.head_dim, config.bias)
        self.v_proj = Linear(size, config.num_kv_heads * config.head_dim, config.bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, hidden_size, config.bias)
        self._qkv: list[Linear] = []  # in a list: a module of its own would add checkpoint names

    def prepare(self) -> None:
        # the three input products become one
        qkv = Linear.fused([self.q_proj, self.k_proj, self.v_proj])
        qkv.prepare()
        self._qkv = [qkv]

    def forward(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        c = self.config
        heads, kv_heads = c.num_heads, c.num_kv_heads
        if self._qkv:
            packed = self._qkv[0](hidden).unflatten(-1, (-1, c.head_dim))
            q, k, v = packed.split([heads, kv_heads, kv_heads], dim=1)
        else:
            q, k, v = (
                projection(hidden).unflatten(-1, (-1, c.head_dim))
                for projection in (self.q_proj, self.k_proj, self.v_proj)
            )
        q, k = self.place(q, k, ctx)
        return self.o_proj(ctx.attention(self, q, k, v).flatten(1))

    def place(self, q: Tensor, k: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """What a position encoding does to queries and keys: here nothing."""
        return q, k
