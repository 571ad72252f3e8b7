"""RMSNorm in one pass, in the model's dtype or as float8, of a sum where there is one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.float8.torch import Rounded, Rounding
from mamba_eagle.kernels.float8.triton import empty_rounded, to_e4m3, token_scale, warps_of_row
from mamba_eagle.kernels.gpu import launches_overlap
from mamba_eagle.kernels.triton_math import previous_done

ROW_NUMBERS = 1024  # of a program's rows together, where one has fewer


@triton.jit(do_not_specialize=["n"])
def _norm_kernel(
    x,  # [n, SIZE], rows x_stride apart; changed if HAS_ADDED
    added,  # [n, SIZE], rows added_stride apart; read if HAS_ADDED
    weight,  # [SIZE]
    out,  # [n, SIZE], rows out_stride apart; may be added
    n,
    x_stride,
    added_stride,
    out_stride,
    eps,
    HAS_ADDED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # SIZE, padded
    ROWS: tl.constexpr,  # per program
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < n) & (column < SIZE)
    numbers = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADDED:
        other = tl.load(added + row * added_stride + column, mask=inside, other=0.0)
        numbers += other.to(tl.float32)
        tl.store(x + row * x_stride + column, numbers, mask=inside)
    inverse = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 1) / SIZE + eps)
    w = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    normed = numbers * inverse[:, None] * w
    tl.store(out + row * out_stride + column, normed, mask=inside)


def _launch_norm(x: Tensor, added: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    n, size = x.shape
    block, overlap = triton.next_power_of_2(size), launches_overlap(x.device)
    rows = max(1, ROW_NUMBERS // block)
    _norm_kernel[(triton.cdiv(n, rows),)](
        x,
        x if added is None else added,
        weight,
        out,
        n,
        x.stride(0),
        0 if added is None else added.stride(0),
        out.stride(0),
        eps,
        HAS_ADDED=added is not None,
        SIZE=size,
        BLOCK=block,
        ROWS=rows,
        OVERLAP=overlap,
        num_warps=warps_of_row(rows * block),
        launch_pdl=overlap,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As torch.py's. x [n, size], last dimension contiguous -> [n, size], contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, None, weight, out, eps)
    return out


def add_rms_norm_(stream: Tensor, added: Tensor, weight: Tensor, eps: float) -> None:
    """``stream`` becomes ``stream + added``, ``added`` the norm of that sum before it is rounded.
    Both [n, size], last dimension contiguous."""
    _launch_norm(stream, added, weight, added, eps)


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
