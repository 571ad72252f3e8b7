"""Matrix products, and the packed form that makes a handful of rows cheap on a CPU."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mamba_eagle.kernels import numba_math
from mamba_eagle.kernels.linear import cpu
from mamba_eagle.layers.layer import Layer

_PACKED_OPS = (
    hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()
)


class Linear(Layer):
    """``y = x Wᵀ + b``; weight [out, in], x [n, in].

    On a CPU in float32, ``prepare()`` keeps two more copies of the weight: one in oneDNN's blocked
    layout, which a dozen rows are multiplied with in half the time of the BLAS product, and for
    fewer rows one in bfloat16, if that loses nothing.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.is_part = False  # of a fused product
        self._packed: Tensor | None = None
        self._bfloat16: np.ndarray | None = None  # the weight's 16 bits, as uint16

    @classmethod
    def fused(cls, parts: list[Linear]) -> Linear:
        """One product for several that read the same input; outputs stand side by side.

        The parts' weights become views of its own, so that nothing is stored twice, and the parts
        are not to be called any more.
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

    def prepare(self) -> None:
        weight = self.weight.detach()
        if self.is_part or weight.device.type != "cpu" or weight.dtype != torch.float32:
            return
        if _PACKED_OPS:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 12)
        if numba_math.usable(weight.device, weight.dtype):
            short = weight.bfloat16()
            if torch.equal(short.float(), weight):
                self._bfloat16 = short.view(torch.uint16).numpy()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if self._bfloat16 is not None and rows <= cpu.MAX_ROWS:
            y = torch.empty(rows, self._bfloat16.shape[0])
            cpu.few_rows(x.contiguous().numpy(), self._bfloat16, y.numpy())
            return y if self.bias is None else y.add_(self.bias)
        if self._packed is not None and rows > 2:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)
