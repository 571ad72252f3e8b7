"""Matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mamba_eagle.kernels.float8.torch import Rounded, Rounding, unrounded
from mamba_eagle.layers.adapters import Additions, slots_of_rows
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.layers.products import MatrixProduct, PackedProduct, WritingProduct
from mamba_eagle.layers.weights import (
    META,
    MatrixLayer,
    empty_weight,
    joined_rows,
    weights_come_late,
    without_memory,
)
from mamba_eagle.quantization.matrix import Matrix


class Within(NamedTuple):
    """Which product computes a matrix's outputs, and from which of its own on."""

    product: Linear
    first: int


class Linear(MatrixLayer):
    """``y = x Wᵀ + b``; weight [out, in], x [n, in], or x as float8 where ``rounding`` says so.

    ``matrix`` takes the place of the weight if it has few bits.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_weight(out_features, in_features)
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.is_part = False  # whether a fused product replaces this one
        self.within: Within | None = None  # that product
        self.additions: Additions | None = None  # of adapters, where they may add something
        self._parts: list[Linear] = []  # those that this one replaces
        self.rounding: Rounding | None = None  # how a layer before it may round its inputs
        self._packed: Callable[[Any, Tensor | None], Tensor] | None = None

    @property
    def matrix(self) -> Matrix | None:
        return self.matrices.get("weight")

    @property
    def packed(self) -> PackedProduct | None:
        """What holds the weight of a prepared layer, if that is its product."""
        return self._packed if isinstance(self._packed, PackedProduct) else None

    @classmethod
    def fused(cls, parts: list[Linear]) -> Linear | None:
        """One product that replaces ``parts``, which read the same input; outputs are concatenated.

        The weights of the parts become views of the fused weight, so that nothing is stored twice.
        The parts must not be called afterwards. None if the parts are not of one form.
        """
        joined = joined_matrix(parts)
        if joined is None and any(part.matrix is not None for part in parts):
            return None
        sizes = [part.weight.shape[0] for part in parts]
        whole = cls._holding(joined_rows([part.weight.detach() for part in parts]), parts)
        begin = 0
        for part, view in zip(parts, whole.weight.split(sizes)):
            part.weight = nn.Parameter(view, requires_grad=False)
            part.is_part, part.within = True, Within(whole, begin)
            begin += len(view)
        whole._parts = list(parts)
        if joined is not None:
            whole._share(joined)
        return whole

    @classmethod
    def _holding(cls, weight: Tensor, parts: Sequence[Linear]) -> Linear:
        """A product with this weight and the parts' biases."""
        with weights_come_late():
            whole = Linear(weight.shape[1], weight.shape[0])
        whole.weight = nn.Parameter(weight, requires_grad=False)
        biases = [part.bias.detach() for part in parts if part.bias is not None]
        whole.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        return whole

    @classmethod
    def of(cls, matrix: Matrix, dtype: torch.dtype, parts: Sequence[Linear] = ()) -> Linear:
        """A product with a matrix [out, in] of few bits, and the parts' biases. dtype: of what it
        returns."""
        outputs, inputs = matrix.shape
        whole = cls._holding(without_memory((outputs, inputs), dtype), parts)
        whole.hold("weight", matrix)
        return whole

    @classmethod
    def copied(cls, parts: Sequence[Linear]) -> Linear:
        """One product with the rows of all parts, which stay as they are."""
        joined, dtype = joined_matrix(parts), parts[0].weight.dtype
        if joined is not None:
            return cls.of(joined, dtype, parts)
        weights = [
            part.weight.detach() if part.matrix is None else part.matrix.dequantize()
            for part in parts
        ]
        return cls._holding(torch.cat([part.to(dtype) for part in weights]), parts)

    def prepare(self, ops: LayerOps) -> None:
        if self.is_part:
            return
        matrix = self.matrix
        if matrix is None:
            self._packed = ops.pack_linear(self.weight.detach())
        else:
            product = ops.pack_matrix(matrix, self.weight.dtype)
            self._packed, self.rounding = product, product.rounding
        if isinstance(self._packed, PackedProduct) and self.may_hold:
            self._share(self._packed.matrix)

    def _share(self, matrix: Matrix) -> None:
        """Hold ``matrix`` in place of the weight, of which the parts have their rows."""
        self.hold("weight", matrix)
        first = 0
        for part in self._parts:
            size = part.weight.shape[0]
            part.hold("weight", matrix.narrow(-2, first, size))
            first += size

    def forward(self, x: Tensor | Rounded) -> Tensor:
        if self._packed is not None:
            y = self._packed(x, self.bias)
        else:
            assert not isinstance(x, Rounded) and self.weight.device != META, "prepare comes first"
            y = F.linear(x, self.weight, self.bias)
        if self.additions is not None and (slots := slots_of_rows()) is not None:
            self.additions(y, unrounded(x), slots)
        return y

    def rehearse(self, device: torch.device) -> None:
        if isinstance(self._packed, WritingProduct | MatrixProduct):
            (_, columns), dtype = self.weight.shape, self.weight.dtype
            for tokens in self._packed.sizes:
                self(torch.zeros(tokens, columns, dtype=dtype, device=device))

    def into(self, out: Tensor, x: Tensor) -> Tensor:
        """``forward`` without autograd, written to out [n, out_features], which is returned."""
        if out.dtype == self.weight.dtype and isinstance(self._packed, WritingProduct):
            return self._packed(x, self.bias, out)
        if self._packed is None and self.bias is None and out.dtype == self.weight.dtype:
            return torch.mm(x, self.weight.t(), out=out)
        return out.copy_(self(x))


def joined_matrix(parts: Sequence[Linear]) -> Matrix | None:
    """One matrix with the rows of all parts'; None if they are not of one form."""
    matrices = [part.matrix for part in parts if part.matrix is not None]
    if len(matrices) < len(parts) or any(type(one) is not type(matrices[0]) for one in matrices):
        return None
    return type(matrices[0]).join(matrices)


class JoinedLayer(Layer):
    """A layer in which several products read the same input: those of each entry of
    ``projections`` become one as the layer is prepared, if their weights are of one form."""

    def __init__(self) -> None:
        super().__init__()
        self._joined: dict[str, Linear] = {}  # no submodules, which would add parameter names

    def projections(self) -> dict[str, list[Linear]]:
        return {}

    @property
    def input_rounding(self) -> Rounding | None:
        """How a norm before this layer may round its inputs to float8."""
        whole = next(iter(self._joined.values()), None)
        return None if whole is None else whole.rounding

    def prepare(self, ops: LayerOps) -> None:
        super().prepare(ops)
        for name, parts in self.projections().items():
            if (whole := Linear.fused(parts)) is not None:
                whole.prepare(ops)
                self._joined[name] = whole

    def rehearse(self, device: torch.device) -> None:
        for whole in self._joined.values():
            whole.rehearse(device)
