"""top_log_probs in two launches: first blocks of the vocabulary, then their results.

For each block the first launch finds the largest logit, the sum of exponentials relative to it, and
the k best tokens, by k times taking out the largest key. The high half of a key is the logit, as an
integer that orders like the float; its low half ranks lower token ids first, so that no two keys
are equal. Logits are read once, in the dtype they have.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.top_log_probs.torch import MAX_TOP, TopTokens

BLOCK = 2048
LOW_HALF = tl.constexpr(0xFFFFFFFF)
NO_KEY = tl.constexpr(-(2**63))
NO_SHORT_KEY = tl.constexpr(-(2**31))


@triton.jit
def ranking_key(x, number):
    """int64 keys that order by float32 x and then by falling ``number`` (< 2**31)."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.to(tl.int64) << 32) | (number.to(tl.int64) ^ LOW_HALF)


@triton.jit
def short_key(x, place):
    """int32 keys that order by x, of 16 bits, and then by falling ``place`` (< 65535): a maximum
    of these takes a third of what one of ``ranking_key`` takes."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    bits = tl.where(bits == -0x8000, 0, bits)  # -0.0 is 0.0
    rising = bits ^ ((bits >> 15) & 0x7FFF)
    return (rising << 16) | (place ^ 0xFFFF)


@triton.jit
def widened_key(short, first, dtype: tl.constexpr):
    """The ``ranking_key`` of a short one. first: the number of place 0; dtype: of x."""
    rising = short >> 16
    bits = (rising ^ ((rising >> 15) & 0x7FFF)).to(tl.int16)
    number = first + ((short & 0xFFFF) ^ 0xFFFF)
    return ranking_key(bits.to(dtype, bitcast=True).to(tl.float32), number)


@triton.jit
def key_number(key):
    return (key & LOW_HALF) ^ LOW_HALF


@triton.jit
def key_value(key):
    rising = (key >> 32).to(tl.int32)
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["first"])
def _block_kernel(
    logits,  # [n, V], rows stride apart
    keys,  # [n, blocks, K]
    largest,  # [n, blocks] float32
    total,  # [n, blocks] float32: of exp(logit - largest)
    V,
    stride,
    first,  # the number of the first token
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    valid = token < V
    read = tl.load(logits + row * stride + token, mask=valid, other=float("-inf"))
    x = read.to(tl.float32)
    high = tl.max(x, 0)
    base = tl.where(high == float("-inf"), 0.0, high)
    at = row * tl.num_programs(0) + block
    tl.store(largest + at, high)
    tl.store(total + at, tl.sum(tl.exp(x - base), 0))
    SHORT: tl.constexpr = read.dtype.primitive_bitwidth == 16
    if SHORT:
        none = NO_SHORT_KEY
        key = tl.where(valid, short_key(read, tl.arange(0, BLOCK)), none)
    else:
        none = NO_KEY
        key = tl.where(valid, ranking_key(x, first + token), none)
    for rank in tl.static_range(K):
        best = tl.max(key, 0)
        if SHORT:
            wide = widened_key(best, first + block * BLOCK, read.dtype)
            tl.store(keys + at * K + rank, tl.where(best == none, NO_KEY, wide))
        else:
            tl.store(keys + at * K + rank, best)
        key = tl.where(key == best, none, key)


@triton.jit
def _merge_kernel(
    keys,  # [n, blocks, K]
    largest,  # [n, blocks]
    total,  # [n, blocks]
    values,  # [n, K]
    tokens,  # [n, K]
    blocks,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,  # padded
    KEYS: tl.constexpr,  # blocks·K, padded
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    known = block < blocks
    highs = tl.load(largest + row * blocks + block, mask=known, other=float("-inf"))
    sums = tl.load(total + row * blocks + block, mask=known, other=0.0)
    high = tl.max(highs, 0)
    log_total = tl.log(tl.sum(sums * tl.exp(highs - high), 0))
    place = tl.arange(0, KEYS)
    key = tl.load(keys + row * blocks * K + place, mask=place < blocks * K, other=NO_KEY)
    for rank in tl.static_range(K):
        best = tl.max(key, 0)
        tl.store(values + row * K + rank, key_value(best) - high - log_total)
        tl.store(tokens + row * K + rank, key_number(best))
        key = tl.where(key == best, NO_KEY, key)


class Blocks(NamedTuple):
    """What was found in the blocks of some rows."""

    keys: Tensor  # [n, blocks, k] int64, best first
    largest: Tensor  # [n, blocks] float32
    total: Tensor  # [n, blocks] float32: of exp(score - largest)

    @classmethod
    def empty(cls, n: int, blocks: int, k: int, device: torch.device) -> Blocks:
        keys = torch.empty(n, blocks, k, dtype=torch.int64, device=device)
        return cls(keys, *(torch.empty(n, blocks, device=device) for _ in range(2)))


def best_of_blocks(
    logits: Tensor, k: int, first: int = 0, block: int = BLOCK, warps: int = 4
) -> Blocks:
    """The first launch. first: the number of the first token, where these are a part of the
    vocabulary; a block with fewer than k tokens has keys that are none."""
    n, V = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    block = max(block, triton.next_power_of_2(k))
    found = Blocks.empty(n, triton.cdiv(V, block), k, logits.device)
    _block_kernel[(found.keys.shape[1], n)](
        logits, *found, V, logits.stride(0), first, K=k, BLOCK=block, num_warps=warps
    )
    return found


def top_log_probs(logits: Tensor, k: int, block: int = BLOCK, warps: int = 4) -> TopTokens:
    """As torch.py's top_log_probs; of equal logits the lower token id comes first.

    Args: logits: [n, V] bfloat16, float16 or float32, rows contiguous. block: a power of two.
    Raises: ValueError if k is not in 1 … 16, or above V.
    """
    n, V = logits.shape
    if not 1 <= k <= min(MAX_TOP, V):
        raise ValueError(f"k = {k}: must be between 1 and {MAX_TOP}, and at most the {V} tokens")
    blocks = best_of_blocks(logits, k, 0, block, warps)
    count, device = blocks.keys.shape[1], logits.device
    found = TopTokens(
        torch.empty(n, k, device=device), torch.empty(n, k, dtype=torch.int64, device=device)
    )
    _merge_kernel[(n,)](
        *blocks,
        *found,
        count,
        K=k,
        BLOCKS=triton.next_power_of_2(count),
        KEYS=triton.next_power_of_2(count * k),
        num_warps=1 if count * k <= 256 else 4,
    )
    return found
