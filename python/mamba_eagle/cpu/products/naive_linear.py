"""Matrix products with weights kept in bfloat16, number by number in float64.

    y_ro = Σ_i x_ri W_oi

A bfloat16 is the upper half of a float32: the same sign and exponent, seven bits of mantissa. So
widening one appends 16 zero bits and changes no value.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor


def widen(bits: int) -> float:
    """The value of a bfloat16, given as an unsigned integer of 16 bits."""
    (value,) = struct.unpack("<f", struct.pack("<I", bits << 16))
    return value


def few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x: [n, in]; weight: [out, in], bfloat16 as uint16 -> [n, out] float64."""
    widened = [[widen(bits) for bits in row] for row in weight.tolist()]
    y = [
        [sum(a * w for a, w in zip(row, weights)) for weights in widened]
        for row in x.double().tolist()
    ]
    return torch.tensor(y, dtype=torch.float64)
