"""Layer operations on a CPU in float32: fused norms, and products with one copy of each weight."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mamba_eagle.cpu.abi import Frame, Gate
from mamba_eagle.cpu.additions import CpuAddition
from mamba_eagle.cpu.ops.gated_norm import gated_group_rms_norm, head_norm_then_gate
from mamba_eagle.cpu.ops.rms_norm import rms_norm
from mamba_eagle.cpu.products.packed import GroupedProduct, float_product, multiplies
from mamba_eagle.cpu.spans.layers import SILU_GATE
from mamba_eagle.cpu.vector_math import sigmoid
from mamba_eagle.kernels.float8.torch import Operand, Rounding
from mamba_eagle.layers.adapters import AdapterSize, Additions, SeparateAdditions
from mamba_eagle.layers.ops import LayerOps, Product
from mamba_eagle.layers.products import EachExpert, MatrixProduct, PackedProduct
from mamba_eagle.layers.products import GroupedProduct as ExpertsProduct
from mamba_eagle.quantization.grouped import GroupedMatrix
from mamba_eagle.quantization.matrix import DenseMatrix, Matrix


class CpuOps(LayerOps):
    name = "numba"

    def __init__(self, product: Callable[[Tensor], PackedProduct] = float_product) -> None:
        """product: that with weights of 16 and 32 bits."""
        self._product = product

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, rounding: Rounding | None = None
    ) -> Operand:
        x = x.contiguous()
        out = torch.empty_like(x)
        rms_norm(x.numpy(), weight.numpy(), eps, out.numpy())
        return self.round(out, rounding)

    def gated_group_rms_norm(
        self,
        y: Tensor,
        gate: Tensor,
        weight: Tensor,
        group_size: int,
        eps: float,
        rounding: Rounding | None = None,
    ) -> Operand:
        out = torch.empty_like(y)
        inputs = (y.numpy(), gate.contiguous().numpy(), weight.numpy())
        gated_group_rms_norm(*inputs, group_size, eps, out.numpy())
        return self.round(out, rounding)

    def head_norm_then_gate(
        self, y: Tensor, gate: Tensor, weight: Tensor, eps: float, rounding: Rounding | None = None
    ) -> Operand:
        out = torch.empty_like(y)
        inputs = (y.numpy(), gate.contiguous().numpy(), weight.detach().numpy())
        head_norm_then_gate(*inputs, eps, out.numpy())
        return self.round(out, rounding)

    def silu_and_mul(self, both: Tensor, rounding: Rounding | None = None) -> Operand:
        both, (n, width) = both.contiguous(), both.shape
        out, frame = torch.empty(n, width // 2), Frame(rows=n)
        gate = Gate(frame=frame.address, size=width // 2, columns=width)
        gate.point(above=both, out=out)
        SILU_GATE(n, out.numel(), gate)
        return self.round(out, rounding)

    def sigmoid(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape)
        sigmoid(x.reshape(len(x), -1).numpy(), out.view(len(x), -1).numpy())
        return out

    def keeps(self, matrix: Matrix, device: torch.device) -> bool:
        if isinstance(matrix, DenseMatrix):
            return len(matrix.shape) == 2
        return isinstance(matrix, GroupedMatrix) and multiplies(matrix)

    def pack_matrix(self, matrix: Matrix, dtype: torch.dtype) -> MatrixProduct:
        if isinstance(matrix, DenseMatrix):
            return self._product(matrix.values)
        if isinstance(matrix, GroupedMatrix) and multiplies(matrix):
            return GroupedProduct(matrix)
        return super().pack_matrix(matrix, dtype)

    def pack_experts(self, matrix: Matrix, dtype: torch.dtype) -> ExpertsProduct | None:
        if isinstance(matrix, DenseMatrix):
            return EachExpert([self._product(expert) for expert in matrix.values])
        if isinstance(matrix, GroupedMatrix) and multiplies(matrix):
            return EachExpert([GroupedProduct(matrix.expert(e)) for e in range(matrix.shape[0])])
        return super().pack_experts(matrix, dtype)

    def pack_linear(self, weight: Tensor) -> Product | None:
        return self._product(weight)

    def additions(
        self, sizes: Sequence[AdapterSize], dtype: torch.dtype, device: torch.device
    ) -> Additions:
        return SeparateAdditions([CpuAddition(size) for size in sizes])

    def pack_embedding(self, weight: Tensor) -> Tensor:
        short = weight.bfloat16()
        same = weight.dtype == torch.float32 and torch.equal(short.float(), weight)
        return short if same else weight
