"""The gate of an MLP in one pass, rounded once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import cdiv, overlapping
from mamba_eagle.kernels.triton_math import previous_done, silu

BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(
    both,  # [n, 2 * SIZE], rows both_stride apart
    out,  # [n, SIZE]
    both_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(both + row * both_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * both_stride + SIZE + column, mask=inside, other=0.0)
    tl.store(out + row * SIZE + column, silu(gate) * up.to(tl.float32), mask=inside)


def silu_and_mul(both: Tensor) -> Tensor:
    """``silu(gate) * up``: both [n, 2 * size], last dimension contiguous -> [n, size]."""
    n, size = both.shape[0], both.shape[1] // 2
    out = torch.empty(n, size, dtype=both.dtype, device=both.device)
    _silu_and_mul_kernel[(n, cdiv(size, BLOCK))](
        both,
        out,
        both.stride(0),
        SIZE=size,
        BLOCK=BLOCK,
        num_warps=4,
        **overlapping(both.device),
    )
    return out
