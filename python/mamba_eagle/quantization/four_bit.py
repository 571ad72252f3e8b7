"""Matrices of four bits: integers with a zero point, or NVFP4's floats; scales per group of
neighbouring columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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

    @classmethod
    def join(cls, parts: Sequence[FourBitMatrix]) -> FourBitMatrix | None:
        first = parts[0]
        alike = all(
            part.group == first.group
            and part.scale.dtype == first.scale.dtype
            and (part.zero is None) == (first.zero is None)
            for part in parts
        )
        if not alike:
            return None
        zeros = [part.zero for part in parts if part.zero is not None]
        factors = [part.factor.expand(part.shape[-2], 1) for part in parts]
        scales = [part.scale for part in parts]
        if first.scale.element_size() == 1:  # float8 is not concatenated everywhere; bytes are
            scales = [scale.view(torch.uint8) for scale in scales]
        return cls(
            torch.cat([part.codes for part in parts]),
            torch.cat(scales).view(first.scale.dtype),
            torch.cat(zeros) if zeros else None,
            torch.cat(factors),
        )


def pack(codes: Tensor) -> Tensor:
    """codes [out, in] of 0 to 15 -> [out, in / 2] uint8, even columns in the low bits."""
    codes = codes.to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)
