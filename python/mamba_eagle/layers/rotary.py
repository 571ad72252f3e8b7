"""Rotary position encoding (arXiv 2104.09864) of all channels of a head, or of the first ones, and
forms of attention: with a gate, with norms of all heads at once."""

import math

import torch
from torch import Tensor, nn

from mamba_eagle import model_config
from mamba_eagle.kernels.float8.torch import Rounded
from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.context import ForwardContext, Rotation
from mamba_eagle.layers.layer import Layer, Total
from mamba_eagle.layers.linear import Linear
from mamba_eagle.parallel.cut import Cut, rows
from mamba_eagle.parallel.shard import Shard, attention_heads


class Rotary:
    """Turns positions into angles, once per forward pass; the model sets ``ctx.rotation``."""

    def __init__(self, config: model_config.RopeConfig) -> None:
        self.frequencies = rope_frequencies(config)  # [dim / 2]
        scaling = config.scaling
        self.magnitude = scaling.magnitude if isinstance(scaling, model_config.YarnScaling) else 1.0

    def __call__(self, positions: Tensor, device: torch.device) -> Rotation:
        """positions [n] int64 on any device -> angles on ``device``."""
        if self.frequencies.device != device:
            self.frequencies = self.frequencies.to(device)
        angles = positions.to(device)[:, None, None] * self.frequencies  # float32
        cos, sin = angles.cos(), angles.sin()
        if self.magnitude != 1.0:
            cos, sin = cos * self.magnitude, sin * self.magnitude
        return Rotation(cos, sin)


def rope_frequencies(config: model_config.RopeConfig) -> Tensor:
    """Radians per position of each channel pair, after scaling. [dim / 2] float32."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim
    frequencies = 1.0 / config.theta**exponents
    match config.scaling:
        case None:
            return frequencies
        case model_config.LinearScaling(factor):
            return frequencies / factor
        case model_config.Llama3Scaling() as scaling:
            turns = scaling.trained_length * frequencies / (2 * math.pi)
            keep = (turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)
        case model_config.YarnScaling() as scaling:
            keep = 1 - yarn_ramp(config, scaling)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def yarn_ramp(config: model_config.RopeConfig, scaling: model_config.YarnScaling) -> Tensor:
    """How much each channel pair is slowed down (YaRN, arXiv 2309.00071). [dim / 2] float32.

    At most 0 for pairs that complete at least ``high_turns`` turns in the trained context, at least
    1 for pairs with at most ``low_turns``, and linear in between.
    """

    def pair_that_turns(turns: float) -> float:
        wave = scaling.trained_length / turns  # positions per turn
        return config.dim * math.log(wave / (2 * math.pi)) / (2 * math.log(config.theta))

    first, last = pair_that_turns(scaling.high_turns), pair_that_turns(scaling.low_turns)
    if scaling.whole_channels:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.dim - 1)
    pairs = torch.arange(config.dim // 2, dtype=torch.float32)
    return (pairs - first) / max(last - first, 1e-3)


class GatedAttention(Attention):
    """One whose output passes a sigmoid gate, as in Qwen3-Next: ``q_proj`` makes a gate beside each
    query head, [n, heads, query and gate]."""

    def __init__(
        self, config: model_config.AttentionConfig, hidden_size: int, index: int, norm_eps: float
    ) -> None:
        super().__init__(config, hidden_size, index, norm_eps)
        width = 2 * config.num_heads * config.head_dim
        self.q_proj = Linear(hidden_size, width, config.bias)

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        own = rows(attention_heads(shard, self.config).channels(2 * self.config.head_dim))
        return {**super().cuts(shard), "q_proj.weight": own, "q_proj.bias": own}

    def forward(self, hidden: Tensor | Rounded, ctx: ForwardContext) -> Tensor:
        both, k, v = self.projected(hidden, 2 * self.config.num_heads)
        q, gate = both[:, ::2], both[:, 1::2]
        q, k = self.place(q, k, ctx)
        seen = ctx.attention(self, q, k, v)
        return self.o_proj(self._ops.gate_by_sigmoid(seen, gate, self.o_proj.rounding))


class HeadsNorm(Layer):
    """An RMS norm over all heads at once, of which ranks add up the squares: x [n, heads, D], of a
    rank's heads."""

    def __init__(self, norm: model_config.WholeNorm, head_dim: int, eps: float) -> None:
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
    """With norms over all heads of queries, and of keys, at once, as in Olmo-Hybrid."""

    def __init__(
        self, config: model_config.AttentionConfig, hidden_size: int, index: int, norm_eps: float
    ) -> None:
        super().__init__(config, hidden_size, index, norm_eps)
        assert config.whole_norms is not None
        queries, keys = config.whole_norms
        self.q_norm = HeadsNorm(queries, config.head_dim, norm_eps)
        self.k_norm = HeadsNorm(keys, config.head_dim, norm_eps)

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        own, dim = attention_heads(shard, self.config), self.config.head_dim
        q, k = rows(own.channels(dim)), rows(*own.group_channels(dim))
        return {**super().cuts(shard), "q_norm.weight": q, "k_norm.weight": k}

    def place(self, q: Tensor, k: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        return super().place(self.q_norm(q), self.k_norm(k), ctx)
