"""Which experts process a token, and which tokens an expert has, on a GPU.

Logits are sums of a fixed number of column shares, added up in order, whatever the number of
tokens: so a token's experts do not depend on the batch that it is in.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.experts.torch import Choice, Routes
from mamba_eagle.kernels.float8.torch import E4M3, LARGEST, SMALLEST_SCALE, Rounding
from mamba_eagle.kernels.float8.triton import to_e4m3
from mamba_eagle.kernels.gpu import cdiv, next_power_of_2, overlapping
from mamba_eagle.kernels.staged import Staged
from mamba_eagle.kernels.triton_math import exact_dot, previous_done

SHARE = 256  # columns of the router's weight that are summed up by themselves
COLUMNS = 64  # per iteration
FEW_PAIRS = 512  # which leave many experts without any
MAX_PAIRS = 4096  # that a program sorts for each expert
CHUNK = 512  # pairs per program of more
_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_SCALE)
LOWEST = tl.constexpr(-3.0e38)  # below all scores
TAKEN = tl.constexpr(-(2**31))  # below all ranks


class Tile(NamedTuple):
    """What a program computes logits of."""

    experts: int
    tokens: int
    warps: int
    stages: int  # iterations in flight


# By the most tokens: a share per program. Beyond: all shares, of as many tokens as leave enough
# programs for a GPU, since then partial sums would be most of what is written and read.
TILES = {16: Tile(64, 16, 4, 4), 32: Tile(64, 32, 4, 4), 2048: Tile(64, 64, 4, 4)}
MANY, MANY_OF_FEW = Tile(128, 128, 8, 4), Tile(128, 64, 4, 4)  # experts: over 128, or not
SIZES = (1, *(tokens + 1 for tokens in TILES))  # numbers of tokens that together take every tile


@Staged
@triton.jit(do_not_specialize=["n"])
def _logits_kernel(
    x,  # [n, SIZE], rows x_stride apart
    weight,  # [NUM_EXPERTS, SIZE]
    beside,  # [BESIDE, SIZE], multiplied by the last programs; if SHARES > 1 by the first ones, too
    parts,  # [shares, n, NUM_EXPERTS + BESIDE] float32
    n,
    x_stride,
    SIZE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BESIDE: tl.constexpr,  # 0 or 1
    SHARE: tl.constexpr,
    SHARES: tl.constexpr,  # that a program adds up: one, or all, with those of ``beside``
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    share = tl.program_id(0)
    BOTH: tl.constexpr = SHARES > 1 and BESIDE > 0
    STEPS: tl.constexpr = SHARE // COLUMNS
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    rows, is_expert, is_token = weight, expert < NUM_EXPERTS, token < n
    row = expert
    if tl.program_id(1) * EXPERTS >= NUM_EXPERTS:  # all experts have programs
        rows, row = beside, tl.arange(0, EXPERTS)
        expert = NUM_EXPERTS + row
        is_expert = row < BESIDE
    acc, total = tl.zeros([EXPERTS, TOKENS], tl.float32), tl.zeros([EXPERTS, TOKENS], tl.float32)
    own, own_total = tl.zeros([TOKENS, 16], tl.float32), tl.zeros([TOKENS, 16], tl.float32)
    copy = tl.arange(0, 16)  # of the row of ``beside``: products have 16 columns
    previous_done(OVERLAP)
    for step in tl.range(0, SHARES * STEPS, num_stages=STAGES):
        column = share * SHARE + step * COLUMNS + tl.arange(0, COLUMNS)
        inside = (column < SIZE)[None, :]
        at = row[:, None] * SIZE + column[None, :]
        w = tl.load(rows + at, mask=is_expert[:, None] & inside, other=0.0)
        at = token.to(tl.int64)[:, None] * x_stride + column[None, :]
        t = tl.load(x + at, mask=is_token[:, None] & inside, other=0.0)
        if SHARES > 1:
            begins = step % STEPS == 0
            if begins:
                total += acc
                acc = tl.zeros([EXPERTS, TOKENS], tl.float32)
                if BOTH:
                    own_total += own
                    own = tl.zeros([TOKENS, 16], tl.float32)
        acc = exact_dot(w, tl.trans(t), acc, "tf32")
        if BOTH:
            b = tl.load(beside + 0 * copy[:, None] + column[None, :], mask=inside, other=0.0)
            own = exact_dot(t, tl.trans(b), own, "tf32")
    at = (share.to(tl.int64) * n + token) * (NUM_EXPERTS + BESIDE)
    mask = is_expert[:, None] & is_token[None, :]
    total = acc if SHARES == 1 else total + acc
    tl.store(parts + at[None, :] + expert[:, None], total, mask=mask)
    if BOTH:  # by the programs of the first experts
        mask = is_token[:, None] & (copy == 16 * tl.program_id(1))[None, :]
        tl.store(parts + at[:, None] + NUM_EXPERTS + 0 * copy[None, :], own_total + own, mask=mask)


@triton.jit(do_not_specialize=["n"])
def _route_kernel(
    parts,  # [SHARES, n, NUM_EXPERTS + BESIDE] float32
    bias,  # [NUM_EXPERTS], of sigmoid scores; None: of a softmax
    ids,  # [n, TOP_K] int32
    weights,  # [n, TOP_K] float32
    share_logits,  # [n] float32, written if BESIDE, else None
    n,
    scaling,
    NORMALIZE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BESIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,  # at least NUM_EXPERTS
    SLOTS: tl.constexpr,  # at least TOP_K
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    inside = expert < NUM_EXPERTS
    previous_done(OVERLAP)
    score = tl.zeros([BLOCK], tl.float32)
    for share in tl.static_range(SHARES):
        at = (share * n + token) * (NUM_EXPERTS + BESIDE) + expert
        score += tl.load(parts + at, mask=inside, other=0.0)
    if BESIDE > 0:
        logit = 0.0
        for share in tl.static_range(SHARES):
            logit += tl.load(parts + (share * n + token) * (NUM_EXPERTS + 1) + NUM_EXPERTS)
        tl.store(share_logits + token, logit)
    key = score
    if bias is not None:
        score = 1.0 / (1.0 + tl.exp(-score))
        key = score + tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    key = tl.where(key > LOWEST, key, LOWEST)  # NaN, too
    # whole numbers in the same order, of which a warp has instructions that find the largest
    bits = (key + 0.0).to(tl.int32, bitcast=True)  # no negative zero
    rank = tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), TAKEN)
    chosen = tl.zeros([SLOTS], tl.int32)
    for place in tl.range(0, TOP_K):
        best = tl.min(tl.where(rank == tl.max(rank, 0), expert, BLOCK), 0)
        chosen = tl.where(slot == place, best, chosen)
        rank = tl.where(expert == best, TAKEN, rank)
    found = tl.where(slot < TOP_K, tl.gather(score, chosen, 0), float("-inf"))
    if bias is not None:
        share = tl.where(slot < TOP_K, found, 0.0)
        if NORMALIZE:
            share = share / (tl.sum(share, 0) + 1e-20)
        share = share * scaling
    else:
        share = tl.exp(found - tl.max(found, 0))
        share = share / tl.sum(share, 0)
    at = token * TOP_K + slot
    tl.store(ids + at, chosen, mask=slot < TOP_K)
    tl.store(weights + at, share, mask=slot < TOP_K)


def route(
    hidden: Tensor,
    weight: Tensor,
    choice: Choice,
    ids: Tensor | None = None,
    beside: Tensor | None = None,
) -> Routes:
    """``torch.choose`` of the logits. hidden [n, size] and weight [E, size] of 16 bits. ids: [n, k]
    int32, where the experts are written. beside: [1, size], whose product is the routes' share."""
    (n, size), experts = hidden.shape, len(weight)
    device = hidden.device
    tile = next((tile for most, tile in TILES.items() if n <= most), None)
    many = tile is None
    tile = tile or (MANY_OF_FEW if experts <= MANY.experts else MANY)
    shares = cdiv(size, SHARE)
    summed, shares = (shares, 1) if many else (1, shares)
    extra = 0 if beside is None else 1
    tiles = cdiv(experts, tile.experts) + (0 if summed > 1 else extra)
    parts = torch.empty(shares, n, experts + extra, dtype=torch.float32, device=device)
    _logits_kernel[(shares, tiles, cdiv(n, tile.tokens))](
        *(hidden, weight, weight if beside is None else beside, parts, n, hidden.stride(0)),
        SIZE=size,
        NUM_EXPERTS=experts,
        BESIDE=extra,
        SHARE=SHARE,
        SHARES=summed,
        EXPERTS=tile.experts,
        TOKENS=tile.tokens,
        COLUMNS=COLUMNS,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **overlapping(hidden.device),
    )
    if ids is None:
        ids = torch.empty(n, choice.top_k, dtype=torch.int32, device=device)
    weights = torch.empty(n, choice.top_k, dtype=torch.float32, device=device)
    share = None if beside is None else torch.empty(n, 1, dtype=torch.float32, device=device)
    block = next_power_of_2(experts)
    _route_kernel[(n,)](
        *(parts, choice.bias, ids, weights, share, n, choice.scaling),
        NORMALIZE=choice.normalize,
        NUM_EXPERTS=experts,
        BESIDE=extra,
        TOP_K=choice.top_k,
        SHARES=shares,
        BLOCK=block,
        SLOTS=next_power_of_2(choice.top_k),
        num_warps=1,  # best that no warp waits for another
        **overlapping(hidden.device),
    )
    return Routes(ids, weights, share)


# ── pairs of a token and an expert, by expert ──


class Sorted(NamedTuple):
    """The pairs of n tokens and the k experts of each, those of an expert one after the other."""

    order: Tensor  # [n · k] int32, pairs as places in ids.flatten()
    ends: Tensor  # [E] int32, where each expert's pairs end
    # [1 + 3 E] int32: how many experts are listed, of few pairs those that have some, else all; of
    # each its index, begin and end
    table: Tensor
    back: Tensor  # [n · k] int32, where each pair is in ``order``
    largest: Tensor  # [n] float32, each token's largest size; arbitrary if not asked for
    rounded: Tensor  # [n, size] float8, inputs divided by what makes that size 448; likewise


@triton.jit(do_not_specialize=["pairs", "sorting"])
def _sort_kernel(
    ids,  # [pairs] int32
    x,  # [n, SIZE], read by programs after the first ``sorting``
    static,  # [1, 1], or None: scales are found
    counts,  # [chunks, COUNT] int32, each chunk's pairs by expert: the only result but what comes
    # of x. None: there is one chunk
    order,
    ends,
    table,
    back,
    largest,
    rounded,
    pairs,
    sorting,  # programs: of each expert, or of each chunk
    x_stride,
    COUNT: tl.constexpr,  # experts
    BINS: tl.constexpr,  # a power of two, larger than COUNT
    BLOCK: tl.constexpr,
    COMPACT: tl.constexpr,  # whether experts without pairs are left out of the table
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two, at least SIZE
    OVERLAP: tl.constexpr,
):
    own = tl.program_id(0)
    previous_done(OVERLAP)
    if own >= sorting:
        row, column = (own - sorting).to(tl.int64), tl.arange(0, PADDED)
        numbers = tl.load(x + row * x_stride + column, mask=column < SIZE, other=0.0)
        numbers = numbers.to(tl.float32)
        size = tl.max(tl.abs(numbers), 0)
        tl.store(largest + row, size)
        scale = tl.load(static) if static is not None else tl.maximum(size / _LARGEST, _SMALLEST)
        tl.store(rounded + row * SIZE + column, to_e4m3(numbers / scale), mask=column < SIZE)
    else:
        at, bins = tl.arange(0, BLOCK), tl.arange(0, BINS)
        if counts is not None:
            at += own * BLOCK
        expert = tl.load(ids + at, mask=at < pairs, other=COUNT)
        if counts is not None:
            tl.store(counts + own * COUNT + bins, tl.histogram(expert, BINS), mask=bins < COUNT)
        else:
            mine = (expert == own).to(tl.int32)
            start, count = tl.sum((expert < own).to(tl.int32), 0), tl.sum(mine, 0)
            active, place = COUNT, own
            if COMPACT:
                some = ((tl.histogram(expert, BINS) > 0) & (bins < COUNT)).to(tl.int32)
                active, place = tl.sum(some, 0), tl.sum(tl.where(bins < own, some, 0), 0)
            tl.store(ends + own, start + count)
            if own == 0:
                tl.store(table, active)
            if (count > 0) | (not COMPACT):
                entry = table + 1 + 3 * place
                tl.store(entry, own)
                tl.store(entry + 1, start)
                tl.store(entry + 2, start + count)
                to = start + tl.cumsum(mine, 0) - 1
                tl.store(order + to, at, mask=mine > 0)
                tl.store(back + at, to, mask=mine > 0)


@triton.jit(do_not_specialize=["pairs", "chunks"])
def _place_kernel(
    ids,
    counts,
    order,
    ends,
    table,
    back,
    pairs,
    chunks,
    COUNT: tl.constexpr,
    BINS: tl.constexpr,  # a power of two, at least COUNT
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The pairs of a chunk, after ``_sort_kernel`` has counted those of all."""
    own, bins, place = tl.program_id(0), tl.arange(0, BINS), tl.arange(0, BLOCK)
    inside = bins < COUNT
    totals, before = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
    previous_done(OVERLAP)
    for begin in tl.range(0, chunks, 64):
        chunk = begin + tl.arange(0, 64)
        known = (chunk < chunks)[:, None] & inside[None, :]
        count = tl.load(counts + chunk[:, None] * COUNT + bins[None, :], mask=known, other=0)
        totals += tl.sum(count, 0)
        before += tl.sum(tl.where((chunk < own)[:, None], count, 0), 0)
    if own == 0:
        end = tl.cumsum(totals, 0)
        tl.store(ends + bins, end, mask=inside)
        tl.store(table, COUNT)
        entry = table + 1 + 3 * bins
        tl.store(entry, bins, mask=inside)
        tl.store(entry + 1, end - totals, mask=inside)
        tl.store(entry + 2, end, mask=inside)
    at = own * BLOCK + place
    key = tl.sort(tl.load(ids + at, mask=at < pairs, other=COUNT) * BLOCK + place)
    # where an expert's pairs would begin if those of smaller ones in this chunk were not there
    others = totals - tl.load(counts + own * COUNT + bins, mask=inside, other=0)
    begin = tl.cumsum(others, 0) - others + before
    to = tl.gather(begin, tl.minimum(key // BLOCK, COUNT - 1), 0) + place
    at = own * BLOCK + key % BLOCK
    tl.store(order + to, at, mask=at < pairs)
    tl.store(back + at, to, mask=at < pairs)


def sort_pairs(
    ids: Tensor, count: int, x: Tensor | None = None, rounding: Rounding | None = None
) -> Sorted:
    """ids [n, k] int32, of ``count`` experts; x [n, size], which is to be rounded, without
    groups."""
    device, pairs, n = ids.device, ids.numel(), len(ids)
    size = 1 if x is None else x.shape[1]
    made = Sorted(
        torch.empty(pairs, dtype=torch.int32, device=device),
        torch.empty(count, dtype=torch.int32, device=device),
        torch.empty(1 + 3 * count, dtype=torch.int32, device=device),
        torch.empty(pairs, dtype=torch.int32, device=device),
        torch.empty(n, dtype=torch.float32, device=device),
        torch.empty(n, size, dtype=E4M3, device=device),
    )
    static = None if rounding is None else rounding.scale
    few, counts = pairs <= FEW_PAIRS, None
    block, sorting = FEW_PAIRS if few else MAX_PAIRS, count
    if pairs > MAX_PAIRS:
        block, sorting = CHUNK, cdiv(pairs, CHUNK)
        counts = torch.empty(sorting, count, dtype=torch.int32, device=device)
    _sort_kernel[(sorting + (0 if x is None else n),)](
        *(ids, ids if x is None else x, static, counts, *made),
        *(pairs, sorting, 0 if x is None else x.stride(0)),
        COUNT=count,
        BINS=next_power_of_2(count + 1),
        BLOCK=block,
        COMPACT=few,
        SIZE=size,
        PADDED=next_power_of_2(size),
        num_warps=4,
        **overlapping(device),
    )
    if counts is not None:
        _place_kernel[(sorting,)](
            *(ids, counts, *made[:4], pairs, sorting),
            COUNT=count,
            BINS=next_power_of_2(count),
            BLOCK=block,
            num_warps=4,
            **overlapping(device),
        )
    return made
