"""The operations that layers consist of, in torch.

Each backend passes its own ``LayerOps`` to the layers when these are prepared for inference.
Before that, layers use ``TORCH``, which is differentiable and the reference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.kernels.experts.torch import Choice, Routes
from mamba_eagle.kernels.float8.torch import Operand, Rounding, rounded
from mamba_eagle.kernels.gated_norm.torch import gated_group_rms_norm, head_norm_then_gate
from mamba_eagle.kernels.rotary.torch import rotate
from mamba_eagle.layers import products
from mamba_eagle.layers.adapters import AdapterSize, Additions, SeparateAdditions, StackedAddition
from mamba_eagle.parallel.groups import ALONE, Group
from mamba_eagle.parallel.sum_table import Normed
from mamba_eagle.quantization.matrix import Float8Matrix, Matrix


class HeadNorms(NamedTuple):
    """Norms of query and key heads."""

    q: Tensor  # [D], weights
    k: Tensor  # [D]
    eps: float


# x [n, in], bias [out] or None -> [n, out]
Product: TypeAlias = Callable[[Tensor, "Tensor | None"], Tensor]
# hidden [n, size], where the experts [n, k] int32 are to be or None -> routes
FusedRouter: TypeAlias = Callable[[Tensor, "Tensor | None"], Routes]


class LayerOps:
    """The reference operations, in torch. Norms are computed in float32. rounding: how the result
    becomes float8, for a product that takes that."""

    name = "torch"
    group: Group = ALONE  # the ranks that hold a model's parts
    stages: Group = ALONE  # those that hold its layers, one after the other

    def over(self, group: Group, stages: Group = ALONE) -> LayerOps:
        """The same operations for the layers of a model that is split over ``group``, and whose
        layers are split over ``stages``."""
        ops = copy.copy(self)
        ops.group, ops.stages = group, stages
        return ops

    def total(self, partial: Tensor) -> Tensor:
        """The sum of what the ranks computed. partial must not be used afterwards, since the result
        may overwrite it."""
        return self.group.sum(partial)

    def total_add_rms_norm(
        self,
        stream: Tensor,
        partial: Tensor,
        weight: Tensor,
        eps: float,
        rounding: Rounding | None = None,
    ) -> Normed:
        """``add_rms_norm`` of the stream and what the ranks computed."""
        fused = self.group.fused_sum(partial) if rounding is None or rounding.kept else None
        if fused is None or weight.dtype != partial.dtype or stream.dtype != partial.dtype:
            return self.add_rms_norm(stream, self.total(partial), weight, eps, rounding)
        normed, total = fused.sum_norm(stream, partial, weight, eps)
        return Normed(self.round(normed, rounding), total)

    def round(self, x: Tensor, rounding: Rounding | None) -> Operand:
        """x [n, size], as float8 if there is a rounding."""
        return x if rounding is None else rounded(x, rounding)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, rounding: Rounding | None = None
    ) -> Operand:
        """``weight · x / rms(x)`` over the last dimension: x [n, size], weight [size]."""
        normed = F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
        return self.round(normed, rounding)

    def add_rms_norm(
        self,
        stream: Tensor,
        added: Tensor,
        weight: Tensor,
        eps: float,
        rounding: Rounding | None = None,
    ) -> Normed:
        """The norm of ``stream + added`` [n, size], and that sum. Neither input may be used
        afterwards, since results may overwrite them."""
        stream = stream + added
        return Normed(self.rms_norm(stream, weight, eps, rounding), stream)

    def silu_and_mul(self, both: Tensor, rounding: Rounding | None = None) -> Operand:
        """``silu(gate) * up``: both [n, 2 * size], the gate and up projections, -> [n, size]."""
        gate, up = both.chunk(2, dim=-1)
        return self.round(F.silu(gate) * up, rounding)

    def relu_squared(self, x: Tensor, rounding: Rounding | None = None) -> Operand:
        """``relu(x)²``. x must not be used afterwards, since the result may overwrite it."""
        # no square(): autocast would make it, and what backward keeps, float32
        positive = F.relu(x)
        return self.round(positive * positive, rounding)

    def sigmoid(self, x: Tensor) -> Tensor:
        """[n, …], of the same shape."""
        return x.sigmoid()

    def gated_group_rms_norm(
        self,
        y: Tensor,
        gate: Tensor,
        weight: Tensor,
        group_size: int,
        eps: float,
        rounding: Rounding | None = None,
    ) -> Operand:
        """``weight · rms_norm(y · silu(gate))`` by groups of channels: y, gate [n, size], weight
        [size] -> [n, size]."""
        return self.round(gated_group_rms_norm(y, gate, weight, group_size, eps), rounding)

    def head_norm_then_gate(
        self, y: Tensor, gate: Tensor, weight: Tensor, eps: float, rounding: Rounding | None = None
    ) -> Operand:
        """``weight · rms_norm(y) · silu(gate)`` by heads: y, gate [n, heads * P], weight [P] ->
        [n, heads * P]."""
        return self.round(head_norm_then_gate(y, gate, weight, eps), rounding)

    def gate_by_sigmoid(self, y: Tensor, gate: Tensor, rounding: Rounding | None = None) -> Operand:
        """``y · sigmoid(gate)``, both [n, heads, D] -> [n, heads * D], or [n, D] and [n, 1]. gate
        may be a view of wider rows."""
        return self.round((y * self.sigmoid(gate)).flatten(1), rounding)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate channel i < half together with channel i + half; later channels stay the same.

        x: [n, heads, D], must not be used afterwards, since the result may overwrite it. cos, sin:
        [n, 1, half] float32.
        """
        return rotate(x, cos, sin)

    def place_heads(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None
    ) -> tuple[Tensor, Tensor]:
        """``rotate`` of queries [n, heads, D] and keys [n, other heads, D], after a norm of each
        head where there are ``norms``."""
        if norms is not None:
            q, k = (
                self.rms_norm(x.reshape(-1, x.shape[-1]), weight, norms.eps).view(x.shape)
                for x, weight in ((q, norms.q), (k, norms.k))
            )
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin)

    # ── products ──

    def keeps(self, matrix: Matrix, device: torch.device) -> bool:
        """Whether products on ``device`` read ``matrix`` as it is. Where they do not, it is
        dequantized as it is loaded."""
        return False

    def pack_matrix(self, matrix: Matrix, dtype: torch.dtype) -> products.MatrixProduct:
        """The product with a matrix of few bits, which must not change afterwards. dtype: of what
        it returns."""
        if isinstance(matrix, Float8Matrix) and matrix.rounding is not None:
            return products.Float8Reference(matrix, dtype, self.pack_linear)
        return products.WidenedProduct(matrix, dtype)

    def pack_experts(self, matrix: Matrix, dtype: torch.dtype) -> products.GroupedProduct | None:
        """The same for a stack of experts, of 16 and 32 bits, too; None: there is none, so those of
        few are dequantized."""
        if isinstance(matrix, Float8Matrix) and matrix.rounding is not None:
            return products.Float8Experts(matrix, dtype, self.grouped_linear)
        return None

    def fuse_experts(
        self, up: Tensor | Matrix, down: Tensor | Matrix, act: str, dtype: torch.dtype
    ) -> products.ExpertLayer | None:
        """Both products of a mixture's experts, what is between them and the weighted sum; None:
        there are no kernels for these weights. act: relu_squared or silu_gate."""
        return None

    def pack_router(
        self, weight: Tensor, choice: Choice, beside: Tensor | None = None
    ) -> FusedRouter | None:
        """Routes by the router's weight [E, size]; None as above. beside: [1, size], whose product
        is ``Routes.share``."""
        return None

    def pack_linear(self, weight: Tensor) -> Product | None:
        """A faster product with ``weight`` [out, in], which must not change afterwards; None if
        the backend has none."""
        return None

    def additions(
        self, sizes: Sequence[AdapterSize], dtype: torch.dtype, device: torch.device
    ) -> Additions:
        """The slots of adapters of the matrices of one product, side by side, all empty. dtype: the
        product's."""
        return SeparateAdditions([StackedAddition(size, dtype, device) for size in sizes])

    def pack_embedding(self, weight: Tensor) -> Tensor:
        """The weight [vocab_size, size] in the shortest dtype that loses nothing, which rows are
        widened from as they are read."""
        return weight

    def grouped_linear(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Multiply entries ``[ends[e-1], ends[e])`` of x by the weight of expert e.

        x [m, in], weight [E, out, in] -> [m, out]. ends: [E] int64, not decreasing, the last is m.
        """
        out = x.new_empty(x.shape[0], weight.shape[1])
        begin = 0
        for expert, end in enumerate(ends.tolist()):
            if end > begin:
                torch.mm(x[begin:end], weight[expert].t(), out=out[begin:end])
            begin = end
        return out


TORCH = LayerOps()
