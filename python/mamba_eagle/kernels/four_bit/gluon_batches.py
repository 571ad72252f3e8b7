"""triton.py's product for batches of trees on Hopper: weights become warpgroup_mma's left factor.

A tile of the product is 128 rows of the weight, 64 for each of two warp groups, and some tokens;
gluon_shares.py says which tiles, or shares of them, a program has.

One warp copies codes and inputs for both groups by the copy engine. A group turns the codes of 32
columns into numbers, in registers, while the tensor cores multiply the 32 before and another
group's. A thread has one scale per row and step of 64 columns: its codes are those of 16
neighbouring columns. With 256 tokens the copies from the L2 cache are what takes the time.

``warpgroup_mma`` takes neighbouring columns from the two halves of a register, where four_bit's
units have columns four apart. Which columns these are is free as long as both factors agree: a
launch puts the inputs' columns in the order in which numbers come out of units (``_order_kernel``).
The copy engine could not: it moves eight columns at least.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mamba_eagle.kernels.four_bit import triton as by_compiler
from mamba_eagle.kernels.four_bit.gluon import four, halves, twice
from mamba_eagle.kernels.four_bit.gluon_shares import (
    ROWS,
    STEP,
    Cut,
    choose_cut,
    count_items,
    item,
    join,
)
from mamba_eagle.kernels.four_bit.triton import UNIT, Weight, aligned
from mamba_eagle.kernels.gpu import PROCESSORS, capability, cdiv, overlapping
from mamba_eagle.kernels.triton_math import previous_done

HOPPER = 9
PAIR = 2 * UNIT  # columns of two units, which share 32 bits
SHARED_BYTES = 200 << 10  # for what is copied; the rest is for what is stored
# Triton 3.7 gave it another name
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit(do_not_specialize=["eighths", "x_stride"])
def _order_kernel(
    x,  # [n, 8 eighths], rows 8 x_stride apart
    ordered,  # [n, 32 halves]
    eighths,  # of 64 columns
    x_stride,
    OVERLAP: gl.constexpr,
):
    """Of each 64 columns 16 t + 8 j + 4 h + i becomes 32 j + 8 i + 2 t + h: a thread has all
    columns of one j."""
    previous_done(OVERLAP)
    BLOCKS: gl.constexpr = 32  # of 64 columns
    loaded: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [2, 0], [4, 0]],
        [[1, 0], [8, 0], [16, 0], [32, 0], [64, 0]], [[128, 0]], [], [8 * BLOCKS, 8],
    )  # fmt: skip
    stored: gl.constexpr = gl.DistributedLinearLayout(  # two lanes write 32 bytes
        [[0, 1], [0, 2], [0, 4], [0, 16], [1, 0]],
        [[0, 8], [2, 0], [4, 0], [8, 0], [16, 0]], [[32, 0]], [], [2 * BLOCKS, 32],
    )  # fmt: skip
    token, first = gl.program_id(0).to(gl.int64), gl.program_id(1) * BLOCKS
    eighth = 8 * first + gl.arange(0, 8 * BLOCKS, gl.SliceLayout(1, loaded))
    column = gl.arange(0, 8, gl.SliceLayout(0, loaded))
    at = x + token * x_stride * 8 + (eighth[:, None] * 8 + column[None, :])
    numbers = gl.load(at, mask=(eighth < eighths)[:, None], other=0.0)
    numbers = gl.permute(gl.reshape(numbers, [BLOCKS, 4, 2, 2, 4]), (0, 2, 4, 1, 3))
    numbers = gl.convert_layout(gl.reshape(numbers, [2 * BLOCKS, 32]), stored)
    end = (eighths + 7) // 8 * 2
    half = 2 * first + gl.arange(0, 2 * BLOCKS, gl.SliceLayout(1, stored))
    column = gl.arange(0, 32, gl.SliceLayout(0, stored))
    at = ordered + token * end * 32 + (half[:, None] * 32 + column[None, :])
    gl.store(at, numbers, mask=(half < end)[:, None])


@gluon.jit
def _produce(codes, x, rings, cut, OVERLAP: gl.constexpr):
    w_ring, x_ring, ready, free = rings
    PAIRS: gl.constexpr = w_ring.shape[2]
    STEP: gl.constexpr = x_ring.shape[2]
    BYTES: gl.constexpr = codes.block_type.nbytes + x.block_type.nbytes
    items = count_items(cut)
    row, _, begin, end, _ = item(0, w_ring.shape[1], x_ring.shape[1], cut)
    # Codes of the first steps: no launch before this one writes them.
    early = gl.minimum(end - begin, ready.shape[0]) * gl.minimum(items, 1)
    for at in range(early):
        mbarrier.expect(ready.index(at), BYTES)
        _copy(codes, [row, (begin + at) * PAIRS], ready.index(at), w_ring.index(at))
    previous_done(OVERLAP)
    filled = 0
    for i in range(items):
        row, token, begin, end, _ = item(i, w_ring.shape[1], x_ring.shape[1], cut)
        for step in range(begin, end):
            at = filled % ready.shape[0]
            if filled >= early:
                # the first wait for a stage is over at once
                mbarrier.wait(free.index(at), 1 - (filled // ready.shape[0] & 1))
                mbarrier.expect(ready.index(at), BYTES)
                _copy(codes, [row, step * PAIRS], ready.index(at), w_ring.index(at))
            _copy(x, [token, step * STEP], ready.index(at), x_ring.index(at))
            filled += 1


@gluon.constexpr_function
def _pairs_layout():
    """[rows, 4, 2] pairs of units: the two of 16 neighbouring columns, of two rows, are a
    thread's."""
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    registers, warps = [[0, 0, 1], [8, 0, 0]], [[16, 0, 0], [32, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, 4, 2])


@gluon.jit
def _codes(w):
    """A warp group's pairs of units [64, 4, 2] int32 of 64 columns."""
    loaded: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8]
    )
    codes = gl.reshape(w.load(loaded), [64, 4, 2])
    return gl.convert_layout(codes, _pairs_layout(), assert_trivial=True)


@gluon.jit
def _numbers(codes, scale, zero, dtype: gl.constexpr, FLOATS: gl.constexpr, layout: gl.constexpr):
    """Every other pair of units, [64, 4] int32 -> the left factor [64, 32] of half of the columns,
    in the order in which inputs are put."""
    n0, n1, n2, n3 = four(codes, scale, zero, dtype, FLOATS)
    both = gl.join(gl.join(n0, n2), gl.join(n1, n3))  # [64, t, 2, 2]
    both = gl.permute(gl.reshape(both, [64, 4, 4]), (0, 2, 1))  # [64, i, t]
    whole = gl.reshape(halves(gl.reshape(both, [64, 16]), dtype), [64, 32])
    return gl.convert_layout(whole, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.constexpr_function
def _stored_layout(TOKENS):
    """Of sums [64, TOKENS]: as products are, but for 16 neighbouring rows in a thread."""
    tokens = [[0, own] for own in (1, 8, 16) if own < TOKENS]
    rows = [[1, 0], [2, 0], [4, 0]]
    registers = rows[: len(tokens)] + [[8, 0]]
    registers += [[0, own] for own in (32, 64, 128) if own < TOKENS]
    lanes = [[0, 2], [0, 4], *tokens, *rows[len(tokens) :]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, TOKENS])


@gluon.jit
def _store(acc, factor, bias, y, row, out, token, n, factor_stride):
    """acc [rows, tokens], from ``row`` and ``token`` on."""
    stored: gl.constexpr = _stored_layout(acc.shape[1])
    r = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    acc *= gl.load(factor + r * factor_stride, mask=r < out, other=0.0)[:, None]
    if bias is not None:
        acc += gl.load(bias + r, mask=r < out, other=0.0).to(gl.float32)[:, None]
    r = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, stored))
    t = token + gl.arange(0, acc.shape[1], gl.SliceLayout(0, stored))
    keep = (r < out)[:, None] & (t < n)[None, :]
    acc = gl.convert_layout(acc.to(y.dtype.element_ty), stored)
    gl.store(y + (t[None, :] * out + r[:, None]), acc, mask=keep)


@gluon.jit
def _consume(rings, cut, given, PART: gl.constexpr, GROUP: gl.constexpr, FLOATS: gl.constexpr):
    """The products of one warp group's rows."""
    w_ring, x_ring, ready, free = rings
    scale, factor, bias, y, parts, n, out, groups, factor_stride = given
    dtype: gl.constexpr = y.dtype.element_ty
    ROWS: gl.constexpr = w_ring.shape[1] // 2  # of this group
    TOKENS: gl.constexpr = x_ring.shape[1]
    STEP: gl.constexpr = x_ring.shape[2]
    HALF: gl.constexpr = STEP // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    pairs: gl.constexpr = gl.SliceLayout(2, _pairs_layout())
    of_group = gl.arange(0, ROWS, gl.SliceLayout(1, pairs))
    part = gl.arange(0, 4, gl.SliceLayout(0, pairs)) * (STEP // 4)
    filled = 0
    for i in range(count_items(cut)):
        row, token, begin, end, place = item(i, 2 * ROWS, TOKENS, cut)
        row += PART * ROWS
        of_rows = scale + gl.minimum(row + of_group, out - 1).to(gl.int64)[:, None] * groups
        acc = gl.zeros([ROWS, TOKENS], gl.float32, layout)
        # Scales are read ahead: past the end of a row are the next one or SLACK, which are
        # multiplied with zeros or not at all.
        s_next = gl.load(of_rows + ((begin * STEP + part) // GROUP)[None, :])
        for step in range(begin, end):
            s = s_next
            s_next = gl.load(of_rows + (((step + 1) * STEP + part) // GROUP)[None, :])
            at = filled % ready.shape[0]
            mbarrier.wait(ready.index(at), filled // ready.shape[0] & 1)
            first, second = gl.split(_codes(w_ring.index(at).slice(PART * ROWS, ROWS)))
            scales, zeros = twice(s, dtype, FLOATS)
            x = x_ring.index(at).permute((1, 0))
            w0 = _numbers(first, scales, zeros, dtype, FLOATS, layout)
            acc = warpgroup_mma(w0, x.slice(0, HALF), acc, is_async=True)
            w1 = _numbers(second, scales, zeros, dtype, FLOATS, layout)
            acc = warpgroup_mma(w1, x.slice(HALF, HALF), acc, is_async=True)
            acc, w0, w1 = warpgroup_mma_wait(0, deps=(acc, w0, w1))
            mbarrier.arrive(free.index(at))
            filled += 1
        if FLOATS:
            acc *= by_compiler.rest(dtype)
        if end - begin == cut[2]:
            _store(acc, factor, bias, y, row, out, token, n, factor_stride)
        else:
            r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            t = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
            to = parts + (2 * place + PART) * (TOKENS * ROWS)
            gl.store(to + (t[None, :] * ROWS + r[:, None]), acc)


VARYING = ["n", "groups", "factor_stride", "tiles", "waves", "steps", "left", "share"]


@gluon.jit(do_not_specialize=VARYING)
def _product_kernel(
    codes,  # [out, pairs of units] int32, in tiles [ROWS, 8]
    x,  # [n, columns] as _order_kernel puts them, in tiles [TOKENS, STEP]
    scale,  # [out, groups] E4M3; or int32: the bits of a scale, and 2^16 times its zero point
    factor,  # [out] or one
    bias,  # [out], or None
    y,  # [n, out]
    parts,  # [places, 2, TOKENS, ROWS / 2] float32: sums of shares
    n,
    out,
    groups,
    factor_stride,  # 0: one factor for all rows
    tiles,  # of tokens
    waves,
    steps,  # of a tile
    left,  # steps of tiles that are left after the waves
    share,
    GROUP: gl.constexpr,  # columns
    FLOATS: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    of_w: gl.constexpr = codes.block_type.shape
    of_x: gl.constexpr = x.block_type.shape
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, of_w[0], of_w[1]], codes.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, of_x[0], of_x[1]], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)  # warp groups
    cut = (tiles, waves, steps, left, share)
    rings = (w_ring, x_ring, ready, free)
    given = (scale, factor, bias, y, parts, n, out, groups, factor_stride)
    gl.warp_specialize(
        [
            (_consume, (rings, cut, given, 0, GROUP, FLOATS)),
            (_consume, (rings, cut, given, 1, GROUP, FLOATS)),
            (_produce, (codes, x, rings, cut, OVERLAP)),
        ],
        [4, 1],
        [240, 24],
    )


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kinds = {torch.int32: gl.int32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    return gl.NVMMASharedLayout.get_default_for([rows, columns], kinds[dtype])


def _described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix, read in tiles [rows, columns]."""
    layout = _layout(rows, columns, x.dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)


def _ordered(x: Tensor) -> Tensor:
    """x [n, in] -> [n, in, up to a multiple of STEP]."""
    x = aligned(x, 8)
    n, blocks = x.shape[0], cdiv(x.shape[1], STEP)
    ordered = torch.empty(n, blocks * STEP, dtype=x.dtype, device=x.device)
    _order_kernel[(n, cdiv(blocks, 32))](
        *(x, ordered, x.shape[1] // 8, x.stride(0) // 8),
        num_warps=2,
        **overlapping(x.device),
    )
    return ordered


def supports(weight: Weight) -> bool:
    """Whether this file's kernel can multiply it."""
    units = weight.units
    copied = units.stride(0) * units.itemsize % 16 == 0  # rows begin where the copy engine can
    return copied and capability(units.device)[0] == HOPPER


def product(x: Tensor, weight: Weight, bias: Tensor | None, cut: Cut | None = None) -> Tensor:
    """As triton.py's."""
    n, (out, units) = x.shape[0], weight.units.shape
    cut = cut or choose_cut(n, out, UNIT * units)
    tokens = cut.tokens
    y = torch.empty(n, out, dtype=x.dtype, device=x.device)
    parts = torch.empty(cut.places, 2, tokens, ROWS // 2, dtype=torch.float32, device=x.device)
    _product_kernel[(PROCESSORS,)](
        _described(weight.units.view(torch.int32), ROWS, STEP // PAIR),
        _described(_ordered(x), tokens, STEP),
        *(weight.scale, weight.factor, bias, y, parts, n, out, weight.scale.shape[1]),
        *(int(weight.factor.shape[0] > 1), *cut[1:]),
        GROUP=UNIT * weight.group,
        FLOATS=weight.floats,
        STAGES=min(SHARED_BYTES // (STEP * (2 * tokens + ROWS // 2)), 8),
        num_warps=4,
        **overlapping(x.device),
    )
    if cut.places:
        join(parts, weight.factor, bias, y, cut)
    return y
