"""The gate of an MLP in one pass, rounded once, in the model's dtype or as float8."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.float8.torch import Operand, Rounding
from mamba_eagle.kernels.float8.triton import empty_rounded, rounded, to_e4m3, token_scale
from mamba_eagle.kernels.gpu import cdiv, overlapping
from mamba_eagle.kernels.triton_math import previous_done, silu

BLOCK = 1024  # channels of a program
GROUP = 128  # of them that have a scale together


@triton.jit(do_not_specialize=["scale_stride"])
def _silu_and_mul_kernel(
    both,  # [n, 2 * SIZE], rows both_stride apart
    out,  # [n, SIZE]; float8 if there are scales
    scales,  # [n, groups], written, or None
    both_stride,
    scale_stride,  # from group to group
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < SIZE
    gate = tl.load(both + row * both_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * both_stride + SIZE + column, mask=inside, other=0.0)
    value = silu(gate) * up.to(tl.float32)
    if scales is not None:
        scale = token_scale(value, 1)
        tl.store(scales + group * scale_stride + row, scale, mask=group * GROUP < SIZE)
        value = to_e4m3(value / scale[:, None])
    tl.store(out + row * SIZE + column, value, mask=inside)


def silu_and_mul(both: Tensor, rounding: Rounding | None = None) -> Operand:
    """``silu(gate) * up``: both [n, 2 * size], last dimension contiguous -> [n, size]. Scales of
    other groups than ``GROUP`` are found by another launch."""
    n, size = len(both), both.shape[1] // 2
    fused = rounding is not None and rounding.group == GROUP
    if fused:
        out = empty_rounded(n, size, rounding, both.device)
        written = (out.values, out.scale, both.stride(0), out.scale.stride(1))
    else:
        out = torch.empty(n, size, dtype=both.dtype, device=both.device)
        written = (out, None, both.stride(0), 0)
    _silu_and_mul_kernel[(n, cdiv(size, BLOCK))](
        *(both, *written),
        SIZE=size,
        BLOCK=BLOCK,
        GROUP=GROUP,
        num_warps=4,
        **overlapping(both.device),
    )
    return out if fused or rounding is None else rounded(out, rounding)
