"""Matrices of four bits: integers with a zero point, or NVFP4's floats; scales per group of
neighbouring columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mamba_eagle.kernels.four_bit.torch import dequantize
from mamba_eagle.quantization.matrix import GroupScaled


@dataclass(frozen=True)
class FourBitMatrix(GroupScaled):
    """``number(code) * scale * factor``, where a number is ``code - zero``, or an E2M1 float
    without zero points. Byte j of a row holds column 2j in its low bits and 2j + 1 in its high
    ones."""

    codes: Tensor  # [..., out, in / 2] uint8
    scale: Tensor  # [..., out, in / group], any float dtype
    zero: Tensor | None  # [..., out, in / group] uint8; None: codes are E2M1 floats
    factor: Tensor  # [..., 1, 1] or [..., out, 1] float32

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    def dequantize(self) -> Tensor:
        return dequantize(self.codes, self.scale, self.zero, self.factor)

    def times(self, factor: float | Tensor) -> FourBitMatrix:
        if isinstance(factor, Tensor):
            factor = factor.to(self.factor.device)
        return replace(self, factor=self.factor * factor)

    @property
    def form(self) -> tuple[Any, ...]:
        return *super().form, self.scale.dtype


def pack(codes: Tensor) -> Tensor:
    """codes [out, in] of 0 to 15 -> [out, in / 2] uint8, even columns in the low bits."""
    codes = codes.to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)
