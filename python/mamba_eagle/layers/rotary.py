"""Rotary position encoding (arXiv 2104.09864) of all channels of a head, or of the first ones."""

import math

import torch
from torch import Tensor

from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.context import ForwardContext, Rotation
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.layers.ops import HeadNorms
from mamba_eagle.model_config import (
    AttentionConfig,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
)


class Rotary:
    """Turns positions into angles, once per forward pass; the model sets ``ctx.rotation``."""

    def __init__(self, config: RopeConfig) -> None:
        self.frequencies = rope_frequencies(config)  # [dim / 2]
        scaling = config.scaling
        self.magnitude = scaling.magnitude if isinstance(scaling, YarnScaling) else 1.0

    def __call__(self, positions: Tensor, device: torch.device) -> Rotation:
        """positions [n] int64 on any device -> angles on ``device``."""
        if self.frequencies.device != device:
            self.frequencies = self.frequencies.to(device)
        angles = positions.to(device)[:, None, None] * self.frequencies  # float32
        cos, sin = angles.cos(), angles.sin()
        if self.magnitude != 1.0:
            cos, sin = cos * self.magnitude, sin * self.magnitude
        return Rotation(cos, sin)


def rope_frequencies(config: RopeConfig) -> Tensor:
    """Radians per position of each channel pair, after scaling. [dim / 2] float32."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim
    frequencies = 1.0 / config.theta**exponents
    match config.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            turns = scaling.trained_length * frequencies / (2 * math.pi)
            keep = (turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)
        case YarnScaling() as scaling:
            keep = 1 - yarn_ramp(config, scaling)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def yarn_ramp(config: RopeConfig, scaling: YarnScaling) -> Tensor:
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


class RotaryAttention(Attention):
    """Attention whose queries and keys are rotated by position, after a norm of each head if
    ``config.head_norm``."""

    def __init__(
        self,
        config: AttentionConfig,
        hidden_size: int,
        index: int,
        norm_eps: float,
        input_size: int = 0,
    ) -> None:
        super().__init__(config, hidden_size, index, input_size)
        if config.head_norm:
            self.q_norm = RMSNorm(config.head_dim, norm_eps)
            self.k_norm = RMSNorm(config.head_dim, norm_eps)

    def place(self, q: Tensor, k: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        norms = None
        if self.config.head_norm:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        assert ctx.rotation is not None, "the model sets it before its layers run"
        return self._ops.place_heads(q, k, *ctx.rotation, norms)


def make_attention(
    config: AttentionConfig, hidden_size: int, index: int, norm_eps: float
) -> Attention:
    """Attention with rotary position encoding if ``config.rope`` is set, otherwise without."""
    if config.rope is None:
        return Attention(config, hidden_size, index)
    return RotaryAttention(config, hidden_size, index, norm_eps)
