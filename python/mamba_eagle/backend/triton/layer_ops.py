"""Layer operations on a GPU by Triton's kernels."""

import torch
from torch import Tensor

from mamba_eagle.backend.torch.layer_ops import CudaOps
from mamba_eagle.backend.triton import products
from mamba_eagle.backend.triton.adapters import SegmentedAdditions
from mamba_eagle.backend.triton.experts import fuse_experts, pack_router
from mamba_eagle.kernels.float8.torch import Operand, Rounding
from mamba_eagle.kernels.float8.triton import rounded
from mamba_eagle.kernels.gated_norm.triton import gated_norm
from mamba_eagle.kernels.relu_squared.triton import relu_squared_, rounded_relu_squared
from mamba_eagle.kernels.rms_norm.triton import add_rms_norm_, rms_norm
from mamba_eagle.kernels.rotary.triton import rotate_
from mamba_eagle.kernels.sigmoid_gate.triton import gate_by_sigmoid
from mamba_eagle.kernels.silu_gate.triton import silu_and_mul
from mamba_eagle.layers.ops import HeadNorms, Normed, Product
from mamba_eagle.layers.products import ExpertLayer, MatrixProduct
from mamba_eagle.quantization.four_bit import FourBitMatrix
from mamba_eagle.quantization.matrix import Float8Matrix, Matrix


class TritonOps(CudaOps):
    name = "triton"

    # kernels that are the method
    rms_norm = staticmethod(rms_norm)
    silu_and_mul = staticmethod(silu_and_mul)
    gate_by_sigmoid = staticmethod(gate_by_sigmoid)
    rotate = staticmethod(rotate_)
    pack_router = staticmethod(pack_router)

    def round(self, x: Tensor, rounding: Rounding | None) -> Operand:
        return x if rounding is None else rounded(x, rounding)

    def add_rms_norm(
        self,
        stream: Tensor,
        added: Tensor,
        weight: Tensor,
        eps: float,
        rounding: Rounding | None = None,
    ) -> Normed:
        return Normed(add_rms_norm_(stream, added, weight, eps, rounding), stream)

    def relu_squared(self, x: Tensor, rounding: Rounding | None = None) -> Operand:
        if rounding is None or rounding.group:
            return self.round(relu_squared_(x.contiguous()), rounding)
        return rounded_relu_squared(x, rounding)

    def gated_group_rms_norm(
        self,
        y: Tensor,
        gate: Tensor,
        weight: Tensor,
        group_size: int,
        eps: float,
        rounding: Rounding | None = None,
    ) -> Operand:
        return gated_norm(y, gate, weight, y.shape[1] // group_size, eps, rounding)

    def head_norm_then_gate(
        self, y: Tensor, gate: Tensor, weight: Tensor, eps: float, rounding: Rounding | None = None
    ) -> Operand:
        groups = y.shape[1] // len(weight)
        return gated_norm(y, gate, weight, groups, eps, rounding, norm_first=True)

    def place_heads(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None
    ) -> tuple[Tensor, Tensor]:
        rotate_(q, cos, sin, k, norms)
        return q, k

    # ── products ──

    additions = staticmethod(SegmentedAdditions)
    keeps = staticmethod(products.multiplies)

    def pack_linear(self, weight: Tensor) -> Product | None:
        return products.of_sixteen_bits(weight)

    def pack_matrix(self, matrix: Matrix, dtype: torch.dtype) -> MatrixProduct:
        device = next(iter(matrix.tensors().values())).device
        if isinstance(matrix, Float8Matrix) and products.multiplies(matrix, device):
            return products.Float8Product(matrix, dtype)
        if (
            isinstance(matrix, FourBitMatrix)
            and dtype in products.SIXTEEN_BITS
            and products.multiplies(matrix, device)
        ):
            return products.FourBitProduct(matrix, dtype)
        return super().pack_matrix(matrix, dtype)

    def fuse_experts(
        self, up: Tensor | Matrix, down: Tensor | Matrix, act: str, dtype: torch.dtype
    ) -> ExpertLayer | None:
        return fuse_experts(up, down, act, dtype, self.grouped_linear)
