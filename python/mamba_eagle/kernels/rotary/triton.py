"""Rotary position encoding in place, after a norm of each head if there is one: one launch."""

import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import next_power_of_2, overlapping
from mamba_eagle.kernels.triton_math import previous_done


@triton.jit
def _rotate(
    x,  # at a token's first head; heads head_stride apart; changed
    weight,  # [D] or None
    cos,  # at the token's [HALF] float32
    sin,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,  # channels of a head that stay
    HEADS_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
):
    head = tl.arange(0, HEADS_PADDED)[:, None]
    pair = tl.arange(0, HALF_PADDED)[None, :]
    inside = (head < HEADS) & (pair < HALF)
    c = tl.load(cos + pair, mask=pair < HALF, other=0.0)
    s = tl.load(sin + pair, mask=pair < HALF, other=0.0)
    at = x + head * head_stride + pair
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST > 0:
            other = tl.arange(0, REST_PADDED)[None, :]
            past = x + head * head_stride + 2 * HALF + other
            in_rest = (head < HEADS) & (other < REST)
            rest = tl.load(past, mask=in_rest, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, 1)
        inverse = (1.0 / tl.sqrt(squares / (2 * HALF + REST) + eps))[:, None]
        dtype = x.dtype.element_ty  # rounded as two operations would
        w = tl.load(weight + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        first = (first * inverse * w).to(dtype).to(tl.float32)
        w = tl.load(weight + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        second = (second * inverse * w).to(dtype).to(tl.float32)
        if REST > 0:
            w = tl.load(weight + 2 * HALF + other, mask=other < REST, other=0.0)
            tl.store(past, rest * inverse * w.to(tl.float32), mask=in_rest)
    tl.store(at, first * c - second * s, mask=inside)
    tl.store(at + HALF, second * c + first * s, mask=inside)


@triton.jit
def _rotate_kernel(
    q,  # [n, Q_HEADS, …], rows q_stride apart, heads q_head_stride apart; changed
    k,  # [n, K_HEADS, …], or None
    q_weight,  # [D] or None
    k_weight,
    cos,  # [n, HALF] float32
    sin,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    eps,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    Q_PADDED: tl.constexpr,
    K_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    cos += token * HALF
    sin += token * HALF
    if tl.program_id(1) == 0:
        _rotate(
            q + token * q_stride, q_weight, cos, sin, q_head_stride, eps,
            Q_HEADS, HALF, REST, Q_PADDED, HALF_PADDED, REST_PADDED,
        )  # fmt: skip
    elif k is not None:
        _rotate(
            k + token * k_stride, k_weight, cos, sin, k_head_stride, eps,
            K_HEADS, HALF, REST, K_PADDED, HALF_PADDED, REST_PADDED,
        )  # fmt: skip


def rotate_(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor | None = None,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Turn channels i < half with channels i + half, in place, and return x; channels from 2 * half
    on stay as they are. The same with ``keys`` in the same launch; with ``norms`` after a norm of
    each head, which is rounded.

    x [n, heads, D], D contiguous, rows and heads with any strides; keys [n, other heads, D]; cos,
    sin [n, 1, half] float32, contiguous; 2 * half <= D. norms: weights [D] of x's and of the keys'
    heads, and eps.
    """
    n, heads, size = x.shape
    half, others = cos.shape[-1], x if keys is None else keys
    rest = size - 2 * half
    _rotate_kernel[(n, 1 if keys is None else 2)](
        *(x, keys, None if norms is None else norms[0], None if norms is None else norms[1]),
        *(cos, sin, x.stride(0), x.stride(1), others.stride(0), others.stride(1)),
        0.0 if norms is None else norms[2],
        Q_HEADS=heads,
        K_HEADS=others.shape[1],
        HALF=half,
        REST=rest,
        Q_PADDED=next_power_of_2(heads),
        K_PADDED=next_power_of_2(others.shape[1]),
        HALF_PADDED=next_power_of_2(half),
        REST_PADDED=next_power_of_2(max(rest, 1)),
        num_warps=4 if heads * size < 4096 else 8,
        **overlapping(x.device),
    )
    return x
