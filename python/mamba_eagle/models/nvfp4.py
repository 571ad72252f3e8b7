"""NVFP4 weights, as ModelOpt writes them: 4-bit floats with two levels of scales.

A weight W [out, in] is stored as three tensors:

    weight          [out, in / 2] uint8: column 2j in the low four bits, column 2j + 1 in the high
    weight_scale    [out, in / 16] float8_e4m3fn: one for 16 columns
    weight_scale_2  [] float32: one for the whole tensor

    W[i, j] = e2m1(i, j) · weight_scale[i, j // 16] · weight_scale_2

e2m1 has a sign, two bits of exponent and one of mantissa (OCP Microscaling Formats, section 5.3.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 16  # columns of one scale
SCALES = ("_scale", "_scale_2")  # appended to the weight's name
# by the four bits; the highest is the sign
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*E2M1, *(-value for value in E2M1))


def dequantize(packed: Tensor, scale: Tensor, scale_2: Tensor) -> Tensor:
    """packed [..., out, in / 2] uint8, scale [..., out, in / 16] float8, scale_2: one number
    -> [..., out, in] float32.

    Raises: ValueError if the scales do not fit the weight.
    """
    columns = 2 * packed.shape[-1]
    if scale.shape != (*packed.shape[:-1], columns // GROUP) or scale_2.numel() != 1:
        raise ValueError(
            f"scales {list(scale.shape)} and {list(scale_2.shape)} do not fit "
            f"{[*packed.shape[:-1], columns]} in groups of {GROUP}"
        )
    values = torch.tensor(VALUES, device=packed.device)
    both = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)  # [..., out, in]
    grouped = values[both.long()].unflatten(-1, (-1, GROUP))
    return (grouped * (scale.float() * scale_2.float().reshape(()))[..., None]).flatten(-2)
