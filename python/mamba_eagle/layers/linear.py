"""Matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.ops import LayerOps, Product


class Linear(Layer):
    """``y = x Wᵀ + b``; weight [out, in], x [n, in]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.is_part = False  # whether a fused product replaces this one
        self._packed: Product | None = None

    @classmethod
    def fused(cls, parts: list[Linear]) -> Linear:
        """One product that replaces ``parts``, which read the same input; outputs are concatenated.

        The weights of the parts become views of the fused weight, so that nothing is stored twice.
        The parts must not be called afterwards.
        """
        sizes = [part.weight.shape[0] for part in parts]
        whole = cls(parts[0].weight.shape[1], sum(sizes))
        whole.weight = nn.Parameter(
            torch.cat([part.weight.detach() for part in parts]), requires_grad=False
        )
        for part, view in zip(parts, whole.weight.split(sizes)):
            part.weight = nn.Parameter(view, requires_grad=False)
            part.is_part = True
        biases = [part.bias.detach() for part in parts if part.bias is not None]
        whole.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        return whole

    def prepare(self, ops: LayerOps) -> None:
        if not self.is_part:
            self._packed = ops.pack_linear(self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return self._packed(x, self.bias)
        return F.linear(x, self.weight, self.bias)
