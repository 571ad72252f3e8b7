"""The gated RMSNorm in one pass, in the model's dtype or as float8."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.float8.torch import Operand, Rounding
from mamba_eagle.kernels.float8.triton import empty_rounded, rounded, to_e4m3, token_scale
from mamba_eagle.kernels.gpu import cdiv, next_power_of_2, overlapping
from mamba_eagle.kernels.triton_math import blocks_of, inverse_rms, load_blocks, previous_done, silu


@triton.jit
def _normed(y, gate, eps, GROUP: tl.constexpr, BLOCKS: tl.constexpr, NORM_FIRST: tl.constexpr):
    """y · silu(gate) over its root mean square or, if NORM_FIRST, that of y, in float32: blocks of
    groups, [lines, BLOCK]."""
    squared, gated = (), ()
    for block in tl.static_range(BLOCKS):
        wide = y[block].to(tl.float32)
        gated += (wide * silu(gate[block].to(tl.float32)),)
        squared += (wide if NORM_FIRST else gated[block],)
    inverse = inverse_rms(squared, eps, GROUP, BLOCKS)
    normed = ()
    for block in tl.static_range(BLOCKS):
        normed += (gated[block] * inverse,)
    return normed


@triton.jit(do_not_specialize=["n", "scale_stride"])
def _gated_norm_kernel(
    y,  # [n, size], rows y_stride apart
    gate,  # [n, size], rows gate_stride apart
    weight,  # [size]; [GROUP] if NORM_FIRST
    static,  # [1, 1], of float8, or None
    out,  # [n, size]; float8 if ROUNDED
    scales,  # [n, 1] or, if not OF_ROW, [n, groups]: written, where float8 has no static; or None
    n,
    y_stride,
    gate_stride,
    scale_stride,  # from group to group
    eps,
    ROUNDED: tl.constexpr,
    OF_ROW: tl.constexpr,  # whether lines are groups of a row
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,  # channels of a block
    BLOCKS: tl.constexpr,  # of a group
    LINES: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A group of channels of LINES rows; or LINES groups of a row: all of them, where they have a
    scale together."""
    line, column = tl.arange(0, LINES), tl.arange(0, BLOCK)[None, :]
    # where lines do not fill the last program, it repeats the last one
    if OF_ROW:
        row = tl.program_id(0).to(tl.int64)
        group = tl.minimum(tl.program_id(1) * LINES + line, SIZE // GROUP - 1)
        channel = group[:, None] * GROUP + column
        weights = weight + (column + tl.zeros_like(channel) if NORM_FIRST else channel)
    else:
        row = tl.minimum(tl.program_id(0) * LINES + line, n - 1).to(tl.int64)[:, None]
        channel = tl.program_id(1) * GROUP + column
        # each row reads the weights, so that they stand where its numbers do; they need not wait
        weights = weight + tl.zeros([LINES, 1], tl.int32) + (column if NORM_FIRST else channel)
    w = load_blocks(weights, None, column, GROUP, BLOCK, BLOCKS)
    previous_done(OVERLAP)
    gates = load_blocks(gate + row * gate_stride + channel, None, column, GROUP, BLOCK, BLOCKS)
    ys = load_blocks(y + row * y_stride + channel, None, column, GROUP, BLOCK, BLOCKS)
    normed = _normed(ys, gates, eps, GROUP, BLOCKS, NORM_FIRST)
    if scales is not None:
        largest = tl.abs(normed[0] * w[0].to(tl.float32))
        for block in tl.static_range(1, BLOCKS):
            largest = tl.maximum(largest, tl.abs(normed[block] * w[block].to(tl.float32)))
        if OF_ROW:
            scale = token_scale(tl.max(largest, 1), 0)
            tl.store(scales + row, scale)
        else:
            scale = token_scale(largest, 1)[:, None]
            tl.store(scales + tl.program_id(1) * scale_stride + row, scale)
    elif ROUNDED:
        scale = tl.load(static)
    for block in tl.static_range(BLOCKS):
        value = normed[block]
        if not (NORM_FIRST or ROUNDED):  # before the weight, as the layer does
            value = value.to(gate.dtype.element_ty).to(tl.float32)
        value *= w[block].to(tl.float32)
        if ROUNDED:
            value = to_e4m3(value / scale)
        at = out + row * SIZE + channel + block * BLOCK
        tl.store(at, value, mask=column < GROUP - block * BLOCK)


class Config(NamedTuple):
    """How a norm is divided among programs. The result depends on it by rounding only."""

    rows: int  # per program; of a norm in float8 without groups: 1
    warps: int


def choose_config(group: int) -> Config:
    """For Hopper; measured with benchmark/kernels/bench_step_kernels.py. The same for any number of
    rows, which is not known when kernels are built."""
    if group <= 256:  # a row of a head is too little for a program
        return Config(1024 // next_power_of_2(group), 4)
    return Config(1, max(1, min(16, next_power_of_2(group) // 512)))


def choose_rounded_config(numbers: int) -> Config:
    """numbers: of a program, which keeps them in registers."""
    return Config(1, max(1, min(8, next_power_of_2(numbers) // 512)))


def gated_norm(
    y: Tensor,
    gate: Tensor,
    weight: Tensor,
    num_groups: int,
    eps: float,
    rounding: Rounding | None = None,
    norm_first: bool = False,
    config: Config | None = None,
) -> Operand:
    """``weight · rms_norm(y · silu(gate))``, a norm for each group of channels; if ``norm_first``,
    ``weight · rms_norm(y) · silu(gate)`` with the same weight [size / num_groups] for each.

    y, gate: [n, size]; weight: [size] -> [n, size], gate's dtype or float8, rounded once unless its
    groups are others than the norm's. The last dimensions must be contiguous; gate may be a view of
    in_proj's output. A token's own scale needs all of its groups in one program; with a static
    scale each has its own.
    """
    (n, size), group = y.shape, y.shape[1] // num_groups
    block, blocks = blocks_of(group)
    fused = rounding is not None and rounding.group in (0, group)
    static = scales = None
    if fused:
        out = empty_rounded(n, size, rounding, y.device)
        values, static = out.values, rounding.scale
        scales = out.scale if static is None else None
    else:
        out = values = torch.empty(y.shape, dtype=gate.dtype, device=y.device)
    if of_row := fused and not rounding.group:
        lines = next_power_of_2(num_groups) if static is None else 1
        config = config or choose_rounded_config(lines * block * blocks)
        grid = (n, 1 if static is None else num_groups)
    else:
        config = config or choose_config(group)
        lines, grid = config.rows, (cdiv(n, config.rows), num_groups)
    stride = 0 if scales is None or of_row else scales.stride(1)
    strides = (y.stride(0), gate.stride(0), stride)
    _gated_norm_kernel[grid](
        *(y, gate, weight, static, values, scales, None if of_row else n, *strides, eps),
        ROUNDED=fused,
        OF_ROW=of_row,
        SIZE=size,
        GROUP=group,
        BLOCK=block,
        BLOCKS=blocks,
        LINES=lines,
        NORM_FIRST=norm_first,
        num_warps=config.warps,
        **overlapping(y.device),
    )
    return out if fused or rounding is None else rounded(out, rounding)
