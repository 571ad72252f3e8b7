"""Layer operations on a CPU in float32: fused norms, and products for a few tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.backend.torch.layer_ops import HostOps, OneDnnLinear
from mamba_eagle.kernels.gated_norm.cpu import gated_group_rms_norm
from mamba_eagle.kernels.linear import cpu
from mamba_eagle.kernels.rms_norm.cpu import rms_norm
from mamba_eagle.layers.ops import Normed, Product


class FewRowsLinear(OneDnnLinear):
    """A product with a third copy of the weight, in bfloat16, which is used for few tokens. It
    needs half the memory traffic, and loses nothing if all weights are bfloat16 numbers."""

    def __init__(self, weight: Tensor, short: Tensor) -> None:
        super().__init__(weight)
        self.bits = short.view(torch.uint16).numpy()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.shape[0] > cpu.MAX_ROWS:
            return super().__call__(x, bias)
        y = torch.empty(x.shape[0], self.bits.shape[0])
        cpu.few_rows(x.contiguous().numpy(), self.bits, y.numpy())
        return y if bias is None else y.add_(bias)


class CpuOps(HostOps):
    name = "numba"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        rms_norm(x.numpy(), weight.numpy(), eps, out.numpy())
        return out

    def add_rms_norm(self, stream: Tensor, added: Tensor, weight: Tensor, eps: float) -> Normed:
        stream = stream + added
        return Normed(self.rms_norm(stream, weight, eps), stream)

    def gated_group_rms_norm(
        self, y: Tensor, gate: Tensor, weight: Tensor, group_size: int, eps: float
    ) -> Tensor:
        out = torch.empty_like(y)
        inputs = (y.numpy(), gate.contiguous().numpy(), weight.numpy())
        gated_group_rms_norm(*inputs, group_size, eps, out.numpy())
        return out

    def pack_linear(self, weight: Tensor) -> Product | None:
        short = weight.bfloat16()
        if torch.equal(short.float(), weight):
            return FewRowsLinear(weight, short)
        return super().pack_linear(weight)
