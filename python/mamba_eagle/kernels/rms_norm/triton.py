"""RMSNorm whose output is float8, in one pass; with the sum before it, where there is one."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.float8.torch import Rounded, Rounding
from mamba_eagle.kernels.float8.triton import empty_rounded, to_e4m3, token_scale, warps_of_row
from mamba_eagle.kernels.gpu import launches_overlap
from mamba_eagle.kernels.triton_math import previous_done


@triton.jit
def _rounded_norm_kernel(
    x,  # [n, size], rows x_stride apart; changed if HAS_ADDED
    added,  # [n, size], rows added_stride apart; read if HAS_ADDED
    weight,  # [size]
    static,  # [1, 1], read if not DYNAMIC
    out,  # [n, size] float8
    scales,  # [n, 1], written if DYNAMIC
    x_stride,
    added_stride,
    eps,
    HAS_ADDED: tl.constexpr,
    DYNAMIC: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    numbers = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADDED:
        other = tl.load(added + row * added_stride + column, mask=inside, other=0.0)
        numbers += other.to(tl.float32)
        tl.store(x + row * x_stride + column, numbers, mask=inside)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed = numbers * (1.0 / tl.sqrt(tl.sum(numbers * numbers) / SIZE + eps)) * w
    if DYNAMIC:
        scale = token_scale(normed, 0)
        tl.store(scales + row, scale)
    else:
        scale = tl.load(static)
    tl.store(out + row * SIZE + column, to_e4m3(normed / scale), mask=inside)


def rounded_rms_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, rounding: Rounding
) -> Rounded:
    """The norm of x, or of ``x + added``, to which x is then set.

    x, added [n, size], last dimension contiguous; weight [size]. rounding: without groups.
    """
    n, size = x.shape
    out = empty_rounded(n, size, rounding, x.device)
    block, overlap = triton.next_power_of_2(size), launches_overlap(x.device)
    _rounded_norm_kernel[(n,)](
        x,
        x if added is None else added,
        weight,
        out.scale,
        out.values,
        out.scale,
        x.stride(0),
        0 if added is None else added.stride(0),
        eps,
        HAS_ADDED=added is not None,
        DYNAMIC=rounding.scale is None,
        SIZE=size,
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=warps_of_row(block),
        launch_pdl=overlap,
    )
    return out
