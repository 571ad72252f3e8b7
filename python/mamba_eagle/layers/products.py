"""Products with matrices of few bits: the interface, and forms for any device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.kernels.experts.torch import Routes
from mamba_eagle.kernels.float8.torch import Operand, Rounded, Rounding, rounded, widened
from mamba_eagle.quantization.matrix import Float8Matrix, Matrix

# x [m, in], sorted by expert; ends [E] int64, where each expert's rows end -> [m, out]
GroupedProduct: TypeAlias = Callable[[Tensor, Tensor], Tensor]
GroupedLinear: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


class MatrixProduct(ABC):
    """``y = x Wᵀ + b`` for a matrix of few bits."""

    rounding: Rounding | None = None  # how inputs become float8; None: they stay as they are
    sizes: tuple[int, ...] = ()  # numbers of tokens that between them need every kernel

    @abstractmethod
    def __call__(self, x: Tensor | Rounded, bias: Tensor | None) -> Tensor:
        """x [n, in], which the caller may have rounded by ``rounding``; bias [out] -> [n, out]."""


class WritingProduct(ABC):
    """The same for a weight that is not of few bits, with a place for its results."""

    sizes: tuple[int, ...]  # numbers of tokens that between them need every kernel

    @abstractmethod
    def __call__(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x [n, in], bias [out] -> ``out`` [n, out], contiguous, or a new tensor."""


class ExpertLayer(ABC):
    """A mixture's experts, with all that is between the routes and the weighted sum."""

    input_rounding: Rounding | None = None  # how a norm before it may round x of ``rounded_from``
    rounded_from = 0  # tokens and more

    @abstractmethod
    def __call__(
        self,
        x: Operand,
        routes: Routes,
        beside: Callable[[], Tensor] | None = None,
        share: Tensor | None = None,
    ) -> Tensor:
        """x [n, size] -> the weighted sum of each token's experts, [n, size]; with ``beside`` also
        what that gives, the shared experts of the same x, which this layer may multiply itself.
        share: [n, 1], logits of their sigmoid weights; None: these are 1."""

    @abstractmethod
    def share(self, up: Tensor | Matrix, down: Tensor | Matrix) -> None:
        """The matrices of those shared experts."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """Numbers of tokens that between them need every kernel."""


class PackedProduct(MatrixProduct):
    """A product that holds its weight [out, in] in an order of its own, so that nothing else needs
    to."""

    few_bits = False

    def __init__(self, outputs: int, inputs: int) -> None:
        self.outputs, self.inputs = outputs, inputs

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the weight."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` [n] of the weight: [n, in], of the dtype that products return."""

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """x [n, in] -> [n, out]."""

    def __call__(self, x: Tensor | Rounded, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        if x.ndim != 2:
            return self(x.flatten(0, -2), bias).unflatten(0, x.shape[:-1])
        y = self.multiply(x)
        return y if bias is None else y.add_(bias)

    @property
    def matrix(self) -> PackedMatrix:
        """The weight, for those who only look at it."""
        return PackedMatrix(self, 0, self.outputs)


@dataclass(frozen=True)
class PackedMatrix(Matrix):
    """Some rows of the weight that a product holds."""

    product: PackedProduct
    first: int
    count: int

    @property
    def few_bits(self) -> bool:
        """Whether the weight was rounded, or read as it was."""
        return self.product.few_bits

    @property
    def shape(self) -> tuple[int, ...]:
        return self.count, self.product.inputs

    @property
    def nbytes(self) -> int:
        return self.product.nbytes * self.count // self.product.outputs

    def dequantize(self) -> Tensor:
        return self.product.rows(torch.arange(self.first, self.first + self.count)).float()

    def narrow(self, axis: int, start: int, length: int) -> PackedMatrix:
        if axis != -2 or start + length > self.count:
            raise ValueError(f"[{start}, {start + length}) of axis {axis}: only rows can be cut")
        return PackedMatrix(self.product, self.first + start, length)


class EachExpert:
    """A stack of experts, with a product each."""

    def __init__(self, products: Sequence[PackedProduct]) -> None:
        self.products = products

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        y = x.new_empty(len(x), self.products[0].outputs)
        begin = 0
        for product, end in zip(self.products, ends.tolist(), strict=True):
            if end > begin:
                y[begin:end] = product(x[begin:end], None)
            begin = end
        return y


@dataclass(frozen=True)
class PackedStack(Matrix):
    """The weight [E, out, in] that products of experts hold."""

    experts: tuple[PackedMatrix, ...]

    @classmethod
    def of(cls, each: EachExpert) -> PackedStack:
        return cls(tuple(product.matrix for product in each.products))

    @property
    def few_bits(self) -> bool:
        return self.experts[0].few_bits

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.experts), *self.experts[0].shape

    @property
    def nbytes(self) -> int:
        return sum(expert.nbytes for expert in self.experts)

    def dequantize(self) -> Tensor:
        return torch.stack([expert.dequantize() for expert in self.experts])

    def narrow(self, axis: int, start: int, length: int) -> PackedStack:
        raise ValueError("packed experts are not cut")


class WidenedProduct(MatrixProduct):
    """The weight is dequantized once, and nothing is saved."""

    def __init__(self, matrix: Matrix, dtype: torch.dtype) -> None:
        self.weight = matrix.dequantize().to(dtype)

    def __call__(self, x: Tensor | Rounded, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        return F.linear(x, self.weight, bias)


# Of both factors where scales are applied to the sums: float16 could not hold these. No bit of
# a float8 number is lost in it.
SHRUNK = 2.0**-9


class Float8Reference(MatrixProduct):
    """Float8 numbers multiplied in the model's dtype, on devices without float8 products.

    Where scales belong to rows and tokens, they are applied to the sums, so that the factors are
    float8 numbers; those have few enough bits for every dtype.
    """

    def __init__(
        self,
        matrix: Float8Matrix,
        dtype: torch.dtype,
        pack: Callable[[Tensor], Callable[[Tensor, Tensor | None], Tensor] | None],
    ) -> None:
        """pack: as LayerOps.pack_linear."""
        assert matrix.rounding is not None
        self.rounding: Rounding = matrix.rounding
        self.dtype = dtype
        self.by_blocks = matrix.block is not None or self.rounding.group > 0
        numbers = matrix.dequantize() if self.by_blocks else matrix.values.float() * SHRUNK
        weight = numbers.to(dtype)
        self.product = pack(weight) or (lambda x, bias: F.linear(x, weight, bias))
        self.scale = matrix.scale.mT / SHRUNK**2  # [1, 1] or [1, out]

    def __call__(self, x: Tensor | Rounded, bias: Tensor | None) -> Tensor:
        x = rounded(x, self.rounding) if isinstance(x, Tensor) else x
        if self.by_blocks:
            return self.product(widened(x).to(self.dtype), bias)
        y = self.product(x.values.to(self.dtype) * SHRUNK, None).float() * (x.scale * self.scale)
        return (y if bias is None else y + bias.float()).to(self.dtype)


class Float8Experts:
    """The same for a stack of experts."""

    def __init__(self, matrix: Float8Matrix, dtype: torch.dtype, grouped: GroupedLinear) -> None:
        """grouped: as LayerOps.grouped_linear."""
        assert matrix.rounding is not None
        self.rounding, self.dtype, self.grouped = matrix.rounding, dtype, grouped
        self.by_blocks = matrix.block is not None or self.rounding.group > 0
        numbers = matrix.dequantize() if self.by_blocks else matrix.values.float() * SHRUNK
        self.weight = numbers.to(dtype)
        self.scale = matrix.scale[..., 0] / SHRUNK**2  # [E, 1] or [E, out]

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        given = rounded(x, self.rounding)
        if self.by_blocks:
            return self.grouped(widened(given).to(self.dtype), self.weight, ends)
        y = self.grouped(given.values.to(self.dtype) * SHRUNK, self.weight, ends).float()
        expert = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
        return (y * (given.scale * self.scale[expert])).to(self.dtype)
