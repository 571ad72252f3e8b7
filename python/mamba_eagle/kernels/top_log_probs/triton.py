"""top_log_probs in two launches.

The first reads the logits, in the dtype they have: the largest of each PART neighbouring tokens,
and for each block the sum of exponentials relative to its largest. The k best tokens are in the k
parts with the largest maxima (of equal ones the first parts), which the second launch reads again.
So the first takes few instructions per logit, and as long as its bytes.

The best are found by taking out the largest key k times. The high half of a key is the logit, as an
integer that orders like the float; its low half ranks lower token ids first, so that no two keys
are equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import cdiv, next_power_of_2, overlapping
from mamba_eagle.kernels.top_log_probs.torch import MAX_TOP, TopTokens
from mamba_eagle.kernels.triton_math import INTERPRETED, previous_done

PART = 256  # tokens, of which one maximum is kept
READ = 4096  # tokens of a program that finds maxima
LOW_HALF = tl.constexpr(0xFFFFFFFF)
NO_KEY = tl.constexpr(-(2**63))


@triton.jit
def ranking_key(x, number):
    """int64 keys that order by float32 x and then by falling ``number`` (< 2**31)."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.to(tl.int64) << 32) | (number.to(tl.int64) ^ LOW_HALF)


@triton.jit
def key_number(key):
    return (key & LOW_HALF) ^ LOW_HALF


@triton.jit
def key_value(key):
    rising = (key >> 32).to(tl.int32)
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _exp(x):
    """exp of float32 numbers; 0 where it is not a normal number."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [x * 1.4426950408889634],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _maxima_kernel(
    logits,  # [n, V], rows stride apart
    maxima,  # [n, parts] float32
    largest,  # [n, blocks] float32, or None, as total
    total,  # [n, blocks] float32: of exp(logit - largest)
    V,
    stride,
    parts,
    PART: tl.constexpr,
    PARTS: tl.constexpr,  # of a block
    NAN: tl.constexpr,  # a NaN counts as infinite; else there is none
    OVERLAP: tl.constexpr,
):
    """The largest logit of each part of a row; one program per block of PARTS parts."""
    previous_done(OVERLAP)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part = block * PARTS + tl.arange(0, PARTS)
    token = part[:, None] * PART + tl.arange(0, PART)[None, :]
    read = tl.load(logits + row * stride + token, mask=token < V, other=float("-inf"))
    x = read.to(tl.float32)
    if NAN:
        x = tl.where(x != x, float("inf"), x)
    highs = tl.max(x, 1)
    tl.store(maxima + row * parts + part, highs, mask=part < parts)
    if largest is not None:
        high = tl.max(highs, 0)
        base = tl.where(high == float("-inf"), 0.0, high)
        at = row * tl.num_programs(0) + block
        tl.store(largest + at, high)
        tl.store(total + at, tl.sum(tl.sum(_exp(x - base), 1), 0))


@triton.jit
def _merge_kernel(
    logits,  # [n, V], rows stride apart
    maxima,  # [n, parts]
    largest,  # [n, blocks]
    total,  # [n, blocks]
    values,  # [n, K]
    tokens,  # [n, K]
    V,
    stride,
    parts,
    blocks,
    K: tl.constexpr,
    KP: tl.constexpr,  # K, padded
    PART: tl.constexpr,
    PARTS: tl.constexpr,  # parts, padded
    BLOCKS: tl.constexpr,  # padded
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    known = block < blocks
    highs = tl.load(largest + row * blocks + block, mask=known, other=float("-inf"))
    sums = tl.load(total + row * blocks + block, mask=known, other=0.0)
    high = tl.max(highs, 0)
    log_total = tl.log(tl.sum(sums * tl.exp(highs - high), 0))

    part = tl.arange(0, PARTS)
    best_of_part = tl.load(maxima + row * parts + part, mask=part < parts, other=float("-inf"))
    key = tl.where(part < parts, ranking_key(best_of_part, part), NO_KEY)
    rank = tl.arange(0, KP)
    chosen = tl.full([KP], -1, tl.int32)
    for number in tl.static_range(K):
        best = tl.max(key, 0)
        found = tl.where(best == NO_KEY, -1, key_number(best)).to(tl.int32)
        chosen = tl.where(rank == number, found, chosen)
        key = tl.where(key == best, NO_KEY, key)

    token = chosen[:, None] * PART + tl.arange(0, PART)[None, :]
    exists = (chosen >= 0)[:, None] & (token < V)
    x = tl.load(logits + row * stride + token, mask=exists, other=float("-inf"))
    keys = tl.where(exists, ranking_key(x.to(tl.float32), token), NO_KEY)
    for number in tl.static_range(K):
        best = tl.max(tl.max(keys, 1), 0)
        tl.store(values + row * K + number, key_value(best) - high - log_total)
        tl.store(tokens + row * K + number, key_number(best))
        keys = tl.where(keys == best, NO_KEY, keys)


def maxima_of(
    logits: Tensor,
    part: int,
    read: int,
    warps: int,
    nan: bool,
    largest: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """The largest logit of every ``part`` tokens: [n, V], numbers of a row contiguous -> [n, parts]
    float32.

    Args:
        read: tokens per program. nan: whether a NaN counts as infinite; else there must be none.
        largest, total: [n, blocks of ``read``] float32, written if given: the largest logit of each
            block, and the sum of exp(logit - largest).
    """
    (n, V) = logits.shape
    parts = cdiv(V, part)
    maxima = torch.empty(n, parts, device=logits.device)
    _maxima_kernel[(cdiv(V, read), n)](
        *(logits, maxima, largest, total, V, logits.stride(0), parts),
        PART=part,
        PARTS=read // part,
        NAN=nan,
        num_warps=warps,
        **overlapping(logits.device),
    )
    return maxima


def top_log_probs(
    logits: Tensor, k: int, part: int = PART, read: int = READ, warps: int = 4
) -> TopTokens:
    """As torch.py's top_log_probs; of equal logits the lower token id comes first.

    Args: logits: [n, V] bfloat16, float16 or float32, rows contiguous. part, read: tokens, powers
        of two.
    Raises: ValueError if k is not in 1 … 16, or above V.
    """
    n, V = logits.shape
    if not 1 <= k <= min(MAX_TOP, V):
        raise ValueError(f"k = {k}: must be between 1 and {MAX_TOP}, and at most the {V} tokens")
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    parts, blocks, device = cdiv(V, part), cdiv(V, read), logits.device
    largest, total = (torch.empty(n, blocks, device=device) for _ in range(2))
    found = TopTokens(
        torch.empty(n, k, device=device), torch.empty(n, k, dtype=torch.int64, device=device)
    )
    maxima = maxima_of(logits, part, read, warps, False, largest, total)
    _merge_kernel[(n,)](
        *(logits, maxima, largest, total, *found, V, logits.stride(0), parts, blocks),
        K=k,
        KP=next_power_of_2(k),
        PART=part,
        PARTS=next_power_of_2(parts),
        BLOCKS=next_power_of_2(blocks),
        num_warps=4,
        **overlapping(device),
    )
    return found
