"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

import torch
from torch import Tensor

from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.model_config import AttentionConfig
from mamba_eagle.parallel.cut import Cut, columns, rows
from mamba_eagle.parallel.shard import Shard, attention_heads

LATENT_EPS = 1e-6  # of the latents' norm, whatever config.json says


class LatentAttention(Layer):
    """hidden [n, hidden_size] -> [n, hidden_size], of a rank's heads a part of the sum.

    Keys and values of head h are products K_h and V_h with a token's latent c, so that
    ``q · K_h c = (K_hᵀ q) · c`` and ``Σ w V_h c = V_h Σ w c``: queries are turned into the space of
    the latents, and all heads compare and add up what is stored, c beside the rotated part of the
    keys. The sum over that part is not used; it lets keys and values be one tensor.

    ``index`` is the layer's index among the attention layers.
    """

    def __init__(self, config: AttentionConfig, hidden_size: int, index: int, _: float) -> None:
        super().__init__()
        assert config.latent is not None
        self.config, self.latent, self.index = config, config.latent, index
        self.scale = config.scale
        heads, own = config.num_heads, config.latent
        self.query_sizes = [own.key_size, config.head_dim - own.rank]
        self.q_proj = Linear(hidden_size, heads * sum(self.query_sizes))
        self.kv_a_proj_with_mqa = Linear(hidden_size, config.head_dim)
        self.kv_a_layernorm = RMSNorm(own.rank, LATENT_EPS)
        self.kv_b_proj = Linear(own.rank, heads * (own.key_size + own.value_size))
        self.kv_b_proj.may_hold, self.kv_b_proj.is_part = False, True  # ``forward`` reads its parts
        self.o_proj = Linear(heads * own.value_size, hidden_size)
        if own.gated:
            self.g_proj = Linear(hidden_size, heads)

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        heads, own = attention_heads(shard, self.config), self.latent
        return {
            "q_proj.weight": rows(heads.channels(sum(self.query_sizes))),
            "kv_b_proj.weight": rows(heads.channels(own.key_size + own.value_size)),
            "o_proj.weight": columns(heads.channels(own.value_size), zero=heads.idle),
            "g_proj.weight": rows(heads.heads),
        }

    def forward(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        own = self.latent
        latents, key = self.kv_a_proj_with_mqa(hidden).split([own.rank, self.query_sizes[1]], -1)
        q, rotated = (
            self.q_proj(hidden)
            .unflatten(-1, (-1, sum(self.query_sizes)))
            .split(self.query_sizes, -1)
        )
        key = key[:, None]
        if ctx.rotation is not None:
            rotated, key = (self._ops.rotate(halves(x), *ctx.rotation) for x in (rotated, key))
        latents = self.kv_a_layernorm(latents.contiguous())
        both = self.kv_b_proj.weight.unflatten(0, (-1, own.key_size + own.value_size))
        keys, values = both.split([own.key_size, own.value_size], 1)  # [heads, …, rank]
        q = torch.einsum("nhk,hkr->nhr", q, keys)
        stored = torch.cat([latents[:, None], key], -1)
        summed = ctx.attention(self, torch.cat([q, rotated], -1), stored, stored)
        made = torch.einsum("nhr,hvr->nhv", summed[..., : own.rank], values)
        if own.gated:
            made = made * self.g_proj(hidden).float().sigmoid().to(made.dtype)[..., None]
        return self.o_proj(made.flatten(1))


def halves(x: Tensor) -> Tensor:
    """Channels 2i and 2i + 1, which turn together, apart by half: [n, heads, dim]."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
