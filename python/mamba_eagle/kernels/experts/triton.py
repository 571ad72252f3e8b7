"""The products of experts on a GPU: up with its activation, down, and the weighted sum.

A *pair* is a token and one of its experts; token t has pairs t · all to t · all + all - 1, first
those of its ``top_k`` routed experts, then one for each shared expert, which every token passes.

Few tokens: a program multiplies some rows of an expert's matrix with one pair's input, and nothing
is sorted. More: with the inputs of up to TOKENS pairs of the expert at once, so that each weight is
read once; weights are the left factor, which has the 64 rows of the tensor cores' widest
instruction however few tokens there are.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.experts.torch import Routes
from mamba_eagle.kernels.experts.triton_routes import Sorted
from mamba_eagle.kernels.float8.torch import E4M3, LARGEST, SMALLEST_SCALE, Rounding
from mamba_eagle.kernels.float8.triton import product_of_tiles, to_e4m3
from mamba_eagle.kernels.gpu import cdiv, next_power_of_2, overlapping
from mamba_eagle.kernels.staged import Staged
from mamba_eagle.kernels.triton_math import INTERPRETED, previous_done, silu

RELU_SQUARED, SILU_GATE = "relu_squared", "silu_gate"
# How inputs become float8: not at all; by one scale; by the token's largest number; by that of each
# 128 columns of a token.
PLAIN, STATIC, DYNAMIC, GROUPED = 0, 1, 2, 3
_PLAIN, _STATIC = tl.constexpr(PLAIN), tl.constexpr(STATIC)
_DYNAMIC, _GROUPED = tl.constexpr(DYNAMIC), tl.constexpr(GROUPED)
_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_SCALE)
BLOCK = 128  # columns that share a scale, if scales are of blocks


class Stack(NamedTuple):
    """Matrices [E, out, in] of experts, and shared ones of the same form beside them: [S · out, in]
    if they are stacked by rows (up), [out, S · in] if by columns (down)."""

    weight: Tensor
    scale: Tensor | None  # float8: [E, 1 or out] or [E, out blocks, in blocks] float32
    block: int  # rows that share a scale; 0: scales are of rows or of the matrix
    rounding: Rounding | None  # of the inputs
    shared: Tensor | None = None
    shared_scale: Tensor | None = None  # [1 or rows]; of blocks: as of one expert

    @property
    def inputs(self) -> int:
        """How they become float8."""
        if self.rounding is None:
            return PLAIN
        if self.rounding.scale is not None:
            return STATIC
        return GROUPED if self.rounding.group else DYNAMIC


class Pairs(NamedTuple):
    """Which pairs there are."""

    routes: Routes
    place: Sorted | None  # None: every pair is multiplied on its own
    shared: int  # experts that all tokens pass


class Config(NamedTuple):
    """How a product is divided; the result depends on it by rounding only."""

    rows: int  # of the weight, per program: a power of two
    tokens: int  # per pass over them; 0: one pair, without tensor cores
    columns: int  # per iteration: a power of two
    warps: int
    stages: int  # iterations in flight


@triton.jit
def _scale_of(largest):
    return tl.maximum(largest / _LARGEST, _SMALLEST)


@triton.jit
def _rounded(x, scale):
    """x / scale as E4M3. A GPU's conversion takes what is larger than 448 as 448, and a product
    takes a tenth of the instructions of a division."""
    if INTERPRETED:
        return to_e4m3(x.to(tl.float32) / scale)
    else:
        return (x.to(tl.float32) * (1.0 / scale)).to(tl.float8e4nv)


@triton.jit
def _activated(acc, gate, GATED: tl.constexpr, ACTIVATED: tl.constexpr):
    if GATED:
        return silu(gate) * acc
    elif ACTIVATED:
        positive = tl.maximum(acc, 0.0)
        return positive * positive
    else:
        return acc


@Staged
@triton.jit
def _few_kernel(
    x,  # [n, SIZE] if GATHER, else [pairs, SIZE]; rows x_stride apart
    x_largest,  # [pairs, PARTS] float32, read if DYNAMIC and not GATHER
    static,  # [1, 1] float32, read if STATIC
    ids,  # [n, TOP_K] int32
    weight,  # [E, OUT or 2 OUT, SIZE]
    scale,
    shared,  # see Stack
    shared_scale,
    y,  # [pairs, OUT]; float8 if there is static_out
    largest,  # [pairs, tiles] float32, written if MARKS: the largest size of a tile's outputs
    static_out,  # [1, 1] float32, what y is divided by, or None
    x_stride,
    scale_stride,  # between experts
    row_scale_stride,  # 0: a scale per matrix
    shared_scale_stride,
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    GATHER: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATED: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    MARKS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_OUT: tl.constexpr,  # 0: scales are of rows or matrices
    PADDED: tl.constexpr,  # a power of two, at least SIZE; of PARTS if not GATHER
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile, pair = tl.program_id(0), tl.program_id(1)
    ALL: tl.constexpr = TOP_K + SHARED
    token, slot = pair // ALL, pair % ALL
    row = tile * ROWS + tl.arange(0, ROWS)
    is_row = row < OUT
    previous_done(OVERLAP)
    expert = tl.load(ids + token * TOP_K + slot, mask=slot < TOP_K, other=0)
    base, scales, step_of_rows = weight, scale, row_scale_stride
    row_stride, gate_rows = SIZE, OUT
    if SHARED > 0:
        is_shared = slot >= TOP_K
        if GATHER:
            gate_rows += is_shared.to(tl.int32) * (OUT * SHARED - OUT)
        else:
            row_stride += is_shared.to(tl.int32) * (SIZE * SHARED - SIZE)
        if is_shared:
            expert = slot - TOP_K
            base, scales, step_of_rows = shared, shared_scale, shared_scale_stride
    stride, own_scale_stride = OUT * SIZE * (2 if GATED else 1), scale_stride
    if SHARED > 0:
        wide = is_shared.to(tl.int32)
        if GATHER:
            stride += wide * (OUT * SIZE - stride)
            own_scale_stride += wide * (OUT * step_of_rows - own_scale_stride)
        else:
            stride += wide * (SIZE - stride)
            own_scale_stride += wide * -own_scale_stride
    base += expert.to(tl.int64) * stride
    scales += expert * own_scale_stride
    row_at = tl.where(is_row, row, 0)
    at = base + row_at.to(tl.int64)[:, None] * row_stride
    above = at + gate_rows * row_stride
    own = x + (token if GATHER else pair).to(tl.int64) * x_stride
    factor = tl.full([], 1.0, tl.float32)
    if INPUTS == _STATIC:
        factor = tl.load(static)
    elif INPUTS == _DYNAMIC:
        place = tl.arange(0, PADDED)
        if GATHER:
            numbers = tl.load(own + place, mask=place < SIZE, other=0.0).to(tl.float32)
        else:
            numbers = tl.load(x_largest + pair * PARTS + place, mask=place < PARTS, other=0.0)
        factor = _scale_of(tl.max(tl.abs(numbers), 0))
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    gates = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in tl.range(0, tl.cdiv(SIZE, COLUMNS), num_stages=STAGES):
        column = step * COLUMNS + tl.arange(0, COLUMNS)
        t = tl.load(own + column, mask=column < SIZE, other=0.0).to(tl.float32)
        w = tl.load(at + column[None, :], mask=(column < SIZE)[None, :], other=0.0)
        if GATED:
            g = w
            w = tl.load(above + column[None, :], mask=(column < SIZE)[None, :], other=0.0)
        if INPUTS == _GROUPED:
            group = _scale_of(tl.max(tl.abs(t), 0))
            t = _rounded(t, group).to(tl.float32) * group
        elif INPUTS != _PLAIN and x.dtype.element_ty != tl.float8e4nv:
            t = _rounded(t, factor).to(tl.float32)
        if BLOCK_OUT > 0:
            BLOCKS: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
            s = tl.load(scales + row_at // BLOCK_OUT * BLOCKS + step)
            if GATED:
                gates += g.to(tl.float32) * t[None, :] * s[:, None]
                s = tl.load(scales + (OUT + row_at) // BLOCK_OUT * BLOCKS + step)
            acc += w.to(tl.float32) * t[None, :] * s[:, None]
        else:
            if GATED:
                gates += g.to(tl.float32) * t[None, :]
            acc += w.to(tl.float32) * t[None, :]
    result, gate = tl.sum(acc, 1), tl.sum(gates, 1)
    if SCALED and BLOCK_OUT == 0:
        if GATED:
            gate *= tl.load(scales + row_at * step_of_rows)
            row_at += gate_rows
        result *= tl.load(scales + row_at * step_of_rows)
    if SCALED and INPUTS != _PLAIN and INPUTS != _GROUPED:
        result, gate = result * factor, gate * factor
    result = _activated(result, gate, GATED, ACTIVATED)
    if static_out is not None:
        result = _rounded(result, tl.load(static_out))
    tl.store(y + pair.to(tl.int64) * OUT + row, result, mask=is_row)
    if MARKS:
        size = tl.max(tl.where(is_row, tl.abs(result), 0.0), 0)
        tl.store(largest + pair * tl.num_programs(0) + tile, size)


@triton.jit
def _factor(x, factor, INPUTS: tl.constexpr):
    """The right factor [TOKENS, COLUMNS] of a product, and its scales [TOKENS]."""
    if INPUTS == _GROUPED and x.dtype != tl.float8e4nv:
        x = x.to(tl.float32)
        factor = _scale_of(tl.max(tl.abs(x), 1))
        return _rounded(x, factor[:, None]), factor
    elif INPUTS != _PLAIN and x.dtype != tl.float8e4nv:
        return _rounded(x, factor[:, None]), factor
    else:
        return x, factor


@Staged
@triton.jit(do_not_specialize=["n", "group_stride"])
def _tile_kernel(
    x,
    x_largest,  # [n] if GATHER, else [pairs, PARTS]; of float8 in groups: all scales
    static,
    order,
    table,
    weight,
    scale,
    shared,
    shared_scale,
    y,
    largest,
    static_out,
    n,
    group_stride,  # between the scales of a token's groups
    x_stride,
    scale_stride,
    row_scale_stride,
    shared_scale_stride,
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    GATHER: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATED: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    MARKS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two, at least PARTS
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As ``_few_kernel``; all pairs of an expert."""
    tile, place = tl.program_id(0), tl.program_id(1)
    ALL: tl.constexpr = TOP_K + SHARED
    STEPS: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    row = tile * ROWS + tl.arange(0, ROWS)
    is_row = row < OUT
    row_at = tl.where(is_row, row, 0)
    previous_done(OVERLAP)
    is_shared = place < SHARED
    entry = table + 1 + 3 * (place - SHARED)
    here = (place >= SHARED) & (place - SHARED < tl.load(table))
    expert = tl.load(entry, mask=here, other=0)
    begin, end = tl.load(entry + 1, mask=here, other=0), tl.load(entry + 2, mask=here, other=0)
    base = weight + expert.to(tl.int64) * OUT * SIZE * (2 if GATED else 1)
    scales, step_of_rows = scale + expert * scale_stride, row_scale_stride
    row_stride, gate_rows = SIZE, OUT
    if SHARED > 0:
        if GATHER:
            gate_rows += is_shared.to(tl.int32) * (OUT * SHARED - OUT)
        else:
            row_stride += is_shared.to(tl.int32) * (SIZE * SHARED - SIZE)
        if is_shared:
            end = n
            step_of_rows = shared_scale_stride
            if GATHER:
                base = shared + place.to(tl.int64) * OUT * SIZE
                scales = shared_scale + place * OUT * step_of_rows
            else:
                base = shared + place * SIZE
                scales = shared_scale
    at = base + row_at.to(tl.int64)[:, None] * row_stride
    above = at + gate_rows * row_stride
    OF_GROUPS: tl.constexpr = INPUTS == _GROUPED and x.dtype.element_ty == tl.float8e4nv
    if BLOCK_OUT > 0:  # a program's rows have one scale, unless a gate begins inside of a block
        ONE: tl.constexpr = OUT % BLOCK_OUT == 0 or not GATED
        scaled = tl.minimum(tile * ROWS + tl.arange(0, 1 if ONE else ROWS), OUT - 1)
        row_scales = scales + scaled // BLOCK_OUT * STEPS
        above_scales = scales + ((OUT if GATED else 0) + scaled) // BLOCK_OUT * STEPS
    for start in tl.range(begin, end, TOKENS):
        which = start + tl.arange(0, TOKENS)
        is_pair = which < end
        flat = tl.load(order + which, mask=is_pair & (not is_shared), other=0)
        token = tl.where(is_shared, which, flat // TOP_K)
        token = tl.where(is_pair, token, 0)
        pair = token * ALL + tl.where(is_shared, TOP_K + place, flat % TOP_K)
        own = x + (token if GATHER else pair).to(tl.int64)[:, None] * x_stride
        factor = tl.full([TOKENS], 1.0, tl.float32)
        if INPUTS == _STATIC:
            factor *= tl.load(static)
        elif INPUTS == _DYNAMIC:
            if GATHER:
                size = tl.load(x_largest + token, mask=is_pair, other=0.0)
            else:
                part = tl.arange(0, PADDED)
                parts = x_largest + pair[:, None] * PARTS + part[None, :]
                known = is_pair[:, None] & (part < PARTS)[None, :]
                size = tl.max(tl.load(parts, mask=known, other=0.0), 1)
            factor = _scale_of(size)
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        gates = tl.zeros([ROWS, TOKENS], tl.float32)
        if BLOCK_OUT > 0:  # scales of the next sum are loaded while this one is made
            s, gate_s = tl.load(row_scales), tl.load(above_scales)
        if OF_GROUPS:
            groups = x_largest + (token if GATHER else pair)
            factor = tl.load(groups)
        for step in tl.range(0, STEPS, num_stages=STAGES):
            column = step * COLUMNS + tl.arange(0, COLUMNS)
            inside = (column < SIZE)[None, :]
            if SIZE % COLUMNS == 0:
                w = tl.load(at + column[None, :])
                if GATED:
                    u = tl.load(above + column[None, :])
                t = tl.load(own + column[None, :], mask=is_pair[:, None], other=0.0)
            else:
                w = tl.load(at + column[None, :], mask=inside, other=0.0)
                if GATED:
                    u = tl.load(above + column[None, :], mask=inside, other=0.0)
                t = tl.load(own + column[None, :], mask=is_pair[:, None] & inside, other=0.0)
            t, group = _factor(t, factor, INPUTS)
            if BLOCK_OUT > 0:
                later = tl.minimum(step + 1, STEPS - 1)
                next_s, next_gate_s = tl.load(row_scales + later), tl.load(above_scales + later)
                if OF_GROUPS:
                    factor = tl.load(groups + later * group_stride)
                part = product_of_tiles(w, t, tl.zeros([ROWS, TOKENS], tl.float32))
                both = s[:, None]
                if INPUTS == _GROUPED:
                    both *= group[None, :]
                if GATED:
                    gates += part * both
                    part = product_of_tiles(u, t, tl.zeros([ROWS, TOKENS], tl.float32))
                    both = gate_s[:, None]
                    if INPUTS == _GROUPED:
                        both *= group[None, :]
                acc += part * both
                s, gate_s = next_s, next_gate_s
            elif GATED:
                gates = product_of_tiles(w, t, gates)
                acc = product_of_tiles(u, t, acc)
            else:
                acc = product_of_tiles(w, t, acc)
        if SCALED and BLOCK_OUT == 0:
            if GATED:
                gates *= tl.load(scales + row_at * step_of_rows)[:, None]
                acc *= tl.load(scales + (gate_rows + row_at) * step_of_rows)[:, None]
            else:
                acc *= tl.load(scales + row_at * step_of_rows)[:, None]
        if SCALED and INPUTS != _PLAIN and INPUTS != _GROUPED:
            acc *= factor[None, :]
            gates *= factor[None, :]
        acc = _activated(acc, gates, GATED, ACTIVATED)
        to = y + pair.to(tl.int64)[None, :] * OUT + row[:, None]
        if static_out is not None:
            acc = _rounded(acc, tl.load(static_out))
        tl.store(to, acc, mask=is_row[:, None] & is_pair[None, :])
        if MARKS:
            size = tl.max(tl.where(is_row[:, None], tl.abs(acc), 0.0), 0)
            tl.store(largest + pair * tl.num_programs(0) + tile, size, mask=is_pair)


@triton.jit
def _sum_kernel(
    each,  # [pairs, SIZE]
    back,  # [n, TOP_K] int32, which row of each a pair has; None: that of its number
    weights,  # [n, TOP_K] float32
    added,  # [n, SIZE], or None
    share_logits,  # [n], or None
    y,  # [n, SIZE]
    logit_stride,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    previous_done(OVERLAP)
    total, of_shared = tl.zeros([BLOCK], tl.float32), 1.0
    if share_logits is not None:
        logit = tl.load(share_logits + token * logit_stride).to(tl.float32)
        of_shared = 1.0 / (1.0 + tl.exp(-logit))
    for slot in tl.static_range(TOP_K + SHARED):
        place = token * (TOP_K + SHARED) + slot
        share = of_shared
        if slot < TOP_K:
            share = tl.load(weights + token * TOP_K + slot)
        if back is not None:
            place = tl.load(back + place).to(tl.int64)
        made = tl.load(each + place * SIZE + column, mask=inside, other=0.0)
        total += made.to(tl.float32) * share
    if added is not None:
        beside = tl.load(added + token * SIZE + column, mask=inside, other=0.0)
        total += beside.to(tl.float32) * of_shared
    tl.store(y + token * SIZE + column, total, mask=inside)


def weighted_sum(
    each: Tensor,
    pairs: Pairs,
    added: Tensor | None,
    by_expert: bool = False,
    share: Tensor | None = None,
) -> Tensor:
    """each [pairs, size] -> [n, size]: Σ weights · each, with the shared experts, which are among
    the pairs or ``added`` [n, size].

    by_expert: each has the order of ``pairs.place``, and no shared experts. share: [n, 1], logits
    of the shared experts' weights; None: these are 1.
    """
    routes, shared = pairs.routes, 0 if by_expert else pairs.shared
    (n, top_k), size, device = routes.weights.shape, each.shape[1], each.device
    y = torch.empty(n, size, dtype=each.dtype, device=device)
    block = 512
    _sum_kernel[(n, cdiv(size, block))](
        *(each, pairs.place.back if by_expert and pairs.place is not None else None),
        *(routes.weights, added, share, y, 0 if share is None else share.stride(0)),
        SIZE=size,
        TOP_K=top_k,
        SHARED=shared,
        BLOCK=block,
        num_warps=2,
        **overlapping(device),
    )
    return y


class Marked(NamedTuple):
    """Outputs of a product, and what is needed to round them."""

    values: Tensor  # [pairs, out]
    largest: Tensor  # [pairs, parts] float32, of parts of a row; empty if not asked for


def product(
    x: Marked,
    stack: Stack,
    pairs: Pairs,
    config: Config,
    act: str | None,
    dtype: torch.dtype,
    following: Rounding | None = None,
) -> Marked:
    """One product of every pair with its expert's matrix.

    Args:
        x: act given: [n, in], the tokens; else [pairs, in].
        pairs: with a place if config.tokens is not 0.
        act: RELU_SQUARED or SILU_GATE, applied to the sums; None: none.
        following: how the next product rounds what this one returns.
    Returns: [n · (k + shared), out] of ``dtype``, or float8 by a scale that ``following`` has.
    """
    (n, top_k), shared, place = pairs.routes.weights.shape, pairs.shared, pairs.place
    (count, rows, size), device = stack.weight.shape, stack.weight.device
    gated, gather = act == SILU_GATE, act is not None
    out = rows // 2 if gated else rows
    tiles, total = cdiv(out, config.rows), n * (top_k + shared)
    static_out = None if following is None else following.scale
    marks = following is not None and static_out is None and not following.group
    y = torch.empty(total, out, dtype=dtype if static_out is None else E4M3, device=device)
    largest = torch.empty(total if marks else 0, tiles, dtype=torch.float32, device=device)
    parts = x.largest.shape[-1] if x.largest.ndim > 1 else 1
    given, strides = _factors(x, stack, pairs)
    given += (y, largest, static_out)
    common = {
        "SIZE": size,
        "OUT": out,
        "TOP_K": top_k,
        "SHARED": shared,
        "GATHER": gather,
        "GATED": gated,
        "ACTIVATED": act == RELU_SQUARED,
        "INPUTS": stack.inputs,
        "PARTS": parts,
        "MARKS": marks,
        "SCALED": stack.scale is not None,
        "BLOCK_OUT": stack.block,
        "PADDED": next_power_of_2(size if place is None and gather else parts),
        "ROWS": config.rows,
        "COLUMNS": BLOCK if stack.block else config.columns,
        "STAGES": config.stages,
        "num_warps": config.warps,
        **overlapping(device),
    }
    if place is None:
        _few_kernel[(tiles, total)](*given, *strides, **common)
    else:
        active = shared + min(count, n * top_k)
        given += (n, x.largest.stride(-1), *strides)
        _tile_kernel[(tiles, active)](*given, TOKENS=config.tokens, **common)
    return Marked(y, largest)


def _factors(x: Marked, stack: Stack, pairs: Pairs) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The tensors that both kernels read, in their order, and the strides of rows and scales."""
    weight, place = stack.weight, pairs.place
    scale = x.largest if stack.scale is None else stack.scale
    static = scale if stack.rounding is None else stack.rounding.scale
    given = (x.values, x.largest, scale if static is None else static)
    given += (pairs.routes.experts,) if place is None else (place.order, place.table)
    own = stack.shared if pairs.shared else weight
    own_scale = stack.shared_scale if pairs.shared and stack.shared_scale is not None else scale
    given += (weight, scale, own, own_scale)
    if stack.scale is None:
        return given, (x.values.stride(0), 0, 0, 0)
    per_row = (0, 0) if stack.block else (int(scale.shape[1] > 1), int(own_scale.shape[0] > 1))
    return given, (x.values.stride(0), scale[0].numel(), *per_row)
