"""relu(x)² in one pass, in place, or to float8."""

import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.float8.torch import Rounded, Rounding
from mamba_eagle.kernels.float8.triton import empty_rounded, to_e4m3, token_scale, warps_of_row
from mamba_eagle.kernels.gpu import cdiv, next_power_of_2, overlapping
from mamba_eagle.kernels.triton_math import previous_done

BLOCK = 2048


@triton.jit
def _relu_squared_kernel(
    x,  # [size], changed
    size,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    positive = tl.maximum(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), 0.0)
    tl.store(x + at, positive * positive, mask=inside)


def relu_squared_(x: Tensor) -> Tensor:
    """Overwrite x with ``relu(x)²`` and return it. x: contiguous; bfloat16, float16 or float32.

    Rounded once, as torch.py's is.
    """
    size = x.numel()
    _relu_squared_kernel[(cdiv(size, BLOCK),)](
        x, size, BLOCK=BLOCK, num_warps=4, **overlapping(x.device)
    )
    return x


@triton.jit
def _rounded_relu_squared_kernel(
    x,  # [n, SIZE], rows x_stride apart
    static,  # [1, 1], or None: scales are found
    out,  # [n, SIZE] float8
    scales,  # [n, 1], written if there is no static one
    x_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    numbers = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    positive = tl.maximum(numbers, 0.0)
    squares = positive * positive
    if static is None:
        scale = token_scale(squares, 0)
        tl.store(scales + row, scale)
    else:
        scale = tl.load(static)
    tl.store(out + row * SIZE + column, to_e4m3(squares / scale), mask=inside)


def rounded_relu_squared(x: Tensor, rounding: Rounding) -> Rounded:
    """``relu(x)²`` as float8. x [n, size], last dimension contiguous. rounding: without groups."""
    n, size = x.shape
    out = empty_rounded(n, size, rounding, x.device)
    block = next_power_of_2(size)
    _rounded_relu_squared_kernel[(n,)](
        *(x, rounding.scale, out.values, out.scale, x.stride(0)),
        SIZE=size,
        BLOCK=block,
        num_warps=warps_of_row(block),
        **overlapping(x.device),
    )
    return out
