"""Kimi delta attention (arXiv 2510.26692): a delta rule whose decay has a number per channel."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.delta_rule import DeltaRule
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.layers.recurrent import JoinedConv
from mamba_eagle.model_config import DeltaConfig
from mamba_eagle.parallel.cut import Cut, columns, rows
from mamba_eagle.parallel.shard import Shard, recurrent_heads


class KimiDeltaAttention(DeltaRule):
    """hidden [n, hidden_size] -> [n, hidden_size], of a rank's heads a part of the sum."""

    def __init__(self, config: DeltaConfig, hidden_size: int, index: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.index = config, index
        heads, inner, width = config.num_heads, config.inner_size, config.conv_kernel
        self.q_proj, self.k_proj, self.v_proj = (Linear(hidden_size, inner) for _ in range(3))
        self.conv1d = JoinedConv(dict.fromkeys("qkv", inner), width)
        if config.narrow_decay:
            self.f_a_proj, self.g_a_proj = (Linear(hidden_size, config.head_dim) for _ in range(2))
            self.f_b_proj, self.g_b_proj = (Linear(config.head_dim, inner) for _ in range(2))
        else:
            self.f_proj, self.g_proj = (Linear(hidden_size, inner) for _ in range(2))
        self.b_proj = Linear(hidden_size, heads)
        # a few numbers that affect every token: float32, whatever the model's dtype
        self.dt_bias = nn.Parameter(torch.empty(inner, dtype=torch.float32))
        shape = (1, 1, heads, 1) if config.narrow_decay else (heads,)
        self.A_log = nn.Parameter(torch.empty(shape, dtype=torch.float32))
        self.o_norm = RMSNorm(config.head_dim, norm_eps)
        self.o_proj = Linear(inner, hidden_size)

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        own = recurrent_heads(shard, self.config)
        channels = own.channels(self.config.head_dim)
        ends = "b_proj" if self.config.narrow_decay else "proj"
        each = ["dt_bias", f"f_{ends}.weight", f"g_{ends}.weight"]
        for part in "qkv":
            each += [f"{part}_proj.weight", f"conv1d.{part}.weight"]
        return {
            **dict.fromkeys(each, rows(channels)),
            "b_proj.weight": rows(own.heads),
            "A_log": Cut(2 if self.config.narrow_decay else 0, (own.heads,)),
            "o_proj.weight": columns(channels),
        }

    def gates(self, raw: Tensor) -> Tensor:
        c = self.config
        decay, beta = raw.float().split([c.decay_size, c.num_heads], dim=-1)
        rate = self.A_log.float().exp().view(-1, 1)
        decay = (decay + self.dt_bias.float()).unflatten(-1, (c.num_heads, -1))
        if c.lowest_decay:
            g = c.lowest_decay * torch.sigmoid(rate * decay)
        else:
            g = -rate * F.softplus(decay)
        return torch.cat([g.flatten(-2), beta.sigmoid()], dim=-1)

    def forward(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        channels = [part(hidden) for part in (self.q_proj, self.k_proj, self.v_proj)]
        if self.config.narrow_decay:
            decay, gate = self.f_b_proj(self.f_a_proj(hidden)), self.g_b_proj(self.g_a_proj(hidden))
        else:
            decay, gate = self.f_proj(hidden), self.g_proj(hidden)
        raw = torch.cat([decay, self.b_proj(hidden)], dim=-1)
        y = ctx.recur(self, torch.cat(channels, dim=-1), ctx.gates(self, raw))
        normed = self.o_norm(y.reshape(-1, self.config.head_dim)).view_as(y)
        return self.o_proj(normed * gate.float().sigmoid().to(y.dtype))
