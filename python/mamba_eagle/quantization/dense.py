"""Weights of 16 or 32 bits as checkpoints store them, for devices that multiply them so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mamba_eagle.quantization.matrix import Matrix


@dataclass(frozen=True)
class DenseMatrix(Matrix):
    """A weight in its own dtype, which may be shorter than the model's."""

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
