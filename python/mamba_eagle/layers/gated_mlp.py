"""Gated feed-forward layers: ``down(act(gate(x)) * up(x))``."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.linear import Linear
from mamba_eagle.models.config import UnsupportedModel

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def activation(name: str) -> Activation:
    """Raises: UnsupportedModel naming those known."""
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act {name!r} is not supported; known: {list(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def gated(both: Tensor, act: Activation) -> Tensor:
    """Gate and up projection side by side [n, 2 * size] -> [n, size]."""
    gate, up = both.chunk(2, dim=-1)
    return act(gate) * up


class GatedMLP(Layer):
    """Three matrices, under the names that Llama gave them."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool = False, act: str = "silu"
    ) -> None:
        super().__init__()
        self.act = activation(act)
        self.gate_proj = Linear(hidden_size, intermediate_size, bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(hidden)) * self.up_proj(hidden))


class PackedGatedMLP(Layer):
    """Gate and up projection in one matrix, as Granite publishes them."""

    def __init__(self, hidden_size: int, intermediate_size: int, act: str = "silu") -> None:
        super().__init__()
        self.act = activation(act)
        self.input_linear = Linear(hidden_size, 2 * intermediate_size)
        self.output_linear = Linear(intermediate_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output_linear(gated(self.input_linear(hidden), self.act))
