"""How layers reach earlier tokens: the part of a forward pass that is not a matrix product.

A model is the same code for training, prefill and verification. What differs is where the earlier
tokens are: in the same batch, in a KV pool, or in a state slot and rows. A ForwardContext hides
that difference: recurrent and attention layers pass it their projected inputs and get what they
read.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mamba_eagle.kernels.causal_conv.torch import causal_conv
from mamba_eagle.layers.recurrent import Inputs, Recurrent


class Rotation(NamedTuple):
    """Rotary angles of n tokens, the same in all layers and heads."""

    cos: Tensor  # [n, 1, dim / 2], float32
    sin: Tensor


class AttentionView(Protocol):
    """The properties of an attention layer that a context uses."""

    @property
    def index(self) -> int:
        """Index among the attention layers, and so in the KV pool."""

    @property
    def scale(self) -> float:
        """Factor by which attention scores are multiplied."""


class ForwardContext(Protocol):
    """How a forward pass over n tokens, flattened over sequences, accesses their sequences."""

    positions: Tensor  # [n] int64: each token's position in its sequence
    rotation: Rotation | None = None  # of ``positions``; a model with RoPE sets it first

    def run(self, layers: Sequence[nn.Module], hidden: Tensor) -> Tensor | None:
        """Some layers in a row, each with this context, if there is something better than calling
        one after the other; else None. The result may overwrite ``hidden``."""
        return None

    def gates(self, layer: Recurrent, raw: Tensor) -> Tensor:
        """What ``recur`` takes of a delta rule's raw gates, [n, ·], which a layer may ask for
        beside its larger products."""
        return raw

    def recur(self, layer: Recurrent, channels: Tensor, raw: Tensor) -> Tensor:
        """Convolution and recurrence: channels [n, conv_dim] before the convolution, and what
        ``layer.gates`` reads, [n, ·], or ``gates`` made of it -> y [n, inner_size]."""

    def attention(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention: q [n, heads, D], k and v [n, kv_heads, D] -> [n, heads, D]."""


class FullSequenceContext(ForwardContext):
    """``batch`` whole sequences of ``length`` tokens, for training and as the reference.

    It starts from zero states, keeps no state and is differentiable. n = batch * length, one
    sequence after the other.
    """

    def __init__(self, batch: int, length: int, device: torch.device | None = None) -> None:
        """device: where positions are created; use that of the model."""
        self.batch, self.length, self.device = batch, length, device

    @cached_property
    def positions(self) -> Tensor:  # type: ignore[override]
        return torch.arange(self.length, device=self.device).repeat(self.batch)

    def recur(self, layer: Recurrent, channels: Tensor, raw: Tensor) -> Tensor:
        channels = channels.unflatten(0, (self.batch, self.length))
        gates = layer.gates(raw).unflatten(0, (self.batch, self.length))
        convolved = causal_conv(
            channels, layer.conv1d.weight[:, 0], layer.conv1d.bias, silu=layer.config.conv_silu
        )
        return layer.scan(Inputs(convolved, gates), None, layer.config.chunk_size).y.flatten(0, 1)

    def attention(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(0, (self.batch, self.length)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=layer.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1)
