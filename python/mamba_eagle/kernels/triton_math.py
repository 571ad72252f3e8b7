"""Functions shared by several Triton kernels."""

import os
from functools import cache

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mamba_eagle.kernels.gpu import cdiv, next_power_of_2

# Triton's interpreter multiplies bfloat16 matrices wrongly: it gets float32 factors instead.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def rounded_product(a, b):
    """a · b in float32, rounded before anything is added to it: no fused multiply-add."""
    if INTERPRETED:
        return a * b
    else:
        a, b = tl.broadcast(a, b)
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def fused_sum(a, b, total):
    """total + a · b in float32, rounded once: in all kernels that need each other's bits, whatever
    the compiler would fuse in each of them."""
    return tl.fma(a.to(tl.float32), b.to(tl.float32), total)


@triton.jit
def exact_dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a·b, both factors of the same dtype; PRECISION says how float32 is multiplied."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def rounded_dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a·b with both factors rounded to the narrower dtype of the two.

    The interpreter would truncate instead of rounding, so there nothing is rounded.
    """
    if not INTERPRETED and a.dtype != b.dtype:
        if a.dtype == tl.float32:
            a = a.to(b.dtype)
        else:
            b = b.to(a.dtype)
    return exact_dot(a, b, acc, PRECISION)


@triton.jit
def _high_part(a, dtype: tl.constexpr):
    """``a`` (float32) reduced to the precision of dtype, still in float32."""
    if dtype == tl.bfloat16:  # truncated: converting element by element is slow
        bits = a.to(tl.int32, bitcast=True) & -65536
        return bits.to(tl.float32, bitcast=True)
    else:
        return a.to(dtype).to(tl.float32)


@triton.jit
def split_dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a·b where one factor is float32 and the other may have 16 bits, which are exact.

    A float32 factor is then split into two 16-bit numbers: a relative error of at most 2**-16,
    against 2**-11 with tf32.
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
    """How much of x_j goes into the output of token i: [j, i].

    ``exp(L_i - L_j) dt_j (B_j·C_i)`` where i sees j, and D more where j is i.

    Args: from_log, step: [j], L and dt; to_log: [i], L; scores: [j, i], B_j·C_i; visible, own:
        [j, i], whether i sees j and whether j is i.
    """
    # masked before exp: L_i - L_j of an unrelated token may be large and positive
    gap = tl.where(visible, to_log[None, :] - from_log[:, None], float("-inf"))
    return tl.exp(gap) * step[:, None] * scores + tl.where(own, skip, 0.0)


@triton.jit
def end_shares(from_log, end_log, step, valid):
    """How much of x_j B_jᵀ goes into the state after the last token: ``exp(L_end - L_j) dt_j``, or
    0 where not ``valid``. from_log, step, valid: [j]; end_log: a scalar."""
    return tl.exp(tl.where(valid, end_log - from_log, float("-inf"))) * step


@triton.jit
def silu(x):
    """x / (1 + exp(-x)) of float32 numbers, off by a few units of the last place.

    A GPU takes five instructions; as it is written above, about twenty, most of them for divisors
    that are not normal numbers. That decides how long norms and convolutions take.
    """
    if INTERPRETED:
        return x / (1.0 + tl.exp(-x))
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 e;
            mul.rn.f32 e, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 e, e;
            add.rn.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 e, e;
            mul.rn.f32 $0, $1, e;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def softplus(x):
    """With nothing left for a compiler to fuse: trees and prompts need the same bits."""
    e = tl.exp(tl.minimum(x, 20.0))
    # log(1 + e) is imprecise for small e: there, the series of 2 artanh(e / (2 + e))
    z = e / (2.0 + e)
    z2 = z * z
    tail = tl.fma(z2, tl.fma(z2, tl.fma(z2, 1.0 / 9, 1.0 / 7), 1.0 / 5), 1.0 / 3)
    small = 2.0 * z * tl.fma(z2, tail, 1.0)
    return tl.where(x > 20.0, x, tl.where(e < 0.25, small, tl.log(1.0 + e)))


@triton.jit
def step_sizes(raw, bias, lowest, highest):
    """dt from in_proj's output [tokens, heads]: ``clamp(softplus(raw + bias))`` in float32."""
    return tl.minimum(tl.maximum(softplus(raw.to(tl.float32) + bias[None, :]), lowest), highest)


@triton.jit
def previous_done(OVERLAP: tl.constexpr):
    """Wait until the kernel launched before this one has ended; the next one may start now.

    For kernels launched with ``launch_pdl=OVERLAP``. Every program must call this, even one that
    has nothing to do: to the next kernel, the end of this one means that all earlier ones have
    ended as well. What a kernel reads before this call must not be written by the kernel before it,
    nor, if that is a product of float8/gluon.py, by the one before that.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch_ahead(rows, first, columns, LINES: tl.constexpr):
    """Fetch ``LINES`` times 128 bytes of each row, from column ``first`` on, into the L2 cache:
    what the kernel before does not write, before it has ended. rows: pointers [ROWS, 1]."""
    if LINES > 0:
        width: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth
        line = tl.minimum(first + width * tl.arange(0, LINES), columns - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [(rows + line[None, :]).to(tl.int64)],
            tl.int32,
            False,
            1,
        )


# ── rows in registers ──


@cache
def blocks_of(size: int) -> tuple[int, int]:
    """How a row of channels is cut: the size of a block, a power of two, and their number.

    All channels of a block are computed, so as few as possible are padding: 1280 are five blocks
    of 256.
    """
    largest = next_power_of_2(size)
    sizes = [largest >> i for i in range(4) if largest >> i >= 128] or [largest]
    block = min(sizes, key=lambda block: (cdiv(size, block) * block, -block))
    return block, cdiv(size, block)


@triton.jit
def inside_row(lines, column, block: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Which channels of a block there are: column [1, BLOCK]; lines [rows, 1], which rows, or
    None: all."""
    inside = column < SIZE - block * BLOCK
    if lines is None:
        return inside
    else:
        return inside & lines


@triton.jit
def load_blocks(at, lines, column, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The blocks of some rows of SIZE channels, one after the other. at: pointers to the first
    block [rows, BLOCK]; lines, column: as in ``inside_row``."""
    found = ()
    for block in tl.static_range(BLOCKS):
        inside = inside_row(lines, column, block, SIZE, BLOCK)
        found += (tl.load(at + block * BLOCK, mask=inside, other=0.0),)
    return found


@triton.jit
def inverse_rms(blocks, eps, SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    """1 / rms of rows of float32 blocks [lines, BLOCK]: -> [lines, 1]."""
    squares = blocks[0] * blocks[0]
    for block in tl.static_range(1, BLOCKS):
        squares += blocks[block] * blocks[block]
    return (1.0 / tl.sqrt(tl.sum(squares, 1) / SIZE + eps))[:, None]
