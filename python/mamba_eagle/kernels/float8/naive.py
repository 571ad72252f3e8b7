"""Float8 activations and products, number by number in float64.

An E4M3 number (arXiv 2209.05433) has a sign, four bits of exponent e and three of mantissa m:
(1 + m/8) · 2^(e-7), or m/8 · 2^-6 where e is 0. The largest is 448; there are no infinities.

    q = nearest E4M3 number to x / s, with ties to the even mantissa, at most 448
    y_ro = Σ_i s_r q_ri · t_o w_oi
"""

import math

import torch
from torch import Tensor


def nearest(x: float) -> float:
    """The nearest E4M3 number."""
    size = abs(x)
    if size >= 448.0:
        return math.copysign(448.0, x)
    exponent = max(math.frexp(size)[1] - 1, -6) if size else -6
    step = 2.0 ** (exponent - 3)  # between neighbours
    return math.copysign(round(size / step) * step, x)  # round() takes ties to even


def row_scale(numbers: list[float]) -> float:
    """Makes the largest of the numbers 448."""
    return max(max(abs(x) for x in numbers) / 448.0, 1e-10)


def rounded(x: Tensor, scale: float | None = None, group: int = 0) -> tuple[Tensor, Tensor]:
    """x [n, size] -> E4M3 numbers [n, size] and scales [n, groups], both float64.

    scale: of all numbers; None: one per token, or per ``group`` channels of a token.
    """
    numbers, scales = [], []
    for row in x.double().tolist():
        width = group or len(row)
        parts = [row[at : at + width] for at in range(0, len(row), width)]
        own = [row_scale(part) if scale is None else scale for part in parts]
        numbers.append([nearest(x / s) for part, s in zip(parts, own) for x in part])
        scales.append(own)
    return torch.tensor(numbers, dtype=torch.float64), torch.tensor(scales, dtype=torch.float64)


def product(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x, x_scale [n, in], weight, scale [out, in], scales as large as what they scale -> [n, out]
    float64."""
    return (x.double() * x_scale.double()) @ (weight.double() * scale.double()).t()
