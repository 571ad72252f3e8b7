"""The gated RMSNorm in one pass, in the model's dtype or as float8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.float8.torch import Rounded, Rounding
from mamba_eagle.kernels.float8.triton import empty_rounded, to_e4m3, token_scale, warps_of_row
from mamba_eagle.kernels.gpu import launches_overlap
from mamba_eagle.kernels.triton_math import previous_done, silu


@triton.jit
def _gated_norm_kernel(
    y,  # [n, size], rows y_stride apart
    gate,  # [n, size], rows gate_stride apart
    weight,  # [size]
    out,  # [n, size]
    y_stride,
    gate_stride,
    eps,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < GROUP
    column += tl.program_id(1) * GROUP
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    gated = tl.load(y + row * y_stride + column, mask=inside, other=0.0).to(tl.float32)
    gated *= silu(g.to(tl.float32))
    scale = 1.0 / tl.sqrt(tl.sum(gated * gated) / GROUP + eps)
    w = tl.load(weight + column, mask=inside, other=0.0)
    normed = (gated * scale).to(g.dtype)  # rounded before the weight, as the layer does
    tl.store(out + row * SIZE + column, normed.to(tl.float32) * w.to(tl.float32), mask=inside)


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float) -> Tensor:
    """``weight · rms_norm(y · silu(gate))``, a norm for each group of channels.

    y, gate: [n, size]; weight: [size] -> [n, size], gate's dtype. The last dimensions must be
    contiguous; gate may be a view of in_proj's output.
    """
    n, size = y.shape
    out = torch.empty(n, size, dtype=gate.dtype, device=y.device)
    group = size // num_groups
    overlap = launches_overlap(y.device)
    _gated_norm_kernel[(n, num_groups)](
        y,
        gate,
        weight,
        out,
        y.stride(0),
        gate.stride(0),
        eps,
        SIZE=size,
        GROUP=group,
        BLOCK=triton.next_power_of_2(group),
        OVERLAP=overlap,
        num_warps=4 if group > 512 else 1,
        launch_pdl=overlap,
    )
    return out


@triton.jit
def _rounded_gated_norm_kernel(
    y,  # [n, size], rows y_stride apart
    gate,  # [n, size], rows gate_stride apart
    weight,  # [size]
    static,  # [1, 1], read if not DYNAMIC
    out,  # [n, size] float8
    scales,  # [n, 1], written if DYNAMIC
    y_stride,
    gate_stride,
    eps,
    DYNAMIC: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # of the norm that a program takes, padded
    BLOCK: tl.constexpr,  # GROUP, padded
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    within = tl.arange(0, BLOCK)
    column = group[:, None] * GROUP + within[None, :]
    inside = (within < GROUP)[None, :] & (column < SIZE)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    gated = tl.load(y + row * y_stride + column, mask=inside, other=0.0).to(tl.float32) * silu(g)
    inverse = 1.0 / tl.sqrt(tl.sum(gated * gated, 1) / GROUP + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed = gated * inverse[:, None] * w
    if DYNAMIC:
        scale = token_scale(tl.max(tl.abs(normed), 1), 0)
        tl.store(scales + row, scale)
    else:
        scale = tl.load(static)
    tl.store(out + row * SIZE + column, to_e4m3(normed / scale), mask=inside)


@triton.jit
def _normed(y, gate, weight, inside, eps, GROUP: tl.constexpr):
    """A group of a row's channels: y, gate and weight point at them -> float32."""
    g = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
    gated = tl.load(y, mask=inside, other=0.0).to(tl.float32) * silu(g)
    inverse = 1.0 / tl.sqrt(tl.sum(gated * gated, 0) / GROUP + eps)
    return gated * inverse * tl.load(weight, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _twice_normed_kernel(
    y,  # [n, size], rows y_stride apart
    gate,  # [n, size], rows gate_stride apart
    weight,  # [size]
    out,  # [n, size] float8
    scales,  # [n, 1], written
    y_stride,
    gate_stride,
    eps,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,  # GROUP, padded
    OVERLAP: tl.constexpr,
):
    """A row, group by group: first for its scale, then for its numbers."""
    previous_done(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, BLOCK)
    inside = within < GROUP
    y += row * y_stride + within
    gate += row * gate_stride + within
    weight += within
    scale = tl.zeros([], tl.float32)
    for first in range(0, SIZE, GROUP):
        normed = _normed(y + first, gate + first, weight + first, inside, eps, GROUP)
        scale = tl.maximum(scale, token_scale(normed, 0))
    tl.store(scales + row, scale)
    for first in range(0, SIZE, GROUP):
        normed = _normed(y + first, gate + first, weight + first, inside, eps, GROUP)
        tl.store(out + row * SIZE + first + within, to_e4m3(normed / scale), mask=inside)


# From so many rows on, programs that take little at a time and read it twice keep more of the
# device busy: a whole row in registers leaves room for one program per multiprocessor (162 µs for
# 4,096 rows of 10,240 on an H200, three times what their bytes take).
MANY_ROWS = 256


def rounded_gated_norm(
    y: Tensor,
    gate: Tensor,
    weight: Tensor,
    num_groups: int,
    eps: float,
    rounding: Rounding,
    many: int = MANY_ROWS,
) -> Rounded:
    """``gated_norm`` as float8, rounded once. A token's own scale needs all of its groups in one
    program; with a static scale each has its own. rounding: without groups."""
    n, size = y.shape
    out = empty_rounded(n, size, rounding, y.device)
    dynamic, group = rounding.scale is None, size // num_groups
    if dynamic and n >= many:
        overlap, block = launches_overlap(y.device), triton.next_power_of_2(group)
        _twice_normed_kernel[(n,)](
            y,
            gate,
            weight,
            out.values,
            out.scale,
            y.stride(0),
            gate.stride(0),
            eps,
            SIZE=size,
            GROUP=group,
            BLOCK=block,
            OVERLAP=overlap,
            num_warps=max(1, min(8, block // 512)),
            launch_pdl=overlap,
        )
        return out
    groups = triton.next_power_of_2(num_groups) if dynamic else 1
    block, overlap = triton.next_power_of_2(group), launches_overlap(y.device)
    _rounded_gated_norm_kernel[(n, 1 if dynamic else num_groups)](
        y,
        gate,
        weight,
        out.scale,
        out.values,
        out.scale,
        y.stride(0),
        gate.stride(0),
        eps,
        DYNAMIC=dynamic,
        SIZE=size,
        GROUP=group,
        GROUPS=groups,
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=warps_of_row(groups * block),
        launch_pdl=overlap,
    )
    return out
