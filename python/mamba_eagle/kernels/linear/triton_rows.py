"""Products with matrices of 16 bits that have few rows, for very few tokens, on a GPU.

A program multiplies one row of the weight, which it loads as a whole while the previous kernel
ends: a loop over the columns of so short a row would be over before its loads are under way.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import PROCESSORS, next_power_of_2, overlapping
from mamba_eagle.kernels.triton_math import previous_done

MAX_TOKENS = 8  # beyond it tokens are read too often, once per row
MAX_ROWS = 2 * PROCESSORS
MAX_COLUMNS = 8192
TOGETHER = 4  # tokens of an iteration


@triton.jit(do_not_specialize=["n"])
def _row_kernel(
    x,  # [n, columns], rows x_stride apart
    weight,  # [out, columns]
    bias,  # [out], or None
    y,  # [n, out]
    n,
    out,
    columns,
    x_stride,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,  # columns, padded
    OVERLAP: tl.constexpr,
):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < columns
    w = tl.load(weight + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    previous_done(OVERLAP)
    for first in range(0, n, TOKENS):
        token = first + tl.arange(0, TOKENS)
        numbers = x + token.to(tl.int64)[:, None] * x_stride + column[None, :]
        is_token = token < n
        numbers = tl.load(numbers, mask=is_token[:, None] & inside[None, :], other=0.0)
        sums = tl.sum(numbers.to(tl.float32) * w[None, :], 1)
        if bias is not None:
            sums += tl.load(bias + row).to(tl.float32)
        tl.store(y + token * out + row, sums.to(y.dtype.element_ty), mask=is_token)


def takes(weight: Tensor) -> bool:
    """Whether the kernel reads a weight [out, in], and is faster than a library."""
    rows, columns = weight.shape
    return rows <= MAX_ROWS and columns <= MAX_COLUMNS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``y_ro = Σ_i x_ri w_oi + b_o``, sums in float32, whose order does not depend on n.

    Args:
        x: [n, in], bfloat16 or float16; its last dimension is contiguous.
        weight: [out, in], contiguous, of the same dtype, of which ``takes`` holds; bias: [out].
        out: [n, out] contiguous, for the result; None: a new tensor.
    """
    (n, columns), rows = x.shape, weight.shape[0]
    y = torch.empty(n, rows, dtype=x.dtype, device=x.device) if out is None else out
    _row_kernel[(rows,)](
        *(x, weight, bias, y, n, rows, columns, x.stride(0)),
        TOKENS=TOGETHER,
        BLOCK=next_power_of_2(columns),
        num_warps=16,
        **overlapping(x.device),
    )
    return y
