"""Products with weights of four bits, number by number in float64.

    y_ro = Σ_i x_ri · number(code_oi) · scale_{o, group of i} · factor_o

An integer's number is ``code - zero``, with a zero point per group (GPTQ, arXiv 2210.17323; AWQ,
arXiv 2306.00978). NVFP4's number is an E2M1 float: bit 3 is the sign, bits 2 and 1 the exponent e,
bit 0 the mantissa m: (1 + m/2) · 2^(e-1), or m/2 where e is 0 (OCP Microscaling Formats 1.0,
5.3.3). Byte j of a row holds column 2j in its low bits, column 2j + 1 in its high ones.
"""

import torch
from torch import Tensor


def float_of(code: int) -> float:
    """An E2M1 float's value."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -size if sign else size


def weight(codes: Tensor, scale: Tensor, zero: Tensor | None, factor: Tensor) -> Tensor:
    """codes [out, in / 2] uint8, scale [out, groups], zero [out, groups] or None, factor [out, 1]
    or [1, 1] -> [out, in] float64."""
    group = 2 * codes.shape[1] // scale.shape[1]
    rows = []
    for o, packed in enumerate(codes.tolist()):
        row = []
        for i in range(2 * len(packed)):
            code = packed[i // 2] >> (4 if i % 2 else 0) & 15
            g = i // group
            number = float_of(code) if zero is None else code - int(zero[o, g])
            row.append(number * float(scale[o, g]) * float(factor[o if len(factor) > 1 else 0, 0]))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def product(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, factor: Tensor) -> Tensor:
    """x [n, in] -> [n, out] float64."""
    return x.double() @ weight(codes, scale, zero, factor).t()
