"""A sigmoid gate in one pass, rounded once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import cdiv, next_power_of_2, overlapping
from mamba_eagle.kernels.triton_math import previous_done

BLOCK = 1024


@triton.jit
def _gate_kernel(
    y,  # [n, HEADS, SIZE]
    gate,  # [n, HEADS, SIZE or 1], rows row_stride and heads head_stride apart
    out,
    row_stride,
    head_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,  # whether each number has its own gate
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    by = gate + row * row_stride + head * head_stride + (column if EACH else tl.zeros_like(column))
    share = 1.0 / (1.0 + tl.exp(-tl.load(by, mask=inside, other=0.0).to(tl.float32)))
    at = (row * HEADS + head) * SIZE + column
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value * share, mask=inside)


def gate_by_sigmoid(y: Tensor, gate: Tensor) -> Tensor:
    """``y · sigmoid(gate)``: y [n, heads, D] and gate [n, heads, D], a view of wider rows, or
    y [n, D] and gate [n, 1] -> y's shape and dtype, contiguous. gate's last numbers are side by
    side."""
    y = y.contiguous()  # attention in torch leaves heads apart
    heads, size = (1 if y.dim() == 2 else y.shape[1]), y.shape[-1]
    block = min(BLOCK, next_power_of_2(size))
    out = torch.empty_like(y)
    _gate_kernel[(len(y), heads, cdiv(size, block))](
        *(y, gate, out, gate.stride(0), 0 if y.dim() == 2 else gate.stride(1)),
        HEADS=heads,
        SIZE=size,
        BLOCK=block,
        EACH=gate.shape[-1] == size,
        num_warps=4,
        **overlapping(y.device),
    )
    return out
