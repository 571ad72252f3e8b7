"""Functions that several Triton kernels share."""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton's interpreter multiplies bfloat16 matrices wrongly; there products take float32.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def exact_dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a·b of factors of one dtype; float32 ones are multiplied as PRECISION says."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def rounded_dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a·b, both in the dtype with fewer bits. The interpreter, which cuts, does not round."""
    if not INTERPRETED and a.dtype != b.dtype:
        if a.dtype == tl.float32:
            a = a.to(b.dtype)
        else:
            b = b.to(a.dtype)
    return exact_dot(a, b, acc, PRECISION)


@triton.jit
def _high_part(a, dtype: tl.constexpr):
    """Float32 ``a`` with as many bits as dtype has, in float32."""
    if dtype == tl.bfloat16:  # cut, not rounded: converting number by number is slow
        bits = a.to(tl.int32, bitcast=True) & -65536
        return bits.to(tl.float32, bitcast=True)
    else:
        return a.to(dtype).to(tl.float32)


@triton.jit
def split_dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a·b where one factor is float32 and the other exact in its dtype.

    A float32 factor beside one of 16 bits is split into two of these: an error of at most 2**-16,
    where tf32 makes 2**-11.
    """
    if a.dtype == b.dtype:
        return exact_dot(a, b, acc, PRECISION)
    elif a.dtype == tl.float32:
        high = _high_part(a, b.dtype)
        low = (a - high).to(b.dtype)
        return exact_dot(low, b, exact_dot(high.to(b.dtype), b, acc, PRECISION), PRECISION)
    else:
        high = _high_part(b, a.dtype)
        low = (b - high).to(a.dtype)
        return exact_dot(a, low, exact_dot(a, high.to(a.dtype), acc, PRECISION), PRECISION)


@triton.jit
def dual_weights(from_log, to_log, step, skip, scores, visible, own):
    """What token j adds to the output of token i: ``exp(L_i - L_j) dt_j (B_j·C_i)``, + D: [j, i].

    Args: from_log, step: [j], L and dt; to_log: [i], L; scores, visible, own: [j, i], own says
        that j is i.
    """
    # masked before exp: the difference to an unrelated token may be large and positive
    gap = tl.where(visible, to_log[None, :] - from_log[:, None], float("-inf"))
    return tl.exp(gap) * step[:, None] * scores + tl.where(own, skip, 0.0)


@triton.jit
def end_shares(from_log, end_log, step, valid):
    """What token j adds to the state after the last one: ``exp(L_end - L_j) dt_j``, 0 where not
    ``valid``. All [j] but end_log."""
    return tl.exp(tl.where(valid, end_log - from_log, float("-inf"))) * step


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    e = tl.exp(tl.minimum(x, 20.0))
    # log(1 + e) loses a small e in the sum: 2 artanh(e / (2 + e)) there, as a series
    z = e / (2.0 + e)
    z2 = z * z
    tail = z2 * (1.0 / 3 + z2 * (1.0 / 5 + z2 * (1.0 / 7 + z2 * (1.0 / 9))))
    small = 2.0 * z * (1.0 + tail)
    return tl.where(x > 20.0, x, tl.where(e < 0.25, small, tl.log(1.0 + e)))


@triton.jit
def step_sizes(raw, bias, lowest, highest):
    """dt from in_proj's output [tokens, heads]: ``clamp(softplus(raw + bias))`` in float32."""
    return tl.minimum(tl.maximum(softplus(raw.to(tl.float32) + bias[None, :]), lowest), highest)


@triton.jit
def previous_done(OVERLAP: tl.constexpr):
    """Wait until the kernel launched before this one has ended; the next one may start now.

    For kernels launched with ``launch_pdl=OVERLAP``. Every program must come by here, also one that
    has nothing to do: the end of a kernel tells the next one that all before it have ended, too.
    What a kernel reads ahead of this call, the kernel ahead must not write.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
