"""Float8 activations and products in torch: the reference of the GPU's kernels.

E4M3 (arXiv 2209.05433): 4 bits of exponent, 3 of mantissa, largest number 448, no infinities.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of E4M3
SMALLEST_SCALE = 1e-10  # of a row of zeros, which has no scale of its own


class Rounding(NamedTuple):
    """How the inputs of a product become float8.

    With ``scale``, which was measured when the checkpoint was made, all of them are divided by one
    number. Without, each token is divided by its own largest number / 448, or each group of
    ``group`` neighbouring channels of a token if that is not 0.
    """

    scale: Tensor | None = None  # [1, 1] float32
    group: int = 0
    kept: bool = False  # whether others read the numbers as they were

    def equals(self, other: Rounding | None) -> bool:
        if other is None or self.group != other.group:
            return False
        if self.scale is None or other.scale is None:
            return self.scale is other.scale
        return bool(self.scale == other.scale)


class Rounded(NamedTuple):
    """n tokens as float8 numbers times scales."""

    values: Tensor  # [n, size] E4M3
    scale: Tensor  # float32: [1, 1], [n, 1] or [n, groups]
    group: int = 0  # channels per group, if there is one scale per group
    exact: Tensor | None = None  # [n, size], what was rounded, if that is kept


Operand: TypeAlias = Any  # of a product: a tensor, or Rounded where there is a Rounding


def unrounded(x: Operand) -> Operand:
    """What was rounded, if that is kept."""
    return x.exact if isinstance(x, Rounded) and x.exact is not None else x


def to_e4m3(x: Tensor) -> Tensor:
    """The nearest E4M3 numbers; what is larger than 448 becomes 448."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def rounded(x: Tensor, rounding: Rounding) -> Rounded:
    """x [n, size], any float dtype."""
    x, exact = x.float(), x if rounding.kept else None
    if rounding.scale is not None:
        return Rounded(to_e4m3(x / rounding.scale), rounding.scale, exact=exact)
    if not rounding.group:
        scale = row_scale(x)
        return Rounded(to_e4m3(x / scale), scale, exact=exact)
    missing = -x.shape[1] % rounding.group  # the last group may be shorter
    groups = torch.nn.functional.pad(x, (0, missing)).unflatten(1, (-1, rounding.group))
    scale = row_scale(groups)
    values = to_e4m3((groups / scale).flatten(1)[:, : x.shape[1]].contiguous())
    return Rounded(values, scale[..., 0], rounding.group, exact)


def row_scale(x: Tensor) -> Tensor:
    """x [..., size] -> [..., 1] float32: the scale that makes the largest number of a row 448."""
    return (x.abs().amax(-1, keepdim=True).float() / LARGEST).clamp(min=SMALLEST_SCALE)


def widened(x: Rounded) -> Tensor:
    """The numbers that ``x`` stands for: [n, size] float32."""
    scale = x.scale
    if x.group:
        scale = scale.repeat_interleave(x.group, 1)[:, : x.values.shape[1]]
    return x.values.float() * scale
