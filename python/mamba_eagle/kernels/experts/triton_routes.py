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
from mamba_eagle.kernels.triton_math import exact_dot, previous_done

SHARE = 256  # columns of the router's weight per program
COLUMNS = 64  # per iteration
EXPERTS = 64  # per program
MAX_TOKENS = 64  # per program
FEW_PAIRS = 512  # which leave many experts without any
_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_SCALE)
LOWEST = tl.constexpr(-3.0e38)  # below all scores, above those that were taken


@triton.jit(do_not_specialize=["n"])
def _logits_kernel(
    x,  # [n, SIZE], rows x_stride apart
    weight,  # [NUM_EXPERTS, SIZE]
    beside,  # [BESIDE, SIZE], multiplied by the last programs
    parts,  # [shares, n, NUM_EXPERTS + BESIDE] float32
    n,
    x_stride,
    SIZE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BESIDE: tl.constexpr,  # 0 or 1
    SHARE: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    share = tl.program_id(0)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    rows, is_expert, is_token = weight, expert < NUM_EXPERTS, token < n
    row = expert
    if tl.program_id(1) * EXPERTS >= NUM_EXPERTS:  # all experts have programs
        rows, row = beside, tl.arange(0, EXPERTS)
        expert = NUM_EXPERTS + row
        is_expert = row < BESIDE
    acc = tl.zeros([EXPERTS, TOKENS], tl.float32)
    previous_done(OVERLAP)
    for step in tl.range(0, SHARE // COLUMNS, num_stages=SHARE // COLUMNS):
        column = share * SHARE + step * COLUMNS + tl.arange(0, COLUMNS)
        inside = (column < SIZE)[None, :]
        at = row[:, None] * SIZE + column[None, :]
        w = tl.load(rows + at, mask=is_expert[:, None] & inside, other=0.0)
        at = token.to(tl.int64)[:, None] * x_stride + column[None, :]
        t = tl.load(x + at, mask=is_token[:, None] & inside, other=0.0)
        acc = exact_dot(w, tl.trans(t), acc, "tf32")
    at = (share.to(tl.int64) * n + token)[None, :] * (NUM_EXPERTS + BESIDE) + expert[:, None]
    tl.store(parts + at, acc, mask=is_expert[:, None] & is_token[None, :])


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
    key = tl.where(inside, key, float("-inf"))
    chosen = tl.zeros([SLOTS], tl.int32)
    found = tl.full([SLOTS], float("-inf"), tl.float32)
    for place in tl.range(0, TOP_K):
        best = tl.argmax(key, 0, tie_break_left=True)
        own = tl.sum(tl.where(expert == best, score, 0.0), 0)
        chosen = tl.where(slot == place, best, chosen)
        found = tl.where(slot == place, own, found)
        key = tl.where(expert == best, float("-inf"), key)
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
    shares = cdiv(size, SHARE)
    extra = 0 if beside is None else 1
    parts = torch.empty(shares, n, experts + extra, dtype=torch.float32, device=device)
    tokens = min(MAX_TOKENS, max(16, next_power_of_2(n)))
    _logits_kernel[(shares, cdiv(experts, EXPERTS) + extra, cdiv(n, tokens))](
        hidden,
        weight,
        weight if beside is None else beside,
        parts,
        n,
        hidden.stride(0),
        SIZE=size,
        NUM_EXPERTS=experts,
        BESIDE=extra,
        SHARE=SHARE,
        EXPERTS=EXPERTS,
        TOKENS=tokens,
        COLUMNS=COLUMNS,
        num_warps=4,
        **overlapping(hidden.device),
    )
    if ids is None:
        ids = torch.empty(n, choice.top_k, dtype=torch.int32, device=device)
    weights = torch.empty(n, choice.top_k, dtype=torch.float32, device=device)
    share = None if beside is None else torch.empty(n, 1, dtype=torch.float32, device=device)
    block = next_power_of_2(experts)
    _route_kernel[(n,)](
        parts,
        choice.bias,
        ids,
        weights,
        share,
        n,
        choice.scaling,
        NORMALIZE=choice.normalize,
        NUM_EXPERTS=experts,
        BESIDE=extra,
        TOP_K=choice.top_k,
        SHARES=shares,
        BLOCK=block,
        SLOTS=next_power_of_2(choice.top_k),
        num_warps=max(1, block // 128),
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


@triton.jit(do_not_specialize=["pairs"])
def _sort_kernel(
    ids,  # [pairs] int32
    x,  # [n, SIZE], read by programs after the first COUNT
    static,  # [1, 1], or None: scales are found
    order,
    ends,
    table,
    back,
    largest,
    rounded,
    pairs,
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
    if own >= COUNT:
        column = tl.arange(0, PADDED)
        at = (own - COUNT).to(tl.int64) * x_stride + column
        numbers = tl.load(x + at, mask=column < SIZE, other=0.0).to(tl.float32)
        size = tl.max(tl.abs(numbers), 0)
        tl.store(largest + own - COUNT, size)
        scale = tl.load(static) if static is not None else tl.maximum(size / _LARGEST, _SMALLEST)
        at = (own - COUNT).to(tl.int64) * SIZE + column
        tl.store(rounded + at, to_e4m3(numbers / scale), mask=column < SIZE)
    else:
        if COMPACT:
            bins = tl.arange(0, BINS)
            counts = tl.zeros([BINS], tl.int32)
            for begin in tl.range(0, pairs, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                expert = tl.load(ids + at, mask=at < pairs, other=COUNT)
                counts += tl.histogram(expert, BINS)
            before, some = bins < own, (counts > 0) & (bins < COUNT)
            start = tl.sum(tl.where(before, counts, 0), 0)
            end = start + tl.sum(tl.where(bins == own, counts, 0), 0)
            active = tl.sum(some.to(tl.int32), 0)
            place = tl.sum((some & before).to(tl.int32), 0)
        else:
            smaller, equal = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
            for begin in tl.range(0, pairs, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                expert = tl.load(ids + at, mask=at < pairs, other=COUNT)
                smaller += (expert < own).to(tl.int32)
                equal += (expert == own).to(tl.int32)
            start = tl.sum(smaller, 0)
            end = start + tl.sum(equal, 0)
            active, place = COUNT, own
        tl.store(ends + own, end)
        if own == 0:
            tl.store(table, active)
        if (end > start) | (not COMPACT):
            entry = table + 1 + 3 * place
            tl.store(entry, own)
            tl.store(entry + 1, start)
            tl.store(entry + 2, end)
            for begin in tl.range(0, pairs, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                mine = tl.load(ids + at, mask=at < pairs, other=COUNT) == own
                rank = tl.cumsum(mine.to(tl.int32), 0)
                tl.store(order + start + rank - 1, at, mask=mine)
                tl.store(back + at, start + rank - 1, mask=mine)
                start += tl.sum(mine.to(tl.int32), 0)


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
    few = pairs <= FEW_PAIRS
    _sort_kernel[(count if x is None else count + len(x),)](
        ids,
        ids if x is None else x,
        static,
        *made,
        pairs,
        0 if x is None else x.stride(0),
        COUNT=count,
        BINS=next_power_of_2(count + 1),
        BLOCK=512 if few else 2048,
        COMPACT=few,
        SIZE=size,
        PADDED=next_power_of_2(size),
        num_warps=4,
        **overlapping(device),
    )
    return made
