"""A sigmoid gate in one pass, in the model's dtype, or as float8 of that."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.float8.torch import Operand, Rounding
from mamba_eagle.kernels.float8.triton import empty_rounded, rounded, to_e4m3, token_scale
from mamba_eagle.kernels.gpu import cdiv, next_power_of_2, overlapping
from mamba_eagle.kernels.triton_math import previous_done

BLOCK = 1024


@triton.jit(do_not_specialize=["scale_stride"])
def _gate_kernel(
    y,  # [n, HEADS, SIZE]
    gate,  # [n, HEADS, SIZE or 1], rows row_stride and heads head_stride apart
    out,  # [n, HEADS, SIZE]; float8 if there are scales
    scales,  # [n, groups], written, or None
    row_stride,
    head_stride,
    scale_stride,  # from group to group
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,  # channels that have a scale together
    EACH: tl.constexpr,  # whether each number has its own gate
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = tl.program_id(2) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < SIZE
    by = gate + row * row_stride + head * head_stride + (column if EACH else tl.zeros_like(column))
    share = 1.0 / (1.0 + tl.exp(-tl.load(by, mask=inside, other=0.0).to(tl.float32)))
    at = (row * HEADS + head) * SIZE + column
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    value *= share
    if scales is not None:
        value = value.to(y.dtype.element_ty).to(tl.float32)
        scale = token_scale(value, 1)
        to = scales + (head * (SIZE // GROUP) + group) * scale_stride + row
        tl.store(to, scale, mask=group * GROUP < SIZE)
        value = to_e4m3(value / scale[:, None])
    tl.store(out + at, value, mask=inside)


def gate_by_sigmoid(y: Tensor, gate: Tensor, rounding: Rounding | None = None) -> Operand:
    """``y · sigmoid(gate)``: y [n, heads, D] and gate [n, heads, D], a view of wider rows, or
    y [n, D] and gate [n, 1] -> [n, heads * D] or [n, D], contiguous. gate's last numbers are side
    by side. If groups do not divide a head, another launch finds scales."""
    y = y.contiguous()  # attention in torch leaves heads apart
    heads, size = (1 if y.dim() == 2 else y.shape[1]), y.shape[-1]
    block = min(BLOCK, next_power_of_2(size))
    fused = rounding is not None and rounding.group and size % rounding.group == 0
    if fused:
        out = empty_rounded(len(y), heads * size, rounding, y.device)
        written, stride = (out.values, out.scale), out.scale.stride(1)
    else:
        out = torch.empty(len(y), heads * size, dtype=y.dtype, device=y.device)
        written, stride = (out, None), 0
    _gate_kernel[(len(y), heads, cdiv(size, block))](
        *(y, gate, *written, gate.stride(0), 0 if y.dim() == 2 else gate.stride(1), stride),
        HEADS=heads,
        SIZE=size,
        BLOCK=block,
        GROUP=rounding.group if fused else block,
        EACH=gate.shape[-1] == size,
        num_warps=4,
        **overlapping(y.device),
    )
    return out if fused or rounding is None else rounded(out, rounding)
