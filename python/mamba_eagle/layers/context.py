"""How a layer reaches the sequence: the part of a forward pass that is not a matrix product.

A model is the same code for training, prefill and verify. What differs is where the earlier
tokens are: in the same batch, in a KV pool, in a state slot and rows. A ForwardContext is that
difference. Mamba2 and attention layers hand it their projected inputs and get their outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.kernels.causal_conv.naive import causal_conv
from mamba_eagle.kernels.ssd.naive import ssd_chunked

if TYPE_CHECKING:
    from mamba_eagle.layers.attention import Attention
    from mamba_eagle.layers.mamba2 import Mamba2Mixer
    from mamba_eagle.layers.rotary import Rotation


class ForwardContext(Protocol):
    """The sequence side of a forward pass over n tokens, flat."""

    rotation: Rotation | None  # of positions; a model with RoPE sets it as its pass begins

    @property
    def positions(self) -> Tensor:
        """[n] int64: where each token stands in its sequence."""

    def mamba(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        """xbc [n, conv_dim] before the convolution, dt [n, H] raw -> y [n, H*P] with D skip."""

    def attention(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, D], k and v [n, kv_heads, D] -> [n, heads, D]."""


class FullSequenceContext:
    """``batch`` sequences of ``length`` tokens from the zero state: training and the oracle.

    Stateless and differentiable; n = batch * length, sequences one after the other.
    """

    rotation: Rotation | None = None

    def __init__(self, batch: int, length: int, device: torch.device | None = None) -> None:
        """device: of the positions; those of a GPU are best made there."""
        self.batch, self.length, self.device = batch, length, device

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.length, device=self.device).repeat(self.batch)

    def mamba(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        xbc = xbc.unflatten(0, (self.batch, self.length))
        dt = layer.step_size(dt).unflatten(0, (self.batch, self.length))
        convolved = causal_conv(xbc, layer.conv1d.weight[:, 0], layer.conv1d.bias)
        x, B, C = layer.split_xbc(convolved)
        y = ssd_chunked(x, dt, layer.decay_rate(), B, C, layer.D, layer.config.chunk_size).y
        return y.flatten(2).flatten(0, 1)

    def attention(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(0, (self.batch, self.length)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=layer.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1)
