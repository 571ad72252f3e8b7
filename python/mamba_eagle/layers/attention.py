"""Grouped-query attention. The context stores keys and values, and has the angles of RoPE."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mamba_eagle.kernels.float8.torch import Rounded
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.linear import JoinedLayer, Linear
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.layers.ops import HeadNorms
from mamba_eagle.model_config import AttentionConfig
from mamba_eagle.parallel.cut import Cut, columns, once, rows
from mamba_eagle.parallel.shard import Shard, attention_heads


class Attention(JoinedLayer):
    """hidden [n, input size] -> [n, hidden_size], of a rank's heads a part of the sum. With
    ``config.rope`` queries and keys are rotated by position, after a norm of each head if
    ``config.head_norm``.

    ``index`` is the layer's index among the attention layers, and so in the KV pool. ``input_size``
    is the width of the input if it differs from ``hidden_size`` (EAGLE-3 has two inputs).
    """

    q_norm: Any
    k_norm: Any

    def __init__(
        self,
        config: AttentionConfig,
        hidden_size: int,
        index: int,
        norm_eps: float,
        input_size: int = 0,
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
        if config.head_norm:
            self.q_norm = RMSNorm(config.head_dim, norm_eps)
            self.k_norm = RMSNorm(config.head_dim, norm_eps)

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        own, dim = attention_heads(shard, self.config), self.config.head_dim
        q, kv = rows(own.channels(dim)), rows(*own.group_channels(dim))
        return {
            **dict.fromkeys(("q_proj.weight", "q_proj.bias"), q),
            **dict.fromkeys(("k_proj.weight", "k_proj.bias"), kv),
            **dict.fromkeys(("v_proj.weight", "v_proj.bias"), kv),
            "o_proj.weight": columns(own.channels(dim), zero=own.idle),
            "o_proj.bias": once(self.o_proj.weight.shape[0], shard),
        }

    def projections(self) -> dict[str, list[Linear]]:
        return {"qkv": [self.q_proj, self.k_proj, self.v_proj]}

    @property
    def qkv(self) -> Linear | None:
        """The three input projections of a prepared layer as one, queries first, if they are."""
        return self._joined.get("qkv")

    def forward(self, hidden: Tensor | Rounded, ctx: ForwardContext) -> Tensor:
        q, k, v = self.projected(hidden, self.config.num_heads)
        q, k = self.place(q, k, ctx)
        return self.o_proj(ctx.attention(self, q, k, v).flatten(1))

    def projected(self, hidden: Tensor | Rounded, heads: int) -> Sequence[Tensor]:
        """[n, heads, D], as ``q_proj`` makes them, and keys and values [n, kv_heads, D]."""
        c = self.config
        if self.qkv is not None:
            packed = self.qkv(hidden).unflatten(-1, (-1, c.head_dim))
            return packed.split([heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        each = self.projections()["qkv"]
        return [projection(hidden).unflatten(-1, (-1, c.head_dim)) for projection in each]

    def place(self, q: Tensor, k: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Apply norms and the position encoding to q [n, heads, D] and k [n, kv_heads, D]."""
        if self.config.rope is None:
            return q, k
        norms = None
        if self.config.head_norm:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        assert ctx.rotation is not None, "the model sets it before its layers run"
        return self._ops.place_heads(q, k, *ctx.rotation, norms)
