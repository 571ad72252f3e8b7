"""What adapters add to a product on a GPU, in two launches behind it: shrink and expand.

A row names its slot on the device, so a captured step serves any adapters. A program takes a tile
of rows and goes over the slots that these rows have, each with the other rows masked: it reads an
adapter's matrices once for all of its rows and up to the adapter's own rank, and those of no other.
Rows need not be sorted. Those of one prompt are neighbours, so a tile of them has one slot or two.

    small[chunk, i] = A[slot_i] x_i over a chunk of the inputs        shrink
    y_i            += B[slot_i] Σ_chunk small[chunk, i]               expand

The first of the two may run while the product before it drains: what it reads was there before.
The second has a form for few rows and one for many, whose time is that of reading and writing y:
a program adds the chunks up once for all of its channels, and fetches the next of these meanwhile.
Chunks are added up in their order by both: so a row has the same bits in every batch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from mamba_eagle.kernels.gpu import PROCESSORS, cdiv, next_power_of_2, overlapping
from mamba_eagle.kernels.staged import Staged
from mamba_eagle.kernels.triton_math import exact_dot, previous_done, split_dot

RANKS = 16  # a slot has room for a multiple of these, which are multiplied at once


class Slots(NamedTuple):
    """The adapters of a product's matrices, P in all."""

    down: Tensor  # [slots, P, R, in]
    up: Tensor  # [slots, R, out], the matrices side by side as in the product
    ranks: Tensor  # [slots, P] int32: of R, those that count; what lies behind is not read
    tiles: list[Tensor]  # [tiles, 3] int32, as ``tiles_of`` makes them, each twice as wide
    align: int  # a power of two that divides where they begin and end


class Config(NamedTuple):
    """How the work is divided; the result depends on ``chunk`` alone."""

    tokens: int  # rows per program: a power of two, at least 16
    groups: int  # programs of shrink that share the slots
    side: int  # slots that a program of expand multiplies at once: a power of two; 0: many rows
    chunk: int = 1024  # inputs
    step: int = 128  # inputs per iteration, a divisor of ``chunk``
    stages: int = 4
    warps: int = 4
    programs: int = PROCESSORS  # of expand, at least, if it can be


CHANNELS = 64  # outputs that a program of expand makes at once
WIDTHS = tuple(CHANNELS << i for i in range(6))  # those that it makes, with many rows


def tiles_of(outputs: list[int], width: int) -> list[list[int]]:
    """Of each tile the matrix, its first channel and its end. outputs: of each matrix; they lie
    side by side."""
    found, first = [], 0
    for part, size in enumerate(outputs):
        end = first + size
        found += [[part, at, min(at + width, end)] for at in range(first, end, width)]
        first = end
    return found


def widest(tiles: list[Tensor], rows: int, programs: int) -> Tensor:
    """Tiles as wide as leaves this many programs for ``rows`` tiles of rows; else the narrowest."""
    return next((each for each in tiles[:0:-1] if len(each) * rows >= programs), tiles[0])


def choose_config(n: int, slots: int) -> Config:
    """For Hopper, measured at up to 2,048 rows, with ``programs`` from 132 to 528."""
    # rows of a prompt are neighbours: tiles of more of them have fewer slots each
    groups = max(1, min(slots, 8) // cdiv(n, 64))
    side = next_power_of_2(groups) if n <= 128 else 0
    return Config(min(64, max(16, next_power_of_2(n))), groups, side)


@triton.jit
def _rows(slots, n, TOKENS: tl.constexpr):
    """A tile of rows: their numbers, their slots, and the least and the largest of these."""
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    own = tl.load(slots + token, mask=token < n, other=-1).to(tl.int32)
    lowest = tl.min(tl.where(own < 0, 1 << 30, own))
    return token, own, lowest, tl.max(own)


# not specialized, so that all numbers of tokens share machine code
@Staged
@triton.jit(do_not_specialize=["n", "scale_stride"])
def _shrink_kernel(
    x,  # [n, columns], rows x_stride apart
    scale,  # [n] or one float32, of rows of x, or None
    slots,  # [n] int64
    down,  # [slots, PARTS, RANK, columns]
    ranks,  # [slots, PARTS]
    small,  # [chunks, n, PARTS * RANK] float32
    n,
    columns,
    x_stride,
    scale_stride,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,  # whether the kernel before did not write x
    OVERLAP: tl.constexpr,
):
    if not EARLY:
        previous_done(OVERLAP)
    elif OVERLAP:
        gdc_launch_dependents()  # expand reads nothing of the product's before it waits, either
    BLOCKS: tl.constexpr = RANK // RANKS
    chunk, block = tl.program_id(0) // (PARTS * BLOCKS), tl.program_id(0) % (PARTS * BLOCKS)
    part, first = block // BLOCKS, block % BLOCKS * RANKS
    group, groups = tl.program_id(2), tl.num_programs(2)
    token, own, lowest, highest = _rows(slots, n, TOKENS)
    rank = tl.arange(0, RANKS).to(tl.int64)
    column = tl.arange(0, STEP)
    dtype: tl.constexpr = down.dtype.element_ty
    total = tl.zeros([RANKS, TOKENS], tl.float32)
    for slot in range(lowest + group, highest + 1, groups):
        mine = own == slot
        if tl.max(mine.to(tl.int32)) > 0:
            left = tl.load(ranks + slot * PARTS + part) - first
            if left > 0:
                at = (slot * PARTS + part) * RANK + first + rank
                rows = down + at[:, None] * columns
                begin = chunk * CHUNK
                acc = tl.zeros([RANKS, TOKENS], tl.float32)
                for offset in tl.range(
                    begin, tl.minimum(begin + CHUNK, columns), STEP, num_stages=STAGES
                ):
                    i = offset + column
                    inside = i < columns
                    a = tl.load(
                        rows + i[None, :],
                        mask=(rank < left)[:, None] & inside[None, :],
                        other=0.0,
                    )
                    t = tl.load(
                        x + token[None, :] * x_stride + i[:, None],
                        mask=inside[:, None] & mine[None, :],
                        other=0.0,
                    )
                    acc = exact_dot(a, t.to(dtype), acc, PRECISION)
                total += acc
    if scale is not None:
        total *= tl.load(scale + token * scale_stride, mask=own >= 0, other=0.0)[None, :]
    if EARLY:
        previous_done(OVERLAP)
    here = (own >= 0) & ((own - lowest) % groups == group)
    to = small + (chunk * n + token)[None, :] * (PARTS * RANK) + (block * RANKS + rank)[:, None]
    tl.store(to, total, mask=here[None, :])


@triton.jit
def _summed(
    small, token, own, column, n, CHUNKS: tl.constexpr, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr
):
    """small [CHUNKS, n, WIDTH], over the chunks in their order; column [c] -> [TOKENS, c].
    AT_ONCE: chunks that are loaded before one is added."""
    at = small + token[:, None] * WIDTH + column[None, :]
    total = tl.zeros([token.shape[0], column.shape[0]], tl.float32)
    for chunk in tl.range(0, CHUNKS, loop_unroll_factor=AT_ONCE):
        step = tl.cast(n, tl.int64) * chunk * WIDTH
        total += tl.load(at + step, mask=(own >= 0)[:, None], other=0.0)
    return total


@triton.jit(do_not_specialize=["n"])
def _expand_kernel(
    y,  # [n, width], rows y_stride apart
    small,  # [CHUNKS, n, PARTS * RANK] float32
    slots,  # [n] int64
    up,  # [slots, RANK, outputs]
    ranks,  # [slots, PARTS]
    tiles,  # [tiles, 3]
    n,
    outputs,
    y_stride,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SIDE: tl.constexpr,  # slots that are multiplied at once, side by side
    CHANNELS: tl.constexpr,
    ALIGN: tl.constexpr,  # divides where tiles begin and end
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tiles + 3 * tl.program_id(0)
    part, end = tl.load(tile), tl.multiple_of(tl.load(tile + 2), ALIGN)
    channel = tl.multiple_of(tl.load(tile + 1), ALIGN) + tl.arange(0, CHANNELS)
    inside = (channel < end)[None, :]
    token, own, lowest, highest = _rows(slots, n, TOKENS)
    rank = tl.arange(0, RANKS).to(tl.int64)
    for slot in tl.range(lowest, highest + 1, SIDE, num_stages=1):
        counts, most = (), 0
        for s in tl.static_range(SIDE):
            used = tl.max((own == slot + s).to(tl.int32)) > 0
            count = tl.load(ranks + (slot + s) * PARTS + part, mask=used, other=0)
            counts, most = counts + (count,), tl.maximum(most, count)
        if most > 0:
            keep = ((own >= slot) & (own < slot + SIDE))[:, None] & inside
            to = y + token[:, None] * y_stride + channel[None, :]
            old = tl.zeros([TOKENS, CHANNELS], y.dtype.element_ty)
            acc = tl.zeros([TOKENS, CHANNELS], tl.float32)
            for first in tl.range(0, most, RANKS, num_stages=1):
                factors = ()
                for s in tl.static_range(SIDE):
                    row = (slot + s) * RANK + first + rank
                    factors += (
                        tl.load(
                            up + row[:, None] * outputs + channel[None, :],
                            mask=(first + rank < counts[s])[:, None] & inside,
                            other=0.0,
                        ),
                    )
                previous_done(OVERLAP)  # adapters were there before
                old = tl.load(to, mask=keep, other=0.0)
                column = part * RANK + first + rank
                given = _summed(small, token, own, column, n, CHUNKS, CHUNKS, PARTS * RANK)
                for s in tl.static_range(SIDE):
                    zeros = tl.zeros([TOKENS, CHANNELS], tl.float32)
                    made = split_dot(given, factors[s], zeros, PRECISION)
                    acc += tl.where((own == slot + s)[:, None], made, 0.0)
            tl.store(to, old.to(tl.float32) + acc, mask=keep)
    previous_done(OVERLAP)


@triton.jit
def _expand_wide(
    y, small, up, token, own, slot, part, count, begin, end, n, outputs, y_stride,
    CHUNKS: tl.constexpr,
    BLOCKS: tl.constexpr,  # of ranks that are multiplied
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The rows of one slot: ``count`` ranks, channels ``begin`` to ``end``."""
    mine, rank = (own == slot)[:, None], tl.arange(0, RANKS).to(tl.int64)
    AT_ONCE: tl.constexpr = CHUNKS if BLOCKS == 1 else 4  # registers are few
    given = ()
    for block in tl.static_range(BLOCKS):
        column = part * RANK + block * RANKS + rank
        given += (_summed(small, token, own, column, n, CHUNKS, AT_ONCE, PARTS * RANK),)
    for first in tl.range(begin, end, CHANNELS, num_stages=3):
        channel = tl.multiple_of(first, ALIGN) + tl.arange(0, CHANNELS)
        inside = (channel < end)[None, :]
        to = y + token[:, None] * y_stride + channel[None, :]
        old = tl.load(to, mask=mine & inside, other=0.0)
        acc = tl.zeros([token.shape[0], CHANNELS], tl.float32)
        for block in tl.static_range(BLOCKS):
            each = block * RANKS + rank
            factor = tl.load(
                up + (slot * RANK + each)[:, None] * outputs + channel[None, :],
                mask=(each < count)[:, None] & inside,
                other=0.0,
            )
            zeros = tl.zeros([token.shape[0], CHANNELS], tl.float32)
            acc += split_dot(given[block], factor, zeros, PRECISION)
        tl.store(to, old.to(tl.float32) + acc, mask=mine & inside)


@triton.jit(do_not_specialize=["n"])
def _expand_many_kernel(
    y,  # as _expand_kernel has them
    small,
    slots,
    up,
    ranks,
    tiles,
    n,
    outputs,
    y_stride,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ALIGN: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tiles + 3 * tl.program_id(0)
    part, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    begin, end = tl.multiple_of(begin, ALIGN), tl.multiple_of(end, ALIGN)
    token, own, lowest, highest = _rows(slots, n, TOKENS)
    previous_done(OVERLAP)
    for slot in range(lowest, highest + 1):
        if tl.max((own == slot).to(tl.int32)) > 0:
            count = tl.load(ranks + slot * PARTS + part)
            if count > RANKS:
                _expand_wide(
                    y, small, up, token, own, slot, part, count, begin, end, n, outputs, y_stride,
                    CHUNKS, RANK // RANKS, PARTS, RANK, RANKS, CHANNELS, ALIGN, PRECISION,
                )  # fmt: skip
            elif count > 0:
                _expand_wide(
                    y, small, up, token, own, slot, part, count, begin, end, n, outputs, y_stride,
                    CHUNKS, 1, PARTS, RANK, RANKS, CHANNELS, ALIGN, PRECISION,
                )  # fmt: skip


def add_(
    y: Tensor,
    x: Tensor,
    slots: Tensor,
    adapters: Slots,
    scale: Tensor | None = None,
    early: bool = False,
    config: Config | None = None,
) -> None:
    """Add to y what each row's slot makes of x; rows without one keep their values.

    Args:
        y: [n, out], channels side by side. x: [n, in], channels side by side; of the adapters'
            dtype, or E4M3 with a ``scale`` [n, 1] or [1, 1].
        slots: [n] int64, below 0: none.
        early: the kernel launched before this one did not write x or slots; nor, if that is a
            product of float8/gluon.py, did the one before it.
    """
    (n, columns), (count, parts, rank, _), device = x.shape, adapters.down.shape, x.device
    config = config or choose_config(n, count)
    chunks, rows = cdiv(columns, config.chunk), cdiv(n, config.tokens)
    small = torch.empty(chunks, n, parts * rank, dtype=torch.float32, device=device)
    common = {"PARTS": parts, "RANK": rank, "RANKS": RANKS, "TOKENS": config.tokens,
              "PRECISION": "ieee", "num_warps": config.warps, **overlapping(device)}  # fmt: skip
    _shrink_kernel[(chunks * parts * (rank // RANKS), rows, config.groups)](
        *(x, scale, slots, adapters.down, adapters.ranks, small),
        *(n, columns, x.stride(0), int(scale is not None and len(scale) > 1)),
        CHUNK=config.chunk,
        STEP=config.step,
        STAGES=config.stages,
        EARLY=early,
        **common,
    )
    expand, tiles = _expand_many_kernel, widest(adapters.tiles, rows, config.programs)
    if config.side:
        expand, tiles, common["SIDE"] = _expand_kernel, adapters.tiles[0], config.side
    expand[(len(tiles), rows)](
        *(y, small, slots, adapters.up, adapters.ranks, tiles),
        *(n, adapters.up.shape[2], y.stride(0)),
        CHUNKS=chunks,
        CHANNELS=CHANNELS,
        ALIGN=adapters.align,
        **common,
    )
