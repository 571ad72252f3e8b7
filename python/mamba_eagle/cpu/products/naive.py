"""Products with weights in bfloat16 (``few_rows``) or in int8 or int4 groups (``product``), number
by number.

The first is ``y_ro = Σ_i x_ri W_oi`` in float64. A bfloat16 is the upper half of a float32, with
the same sign and exponent: widening one appends 16 zero bits and changes no value.

Of the second, inputs are rounded to int8 in groups of 32 of a row, so that the products within a
group are exact integers:

    s_rg = max |x_ri| / 127                     i in group g
    q_ri = round(x_ri / s_rg)
    y_ro = Σ_g scale_og s_rg Σ_i number_oi q_ri + minimum_og s_rg Σ_i q_ri

The last term is there only if the weight has minima.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32


class Rounded(NamedTuple):
    numbers: Tensor  # [n, in] int8
    scale: Tensor  # [n, in / 32] float32
    total: Tensor  # [n, in / 32] int32: the sum of a group's numbers


def rounded(x: Tensor) -> Rounded:
    """x [n, in], float32."""
    groups = x.unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    inverse = torch.where(largest > 0, 127 / largest, torch.zeros_like(largest))
    numbers = (groups * inverse[..., None]).round()
    return Rounded(numbers.flatten(-2).to(torch.int8), largest / 127, numbers.sum(-1).int())


def product(x: Tensor, numbers: Tensor, scale: Tensor, minimum: Tensor | None) -> Tensor:
    """x [n, in]; numbers [out, in], integers; scale, minimum [out, in / 32] -> [n, out] float64."""
    given = rounded(x)
    inputs = given.numbers.double().unflatten(-1, (-1, GROUP))
    weights = numbers.double().unflatten(-1, (-1, GROUP))
    y = torch.zeros(len(x), len(numbers), dtype=torch.float64)
    for g in range(scale.shape[1]):
        share = given.scale[:, g, None].double()
        y += share * scale[:, g].double() * (inputs[:, g] @ weights[:, g].t())
        if minimum is not None:
            y += share * minimum[:, g].double() * given.total[:, g, None].double()
    return y


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
