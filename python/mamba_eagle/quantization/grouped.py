"""Matrices of four or eight bits with one scale per group of neighbouring columns, and perhaps a
minimum: what a CPU multiplies, what ``--quantization int8`` and ``int4`` make, and what GGUF's
Q8_0, Q4_0 and Q4_K hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mamba_eagle.quantization.matrix import GroupScaled

GROUP = 32  # columns per scale, where this package rounds
NUMBERS_AT_ONCE = 1 << 17
MIDDLE = 8  # the code of zero in four bits, where there is no minimum


@dataclass(frozen=True)
class GroupedMatrix(GroupScaled):
    """``scale * number``, or ``scale * code + minimum`` where there is a minimum.

    Eight bits: the number, and the code, is an int8. Four bits: a code is 0 to 15 and its number is
    ``code - 8``; byte j of a row holds column 2j in its low bits and 2j + 1 in its high ones.
    """

    codes: Tensor  # [..., out, in] int8; or [..., out, in / 2] uint8, two of four bits each
    scale: Tensor  # [..., out, in / group] float16 or float32
    minimum: Tensor | None = None  # as scale

    def __post_init__(self) -> None:
        """Raises: ValueError if the parts do not fit each other."""
        if self.codes.dtype not in (torch.int8, torch.uint8):
            raise ValueError(f"codes are {self.codes.dtype}, and must be int8 or packed uint8")
        rows = self.codes.shape[:-1]
        for name, part in (("scale", self.scale), ("minimum", self.minimum)):
            if part is None:
                continue
            if part.dtype not in (torch.float16, torch.float32):
                raise ValueError(f"{name} is {part.dtype}, and must be float16 or float32")
            fits = part.shape[:-1] == rows and part.shape == self.scale.shape
            if not fits or self.shape[-1] % part.shape[-1]:
                raise ValueError(
                    f"{name} {list(part.shape)} does not fit a weight {list(self.shape)}"
                )

    @property
    def bits(self) -> int:
        return 8 if self.codes.dtype == torch.int8 else 4

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.bits)

    def dequantize(self) -> Tensor:
        numbers = self.codes
        if self.bits == 4:
            numbers = torch.stack([self.codes & 15, self.codes >> 4], dim=-1).flatten(-2)
        values = numbers.float().unflatten(-1, (-1, self.group))
        if self.bits == 4 and self.minimum is None:
            values -= MIDDLE
        values *= self.scale.float()[..., None]
        if self.minimum is not None:
            values += self.minimum.float()[..., None]
        return values.flatten(-2)

    def times(self, factor: float | Tensor) -> GroupedMatrix:
        """Scales become float32, so that nothing is rounded twice."""
        if isinstance(factor, Tensor):
            factor = factor.to(self.scale.device)
        minimum = None if self.minimum is None else self.minimum.float() * factor
        return replace(self, scale=self.scale.float() * factor, minimum=minimum)

    def expert(self, index: int) -> GroupedMatrix:
        """One matrix of a stack."""
        return replace(self, **{name: part[index] for name, part in self.tensors().items()})

    @property
    def form(self) -> tuple[Any, ...]:
        return *super().form, self.bits


def int8_groups(weight: Tensor, group: int = GROUP) -> GroupedMatrix:
    """A weight [..., out, in] as eight bits: the largest number of a group becomes ±127."""
    from mamba_eagle.quantization.group_rounding import largest, round_to_bytes

    rows, stack = weight.flatten(0, -2), weight.shape[:-1]
    codes = torch.empty(rows.shape, dtype=torch.int8)
    scale = torch.empty(len(rows), rows.shape[1] // group, dtype=torch.float16)
    for place, values in _in_float32(rows):
        scale[place] = largest(values, group) / 127
        round_to_bytes(values, group, scale[place].float(), codes[place])
    return GroupedMatrix(codes.unflatten(0, stack), scale.unflatten(0, stack))


def int4_groups(weight: Tensor) -> GroupedMatrix:
    """A weight [..., out, in] as four bits with a minimum: a group's range in 15 steps."""
    from mamba_eagle.quantization.group_rounding import range_of, round_to_pairs

    rows, stack = weight.flatten(0, -2), weight.shape[:-1]
    codes = torch.empty(len(rows), rows.shape[1] // 2, dtype=torch.uint8)
    scale = torch.empty(len(rows), rows.shape[1] // GROUP, dtype=torch.float16)
    minimum = torch.empty_like(scale)
    for place, values in _in_float32(rows):
        lowest, highest = range_of(values, GROUP)
        minimum[place] = lowest
        lowest = minimum[place].float()
        scale[place] = (highest - lowest) / 15
        round_to_pairs(values, GROUP, scale[place].float(), lowest, codes[place])
    return GroupedMatrix(*(part.unflatten(0, stack) for part in (codes, scale, minimum)))


def _in_float32(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some rows at a time, in a buffer that stays in the cache."""
    at_once = min(len(rows), max(1, NUMBERS_AT_ONCE // rows.shape[1]))
    buffer = torch.empty(at_once, rows.shape[1])
    for begin in range(0, len(rows), at_once):
        place = slice(begin, min(begin + at_once, len(rows)))
        yield place, buffer[: place.stop - begin].copy_(rows[place])
