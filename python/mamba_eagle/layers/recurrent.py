"""What all recurrent layers have in common: how a token's row is made, read and folded.

A token's channels pass a causal convolution over its K-1 nearest ancestors; with its gates, they
are all that it feeds into the recurrence. State schemes, prompts and saved journals gather these
inputs and call the methods below; which recurrence it is they do not know.

Shapes: b sequences, T tree nodes, M the longest journal, l tokens. A state has ``state_shape``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mamba_eagle.layers.layer import Layer, per_layer
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.model_config import RecurrenceConfig


class Conv1dWeight(nn.Module):
    """Depthwise convolution weights under their published names: weight [C, 1, K], bias [C]."""

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None


class JoinedConv(Layer):
    """Convolutions that are stored one by one and run as one. widths: channels of each, by name."""

    bias = None

    def __init__(self, widths: dict[str, int], width: int) -> None:
        super().__init__()
        self.names = list(widths)
        for name, channels in widths.items():
            self.add_module(name, Conv1dWeight(channels, width, bias=False))
        self._joined: Tensor | None = None

    def prepare(self, ops: LayerOps) -> None:
        self._joined = self.weight.detach()

    @property
    def weight(self) -> Tensor:
        """[C, 1, K]"""
        if self._joined is not None:
            return self._joined
        return torch.cat([getattr(self, name).weight for name in self.names])


class Inputs(NamedTuple):
    """What tokens feed into a recurrence."""

    convolved: Tensor  # [b, l, conv_dim], after the convolution
    gates: Tensor  # [b, l, gate_size] float32


class Journal(NamedTuple):
    """The rows of b requests' journals, oldest first. What lies past ``length`` is finite, and has
    no effect."""

    gates: Tensor  # [b, M, gate_size] float32
    parts: tuple[Tensor, ...]  # [b, M, width] each, as the config's ``row_parts``
    length: Tensor  # [b] int64

    @property
    def valid(self) -> Tensor:
        """[b, M] bool"""
        return torch.arange(self.gates.shape[1], device=self.length.device) < self.length[:, None]


class TreeMask(NamedTuple):
    """What the nodes of b trees see."""

    bias: Tensor  # [b, T, M + T] float32: 0 for the journal's rows and for ancestors, else -inf
    ancestors: Tensor  # [b, T, T] float32: 1 for a node's ancestors and itself


class Verified(NamedTuple):
    y: Tensor  # [b, T, inner_size] float32
    parts: tuple[Tensor, ...]  # [b, T, width] each: the rest of the nodes' rows


class Scanned(NamedTuple):
    y: Tensor  # [b, l, inner_size], dtype of the inputs
    state: Tensor  # [b, *state_shape] float32, after the last token


class Snapshots(NamedTuple):
    y: Tensor  # [b, T, inner_size] float32
    states: Tensor  # [b, T, *state_shape] float32, after each node


class Taps(NamedTuple):
    """Of a convolution over K tokens."""

    weight: Tensor  # [K, conv_dim], transposed
    bias: Tensor | None  # [conv_dim]


class Recurrent(Layer):
    """A mixer with a recurrence. ``index``: its place among the recurrent layers."""

    config: RecurrenceConfig
    index: int
    conv1d: Conv1dWeight | JoinedConv

    @per_layer
    def taps(self) -> Taps:
        """Weights that must not change afterwards, in the order in which kernels read them."""
        weight, bias = self.conv1d.weight.detach()[:, 0], self.conv1d.bias
        return Taps(weight.t().contiguous(), None if bias is None else bias.detach())

    @abstractmethod
    def gates(self, raw: Tensor) -> Tensor:
        """What the mixer projects for them -> [..., gate_size] float32."""

    @abstractmethod
    def scan(self, inputs: Inputs, state: Tensor | None, chunk: int) -> Scanned:
        """Sequences from a state [b, *state_shape], or from zeros; differentiable. chunk: tokens
        that are processed at once, if the recurrence takes any number."""

    @abstractmethod
    def verify(self, nodes: Inputs, journal: Journal, mask: TreeMask, state: Tensor) -> Verified:
        """All nodes of trees that stand below journals below states [b, *state_shape]; l = T."""

    @abstractmethod
    def fold(self, journal: Journal, state: Tensor) -> Tensor:
        """The states after the journals: [b, *state_shape] -> the same, float32."""

    @abstractmethod
    def snapshots(self, nodes: Inputs, state: Tensor, parents: Tensor) -> Snapshots:
        """Node by node, each from its parent's state. parents: [b, T], below a node's own index."""

    @staticmethod
    @abstractmethod
    def advance(mixers: Sequence[Recurrent], inputs: Inputs, state: Tensor) -> Tensor:
        """The states after the same tokens in several layers of one kind: b is their number."""
