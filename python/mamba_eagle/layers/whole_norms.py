"""Attention with norms over all heads of queries, and of keys, at once, as in Olmo-Hybrid."""

import torch
from torch import Tensor, nn

from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.layer import Layer, Total
from mamba_eagle.model_config import AttentionConfig, WholeNorm
from mamba_eagle.parallel.cut import Cut, rows
from mamba_eagle.parallel.shard import Shard, attention_heads


class HeadsNorm(Layer):
    """An RMS norm over all heads at once, of which ranks add up the squares: x [n, heads, D], of a
    rank's heads."""

    def __init__(self, norm: WholeNorm, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(len(norm.copies) * head_dim))
        self.size, self.eps = norm.heads * head_dim, eps
        self.shares = [1 / count for count in norm.copies]
        self.total = Total()

    def forward(self, x: Tensor) -> Tensor:
        if self._ops.group.size == 1:
            return self._ops.rms_norm(x.flatten(1), self.weight, self.eps).view_as(x)
        each = x.float()
        squares = each.square().sum(-1) @ each.new_tensor(self.shares)  # [n]
        scale = torch.rsqrt(self.total(squares[:, None]) / self.size + self.eps)
        return (each * scale[..., None] * self.weight.float().view(x.shape[1:])).to(x.dtype)


class WholeNormAttention(Attention):
    def __init__(
        self, config: AttentionConfig, hidden_size: int, index: int, norm_eps: float
    ) -> None:
        super().__init__(config, hidden_size, index)
        assert config.whole_norms is not None
        queries, keys = config.whole_norms
        self.q_norm = HeadsNorm(queries, config.head_dim, norm_eps)
        self.k_norm = HeadsNorm(keys, config.head_dim, norm_eps)

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        own, dim = attention_heads(shard, self.config), self.config.head_dim
        q, k = rows(own.channels(dim)), rows(*own.group_channels(dim))
        return {**super().cuts(shard), "q_norm.weight": q, "k_norm.weight": k}

    def place(self, q: Tensor, k: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        q, k = self.q_norm(q), self.k_norm(k)
        if self.config.rope is None:
            return q, k
        assert ctx.rotation is not None, "the model sets it before its layers run"
        return self._ops.place_heads(q, k, *ctx.rotation, None)
