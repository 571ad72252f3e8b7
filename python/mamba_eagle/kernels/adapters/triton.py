"""What adapters add to a product on a GPU, in two launches behind it: shrink and expand.

A row names its slot on the device, so a captured step serves any adapters. A program takes a tile
of rows and goes over the slots that these rows have, each with the other rows masked: it reads an
adapter's matrices once for all of its rows and up to the adapter's own rank, and those of no other.
Rows need not be sorted. Those of one prompt are neighbours, so a tile of them has one slot or two.

    small[split, i] = A[slot_i] x_i over a split of the inputs        shrink
    y_i            += B[slot_i] Σ_split small[split, i]               expand

The first of the two may run while the product before it drains: what it reads was there before.
The inputs are added up in chunks, and the chunks in their order, whether one program has them all
or each has one: so a row has the same bits in every batch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from mamba_eagle.kernels.gpu import cdiv, next_power_of_2, overlapping
from mamba_eagle.kernels.triton_math import exact_dot, previous_done, split_dot

RANKS = 16  # a slot has room for a multiple of these, which are multiplied at once


class Slots(NamedTuple):
    """The adapters of a product's matrices, P in all."""

    down: Tensor  # [slots, P, R, in]
    up: Tensor  # [slots, R, out], the matrices side by side as in the product
    ranks: Tensor  # [slots, P] int32: of R, those that count; what lies behind is not read
    tiles: Tensor  # [tiles, 3] int32, as ``tiles_of`` makes them
    align: int  # a power of two that divides where they begin and end


class Config(NamedTuple):
    """How the work is divided; the result depends on ``chunk`` alone."""

    tokens: int  # rows per program: a power of two, at least 16
    groups: int  # programs of shrink that share the slots
    share: int  # chunks per program of shrink; 0: all
    side: int  # slots that a program of expand multiplies at once: a power of two
    chunk: int = 1024  # inputs
    step: int = 128  # inputs per iteration, a divisor of ``chunk``
    stages: int = 4
    warps: int = 4


CHANNELS = 64  # outputs of a program of expand


def tiles_of(outputs: list[int]) -> list[list[int]]:
    """Of each tile the matrix, its first channel and the end of the matrix's. outputs: of each
    matrix; they lie side by side."""
    found, first = [], 0
    for part, size in enumerate(outputs):
        end = first + size
        found += [[part, at, end] for at in range(first, end, CHANNELS)]
        first = end
    return found


def choose_config(n: int, slots: int) -> Config:
    """For Hopper; measured with benchmark/kernels/bench_adapters.py."""
    tokens, side = min(64, max(16, next_power_of_2(n))), next_power_of_2(slots)
    if n <= 64:
        return Config(tokens, min(slots, 8), 1, min(side, 8))
    return Config(tokens, 1, 1 if n <= 512 else 0, 1)


@triton.jit
def _rows(slots, n, TOKENS: tl.constexpr):
    """A tile of rows: their numbers, their slots, and the least and the largest of these."""
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    own = tl.load(slots + token, mask=token < n, other=-1).to(tl.int32)
    lowest = tl.min(tl.where(own < 0, 1 << 30, own))
    return token, own, lowest, tl.max(own)


# not specialized, so that all numbers of tokens share machine code
@triton.jit(do_not_specialize=["n", "share", "scale_stride"])
def _shrink_kernel(
    x,  # [n, columns], rows x_stride apart
    scale,  # [n] or one float32, of rows of x, read if SCALED
    slots,  # [n] int64
    down,  # [slots, PARTS, RANK, columns]
    ranks,  # [slots, PARTS]
    small,  # [splits, n, PARTS * RANK] float32
    n,
    share,  # chunks of a program
    columns,
    x_stride,
    scale_stride,
    SCALED: tl.constexpr,
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
    split, block = tl.program_id(0) // (PARTS * BLOCKS), tl.program_id(0) % (PARTS * BLOCKS)
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
                for chunk in range(split * share, (split + 1) * share):
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
    if SCALED:
        total *= tl.load(scale + token * scale_stride, mask=own >= 0, other=0.0)[None, :]
    if EARLY:
        previous_done(OVERLAP)
    here = (own >= 0) & ((own - lowest) % groups == group)
    to = small + (split * n + token)[None, :] * (PARTS * RANK) + (block * RANKS + rank)[:, None]
    tl.store(to, total, mask=here[None, :])


@triton.jit(do_not_specialize=["n"])
def _expand_kernel(
    y,  # [n, width], rows y_stride apart
    small,  # [SPLITS, n, PARTS * RANK] float32
    slots,  # [n] int64
    up,  # [slots, RANK, outputs]
    ranks,  # [slots, PARTS]
    tiles,  # [tiles, 3]
    n,
    outputs,
    y_stride,
    SPLITS: tl.constexpr,
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
                at = small + token[:, None] * (PARTS * RANK) + (part * RANK + first + rank)[None, :]
                given = tl.zeros([TOKENS, RANKS], tl.float32)
                for split in tl.static_range(SPLITS):
                    step = tl.cast(n, tl.int64) * split * (PARTS * RANK)
                    given += tl.load(at + step, mask=(own >= 0)[:, None], other=0.0)
                for s in tl.static_range(SIDE):
                    zeros = tl.zeros([TOKENS, CHANNELS], tl.float32)
                    made = split_dot(given, factors[s], zeros, PRECISION)
                    acc += tl.where((own == slot + s)[:, None], made, 0.0)
            tl.store(to, old.to(tl.float32) + acc, mask=keep)
    previous_done(OVERLAP)


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
        early: the kernel launched before this one did not write x or slots.
    """
    (n, columns), (count, parts, rank, _), device = x.shape, adapters.down.shape, x.device
    config = config or choose_config(n, count)
    chunks, rows = cdiv(columns, config.chunk), cdiv(n, config.tokens)
    share = config.share or chunks
    splits = cdiv(chunks, share)
    small = torch.empty(splits, n, parts * rank, dtype=torch.float32, device=device)
    common = {"PARTS": parts, "RANK": rank, "RANKS": RANKS, "TOKENS": config.tokens,
              "PRECISION": "ieee", "num_warps": config.warps, **overlapping(device)}  # fmt: skip
    _shrink_kernel[(splits * parts * (rank // RANKS), rows, config.groups)](
        x,
        x if scale is None else scale,
        slots,
        adapters.down,
        adapters.ranks,
        small,
        n,
        share,
        columns,
        x.stride(0),
        int(scale is not None and len(scale) > 1),
        SCALED=scale is not None,
        CHUNK=config.chunk,
        STEP=config.step,
        STAGES=config.stages,
        EARLY=early,
        **common,
    )
    _expand_kernel[(len(adapters.tiles), rows)](
        y,
        small,
        slots,
        adapters.up,
        adapters.ranks,
        adapters.tiles,
        n,
        adapters.up.shape[2],
        y.stride(0),
        SPLITS=splits,
        SIDE=config.side,
        CHANNELS=CHANNELS,
        ALIGN=adapters.align,
        **common,
    )
