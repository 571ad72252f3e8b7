"""Matrices of few bits: what every layout is read into, and every product is made from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.kernels.float8.torch import Rounding, row_scale, to_e4m3

Self = TypeVar("Self", bound="Matrix")
Grouped = TypeVar("Grouped", bound="GroupScaled")


@dataclass(frozen=True)
class Matrix(ABC):
    """A weight [..., out, in] as numbers of few bits and scales; dimensions before the last two are
    those of a stack of experts."""

    @property
    def few_bits(self) -> bool:
        """False: it has 16 or 32, and only the place where it is kept is another."""
        return True

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """[..., out, in], of the weight it stands for."""

    @abstractmethod
    def dequantize(self) -> Tensor:
        """The weight, float32."""

    def times(self: Self, factor: float | Tensor) -> Self | None:
        """The product with one number, or with one per row [out, 1]; None if scales cannot take
        it in."""
        return None

    @abstractmethod
    def narrow(self: Self, axis: int, start: int, length: int) -> Self:
        """Some rows (axis -2) or columns (axis -1), as a view.

        Raises: ValueError if they begin or end inside of a block that shares a scale.
        """

    @classmethod
    def join(cls: type[Self], parts: Sequence[Self]) -> Self | None:
        """One matrix with the rows of all ``parts``; None if their inputs are rounded in different
        ways, or if their scales do not fit one grid."""
        return None

    def tensors(self) -> dict[str, Tensor]:
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self: Self, device: torch.device) -> Self:
        return replace(self, **{name: part.to(device) for name, part in self.tensors().items()})

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.tensors().values())

    @classmethod
    def stack(cls: type[Self], parts: Sequence[Self]) -> Self | None:
        """[E, out, in] from E matrices [out, in]; None if they are not alike."""
        first = parts[0]
        if any(not first.is_like(part) for part in parts):
            return None
        names = first.tensors()
        stacked: dict[str, Any] = {
            name: torch.stack([getattr(part, name) for part in parts]) for name in names
        }
        return replace(first, **stacked)

    def is_like(self, other: Matrix) -> bool:
        """Whether both can be in one stack: the same form, up to the numbers."""
        mine, theirs = self.tensors(), other.tensors()
        return type(self) is type(other) and all(
            name in theirs and theirs[name].shape == part.shape and theirs[name].dtype == part.dtype
            for name, part in mine.items()
        )


class GroupScaled(Matrix):
    """One whose ``scale`` has a number for each group of neighbouring columns of a row; what has
    one row, or one column, belongs to all."""

    @property
    def group(self) -> int:
        """Columns per scale."""
        return self.shape[-1] // self.tensors()["scale"].shape[-1]

    def narrow(self: Self, axis: int, start: int, length: int) -> Self:
        columns, parts = self.shape[-1], self.tensors()
        group = columns // parts["scale"].shape[-1]
        if axis == -1 and (start % group or length % group):
            raise ValueError(
                f"[{start}, {start + length}) of {columns} cuts a group of {group} columns that "
                "share a scale"
            )
        cut: dict[str, Any] = {}
        for name, part in parts.items():
            each = columns // part.shape[-1] if axis == -1 else 1  # columns of one of its numbers
            if part.shape[axis] > 1:
                cut[name] = part.narrow(axis, start // each, length // each)
        return replace(self, **cut)

    @classmethod
    def join(cls: type[Grouped], parts: Sequence[Grouped]) -> Grouped | None:
        first, (form, *others) = parts[0], [part.form for part in parts]
        if any(other != form for other in others):
            return None
        rows = [part.shape[-2] for part in parts]
        joined: dict[str, Any] = {}
        for name in first.tensors():
            each = [part.tensors()[name] for part in parts]
            joined[name] = _cat_rows(
                [part.expand(*part.shape[:-2], n, -1) for part, n in zip(each, rows)]
            )
        return replace(first, **joined)

    @property
    def form(self) -> tuple[Any, ...]:
        """What matrices that become one have in common."""
        return self.group, *self.tensors()


@dataclass(frozen=True)
class Float8Matrix(Matrix):
    """Float8 numbers and float32 scales: one per matrix, per row, or per block."""

    values: Tensor  # [..., out, in] float8
    scale: Tensor  # [..., 1, 1], [..., out, 1] or [..., out blocks, in blocks] float32
    block: tuple[int, int] | None = None  # rows and columns that share a scale
    rounding: Rounding | None = None  # of the inputs; None: they keep the model's dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def dequantize(self) -> Tensor:
        return self.values.float() * self._whole_scale()

    def _whole_scale(self) -> Tensor:
        """Scales that can be multiplied with the values."""
        scale = self.scale
        if self.block is not None:
            for axis, size in zip((-2, -1), self.block, strict=True):
                length = self.values.shape[axis]
                scale = scale.repeat_interleave(size, dim=axis).narrow(axis, 0, length)
        return scale

    def times(self, factor: float | Tensor) -> Float8Matrix | None:
        if isinstance(factor, Tensor) and self.block is not None:
            return None
        if isinstance(factor, Tensor):
            factor = factor.to(self.scale.device)
        return replace(self, scale=self.scale * factor)

    def narrow(self, axis: int, start: int, length: int) -> Float8Matrix:
        scale = self.scale
        if self.block is not None:
            size, whole = self.block[axis], self.values.shape[axis]
            if start % size or ((start + length) % size and start + length != whole):
                raise ValueError(
                    f"[{start}, {start + length}) of {whole} cuts a block of {size} that shares a "
                    "scale"
                )
            scale = scale.narrow(axis, start // size, -(-length // size))
        elif scale.shape[axis] > 1:
            scale = scale.narrow(axis, start, length)
        return replace(self, values=self.values.narrow(axis, start, length), scale=scale)

    @classmethod
    def join(cls, parts: Sequence[Float8Matrix]) -> Float8Matrix | None:
        first = parts[0]
        if any(not same_rounding(first.rounding, part.rounding) for part in parts):
            return None
        if any(
            part.block != first.block or part.values.dtype != first.values.dtype for part in parts
        ):
            return None
        if first.block is not None:
            if any(part.shape[-2] % first.block[0] for part in parts[:-1]):
                return None
            scale = torch.cat([part.scale for part in parts], dim=-2)
        elif all(
            part.scale.shape[-2] == 1 and bool((part.scale == first.scale).all()) for part in parts
        ):
            scale = first.scale
        else:
            scale = torch.cat([part._row_scales() for part in parts], dim=-2)
        return replace(first, values=_cat_rows([part.values for part in parts]), scale=scale)

    def _row_scales(self) -> Tensor:
        return self.scale.expand(*self.scale.shape[:-2], self.shape[-2], 1)

    def is_like(self, other: Matrix) -> bool:
        if not isinstance(other, Float8Matrix) or not super().is_like(other):
            return False
        return self.block == other.block and same_rounding(self.rounding, other.rounding)

    def to(self, device: torch.device) -> Float8Matrix:
        moved, rounding = super().to(device), self.rounding
        if rounding is not None and rounding.scale is not None:
            rounding = rounding._replace(scale=rounding.scale.to(device))
        return replace(moved, rounding=rounding)


def _cat_rows(parts: Sequence[Tensor]) -> Tensor:
    """Of several float dtypes in the longest. Float8 is not concatenated on every device; its bytes
    are."""
    if parts[0].element_size() > 1:
        return torch.cat(list(parts), dim=-2)
    bits = torch.cat([part.view(torch.uint8) for part in parts], dim=-2)
    return bits.view(parts[0].dtype)


def same_rounding(one: Rounding | None, other: Rounding | None) -> bool:
    return one is other if one is None else one.equals(other)


def quantized(weight: Tensor, block: int = 0) -> Float8Matrix:
    """A weight [..., out, in] rounded to float8 with one scale per row, for inputs with one scale
    per token. block: of one scale per so large a square, for inputs with one per group of as many
    columns; 0: none."""
    if not block:
        scale = row_scale(weight)
        return Float8Matrix(to_e4m3(weight.float() / scale), scale, rounding=Rounding())
    rows, columns = weight.shape[-2:]
    padded = F.pad(weight.float(), (0, -columns % block, 0, -rows % block))
    squares = padded.unflatten(-1, (-1, block)).unflatten(-3, (-1, block)).transpose(-2, -3)
    scale = row_scale(squares.flatten(-2))
    values = to_e4m3(squares / scale[..., None]).transpose(-2, -3).flatten(-2).flatten(-3, -2)
    values = values[..., :rows, :columns].contiguous()
    return Float8Matrix(values, scale[..., 0], (block, block), Rounding(group=block))


def float8_matrix(
    values: Tensor,
    scale: Tensor,
    block: tuple[int, int] | None = None,
    rounding: Rounding | None = None,
) -> Float8Matrix:
    """A matrix as files store it.

    Args:
        values: [..., out, in] float8.
        scale: one for all; [...] one per expert; [..., out] or [..., out, 1]; for one per block
            [..., out blocks, in blocks], or ModelOpt's [out blocks, 1, in blocks, 1].
        block: rows and columns per block, for scales that are neither one nor one per row.

    Raises: ValueError if the scales do not fit the weight.
    """
    stack, (rows, columns) = values.shape[:-2], values.shape[-2:]
    size = block or (128, 128)
    misfit = ValueError(
        f"scales {list(scale.shape)} do not fit {list(values.shape)} in blocks of {list(size)}"
    )
    scale = scale.float()
    if scale.numel() == 1:
        return Float8Matrix(values, scale.reshape(1).expand(*stack, 1, 1), None, rounding)
    if stack and scale.shape == stack:
        return Float8Matrix(values, scale[..., None, None], None, rounding)
    if scale.ndim == values.ndim - 1:
        scale = scale[..., None]
    elif scale.ndim == values.ndim + 2:
        scale = scale.squeeze(-1).squeeze(-2)
    if scale.ndim != values.ndim or scale.shape[:-2] != stack:
        raise misfit
    sizes = []
    for length, count, wanted in zip((rows, columns), scale.shape[-2:], size, strict=True):
        found = {-(-length // wanted): wanted, length: 1, 1: length}.get(count)
        if found is None:
            raise misfit
        sizes.append(found)
    if sizes == [1, columns]:
        return Float8Matrix(values, scale, None, rounding)
    return Float8Matrix(values, scale, (sizes[0], sizes[1]), rounding)


@dataclass(frozen=True)
class DenseMatrix(Matrix):
    """A weight of 16 or 32 bits as checkpoints store it, for devices that multiply it so: in its
    own dtype, which may be shorter than the model's."""

    values: Tensor  # [..., out, in], float dtype

    @property
    def few_bits(self) -> bool:
        return False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def dequantize(self) -> Tensor:
        return self.values.float()

    def times(self, factor: float | Tensor) -> DenseMatrix:
        return replace(self, values=self.values.float() * factor)

    def narrow(self, axis: int, start: int, length: int) -> DenseMatrix:
        return replace(self, values=self.values.narrow(axis, start, length))

    @classmethod
    def join(cls, parts: Sequence[DenseMatrix]) -> DenseMatrix | None:
        """In the longest of the dtypes, which loses nothing."""
        return cls(torch.cat([part.values for part in parts], dim=-2))
