"""Rotary position encoding in place, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_kernel(
    x,  # [n, HEADS, …], rows x_stride apart, heads head_stride apart; changed
    cos,  # [n, HALF] float32
    sin,
    x_stride,
    head_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PADDED)[:, None]
    pair = tl.arange(0, HALF_PADDED)[None, :]
    inside = (head < HEADS) & (pair < HALF)
    c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0)
    s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0)
    at = x + token * x_stride + head * head_stride + pair
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, first * c - second * s, mask=inside)
    tl.store(at + HALF, second * c + first * s, mask=inside)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channels i < half with channels i + half, in place, and return x; channels from 2 * half
    on stay as they are.

    x [n, heads, D], D contiguous, rows and heads with any strides; cos, sin [n, 1, half] float32,
    contiguous; 2 * half <= D.
    """
    n, heads, _ = x.shape
    half = cos.shape[-1]
    _rotate_kernel[(n,)](
        x,
        cos,
        sin,
        x.stride(0),
        x.stride(1),
        HEADS=heads,
        HALF=half,
        HEADS_PADDED=triton.next_power_of_2(heads),
        HALF_PADDED=triton.next_power_of_2(half),
        num_warps=4,
    )
    return x
