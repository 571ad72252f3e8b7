"""The same in two launches more than a whole vocabulary takes: one joins the blocks of a rank and
packs what it tells, one joins the ranks.

A part's numbers are those of torch.py, but where noise is added, scores are ``logit + temperature ·
noise`` as in top_noisy/triton.py, and totals are of differences divided by the temperature.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import next_power_of_2
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.kernels.top_log_probs.triton import LOW_HALF, NO_KEY, Blocks, key_number, key_value
from mamba_eagle.kernels.top_noisy.torch import NoiseKeys
from mamba_eagle.kernels.top_noisy.triton import sharpness_of


@triton.jit
def _row_sharpness(slots, temperatures, row, lanes, APART: tl.constexpr):
    if slots is None:
        return 1.0
    else:
        return sharpness_of(tl.load(temperatures + tl.load(slots + row // lanes) * APART))


@triton.jit(do_not_specialize=["lanes"], do_not_specialize_on_alignment=["slots"])
def _pack_kernel(
    slots,  # [b] or None
    temperatures,  # [R], APART from each other
    keys,  # [n, blocks, K]
    largest,  # [n, blocks] float32
    total,  # [n, blocks] float32
    out,  # [n, K + 1] int64
    blocks,
    lanes,
    APART: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,  # padded
    KEYS: tl.constexpr,  # blocks·K, padded
):
    row = tl.program_id(0).to(tl.int64)
    sharpness = _row_sharpness(slots, temperatures, row, lanes, APART)
    block = tl.arange(0, BLOCKS)
    known = block < blocks
    highs = tl.load(largest + row * blocks + block, mask=known, other=float("-inf"))
    sums = tl.load(total + row * blocks + block, mask=known, other=0.0)
    high = tl.max(highs, 0)
    base = tl.where(high == float("-inf"), 0.0, high)
    log_total = tl.log(tl.sum(sums * tl.exp((highs - base) * sharpness), 0))
    bits = high.to(tl.int32, bitcast=True).to(tl.int64) << 32
    bits = bits | (log_total.to(tl.int32, bitcast=True).to(tl.int64) & LOW_HALF)
    tl.store(out + row * (K + 1) + K, bits)
    place = tl.arange(0, KEYS)
    key = tl.load(keys + row * blocks * K + place, mask=place < blocks * K, other=NO_KEY)
    for rank in tl.static_range(K):
        best = tl.max(key, 0)
        tl.store(out + row * (K + 1) + rank, best)
        key = tl.where(key == best, NO_KEY, key)


@triton.jit(do_not_specialize=["n", "lanes"], do_not_specialize_on_alignment=["slots"])
def _merge_kernel(
    ids,  # [V'] int64, the target's tokens, or None
    slots,  # [b] or None
    temperatures,  # [R], APART from each other
    parts,  # [ranks, n, K + 1] int64
    values,  # [n, K], out
    tokens,  # [n, K], out
    n,
    ranks,
    lanes,
    APART: tl.constexpr,
    K: tl.constexpr,
    RANKS: tl.constexpr,  # padded
    KEYS: tl.constexpr,  # ranks·K, padded
):
    row = tl.program_id(0).to(tl.int64)
    sharpness = _row_sharpness(slots, temperatures, row, lanes, APART)
    rank = tl.arange(0, RANKS)
    known = rank < ranks
    last = tl.load(parts + (rank * n + row) * (K + 1) + K, mask=known, other=0)
    highs = (last >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    highs = tl.where(known, highs, float("-inf"))
    logs = (last & LOW_HALF).to(tl.int32).to(tl.float32, bitcast=True)
    high = tl.max(highs, 0)
    base = tl.where(high == float("-inf"), 0.0, high)
    log_total = tl.log(tl.sum(tl.exp((highs - base) * sharpness + logs), 0))
    place = tl.arange(0, KEYS)
    at = (place // K * n + row) * (K + 1) + place % K
    key = tl.load(parts + at, mask=place < ranks * K, other=NO_KEY)
    for number in tl.static_range(K):
        best = tl.max(key, 0)
        token = key_number(best)
        if ids is not None:
            token = tl.load(ids + token)
        tl.store(values + row * K + number, (key_value(best) - base) * sharpness - log_total)
        tl.store(tokens + row * K + number, token)
        key = tl.where(key == best, NO_KEY, key)


def packed(found: Blocks, noise: NoiseKeys | None, lanes: int) -> Tensor:
    """What a rank tells of b·lanes rows, from their blocks: -> [b·lanes, k + 1] int64."""
    n, blocks, k = found.keys.shape
    out = torch.empty(n, k + 1, dtype=torch.int64, device=found.keys.device)
    _pack_kernel[(n,)](
        None if noise is None else noise.slots.contiguous(),
        None if noise is None else noise.temperatures,
        *found,
        out,
        blocks,
        lanes,
        APART=0 if noise is None else noise.temperatures.stride(0),
        K=k,
        BLOCKS=next_power_of_2(blocks),
        KEYS=next_power_of_2(blocks * k),
        num_warps=1 if blocks * k <= 256 else 4,
    )
    return out


def merged(parts: Tensor, ids: Tensor | None, noise: NoiseKeys | None, lanes: int) -> TopTokens:
    """Of all ranks' packed rows [ranks, b·lanes, k + 1] -> [b, lanes, k]. ids: [V'] int64, the
    target's token of each; None: the same."""
    ranks, n, k = parts.shape[0], parts.shape[1], parts.shape[2] - 1
    shape, device = (n // lanes, lanes, k), parts.device
    found = TopTokens(
        torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int64, device=device)
    )
    _merge_kernel[(n,)](
        ids,
        None if noise is None else noise.slots.contiguous(),
        None if noise is None else noise.temperatures,
        parts.contiguous(),
        *found,
        n,
        ranks,
        lanes,
        APART=0 if noise is None else noise.temperatures.stride(0),
        K=k,
        RANKS=next_power_of_2(ranks),
        KEYS=next_power_of_2(ranks * k),
        num_warps=1,
    )
    return found
