"""Weights of four bits in torch: dequantized, then multiplied."""

import torch
from torch import Tensor

# E2M1: one bit of sign, two of exponent, one of mantissa (OCP Microscaling Formats 1.0, 5.3.3)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def numbers(codes: Tensor, zero: Tensor | None, group: int) -> Tensor:
    """codes [..., out, in / 2] uint8, zero [..., out, in / group] uint8 or None (E2M1 floats)
    -> [..., out, in] float32."""
    unpacked = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    if zero is None:
        table = torch.tensor([*E2M1, *(-x for x in E2M1)], device=codes.device)
        return table[unpacked.long()]
    return unpacked.float() - zero.float().repeat_interleave(group, -1)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor | None, factor: Tensor) -> Tensor:
    """``number(code) · scale · factor``: codes [..., out, in / 2], scale and zero [..., out,
    groups], factor [..., 1 or out, 1] -> [..., out, in] float32."""
    group = 2 * codes.shape[-1] // scale.shape[-1]
    whole = (scale.float() * factor).repeat_interleave(group, -1)
    return numbers(codes, zero, group) * whole
