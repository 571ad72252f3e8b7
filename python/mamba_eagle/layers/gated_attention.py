"""Attention whose output passes a sigmoid gate, as in Qwen3-Next."""

from torch import Tensor

from mamba_eagle.kernels.float8.torch import Rounded
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.rotary import RotaryAttention
from mamba_eagle.model_config import AttentionConfig
from mamba_eagle.parallel.cut import Cut, rows
from mamba_eagle.parallel.shard import Shard, attention_heads


class GatedAttention(RotaryAttention):
    """``q_proj`` makes a gate beside each query head: [n, heads, query and gate]."""

    def __init__(
        self, config: AttentionConfig, hidden_size: int, index: int, norm_eps: float
    ) -> None:
        super().__init__(config, hidden_size, index, norm_eps)
        width = 2 * config.num_heads * config.head_dim
        self.q_proj = Linear(hidden_size, width, config.bias)

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        own = rows(attention_heads(shard, self.config).channels(2 * self.config.head_dim))
        return {**super().cuts(shard), "q_proj.weight": own, "q_proj.bias": own}

    def forward(self, hidden: Tensor | Rounded, ctx: ForwardContext) -> Tensor:
        both, k, v = self.projected(hidden, 2 * self.config.num_heads)
        q, gate = both[:, ::2].contiguous(), both[:, 1::2]
        q, k = self.place(q, k, ctx)
        seen = ctx.attention(self, q, k, v)
        return self.o_proj(self._ops.gate_by_sigmoid(seen, gate).flatten(1))
