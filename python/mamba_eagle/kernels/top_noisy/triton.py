"""top_noisy in two launches, as top_log_probs/triton.py finds the best tokens without noise.

The noise is made where the logits are read, and is the same in all lanes of a request: where blocks
and requests alone fill the device, one program takes a block for all lanes.

Scores are ``logit + temperature · noise``, rounded as the sampler's kernels round them, and divided
by the temperature only as differences from the best. So a drafter with the target's logits ranks
tokens as the target does, at any temperature.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import cdiv, next_power_of_2
from mamba_eagle.kernels.sampling_noise.triton import gumbel_of, row_key, token_bits
from mamba_eagle.kernels.top_log_probs.torch import MAX_TOP, TopTokens
from mamba_eagle.kernels.top_log_probs.triton import (
    BLOCK,
    NO_KEY,
    Blocks,
    key_number,
    key_value,
    ranking_key,
)
from mamba_eagle.kernels.top_noisy import torch as definition
from mamba_eagle.kernels.top_noisy.torch import NoiseKeys
from mamba_eagle.kernels.triton_math import rounded_product

COLDEST = tl.constexpr(definition.COLDEST)
ONE_WAVE = 512  # programs that run at once on a large GPU

# views of larger tensors may start at any offset: kernels do not specialize on alignment
ANY_PLACE = ["slots", "positions"]


@triton.jit
def sharpness_of(temperature):
    """By what differences of scores are multiplied before exp."""
    return tl.where(temperature > 0.0, 1.0 / tl.maximum(temperature, COLDEST), 1.0)


@triton.jit(do_not_specialize=["lanes", "first"], do_not_specialize_on_alignment=ANY_PLACE)
def _block_kernel(
    logits,  # [b·lanes, V], rows stride apart
    ids,  # [V] int64, the target's tokens, or None
    slots,  # [b]
    positions,  # [b]
    temperatures,  # [R], APART from each other
    seeds,  # [R], SEEDS_APART
    keys,  # [b·lanes, blocks, K], out
    largest,  # [b·lanes, blocks] float32, out
    total,  # [b·lanes, blocks] float32, out: of exp((score - largest) / temperature)
    V,
    stride,
    lanes,
    first,  # the number of the first token
    APART: tl.constexpr,
    SEEDS_APART: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + request)
    temperature = tl.load(temperatures + slot * APART)
    sharpness = sharpness_of(temperature)
    number = block * BLOCK + tl.arange(0, BLOCK)
    valid = number < V
    token = first + number
    if ids is not None:
        token = tl.load(ids + number, mask=valid, other=0).to(tl.int32)
    noise_key = row_key(tl.load(seeds + slot * SEEDS_APART), tl.load(positions + request))
    noise = rounded_product(gumbel_of(token_bits(noise_key, token)), temperature)
    for lane in range(tl.program_id(2), lanes, tl.num_programs(2)):
        row = request * lanes + lane
        x = tl.load(logits + row * stride + number, mask=valid, other=float("-inf"))
        score = x.to(tl.float32) + noise
        high = tl.max(score, 0)
        base = tl.where(high == float("-inf"), 0.0, high)
        at = row * tl.num_programs(0) + block
        tl.store(largest + at, high)
        tl.store(total + at, tl.sum(tl.exp((score - base) * sharpness), 0))
        key = tl.where(valid, ranking_key(score, first + number), NO_KEY)
        for rank in tl.static_range(K):
            best = tl.max(key, 0)
            tl.store(keys + at * K + rank, best)
            key = tl.where(key == best, NO_KEY, key)


@triton.jit(do_not_specialize=["lanes"], do_not_specialize_on_alignment=["slots"])
def _merge_kernel(
    ids,
    slots,
    temperatures,
    keys,
    largest,
    total,
    values,  # [b·lanes, K], out
    tokens,  # [b·lanes, K], out
    blocks,
    lanes,
    APART: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,  # padded
    KEYS: tl.constexpr,  # blocks·K, padded
):
    row = tl.program_id(0).to(tl.int64)
    sharpness = sharpness_of(tl.load(temperatures + tl.load(slots + row // lanes) * APART))
    block = tl.arange(0, BLOCKS)
    known = block < blocks
    highs = tl.load(largest + row * blocks + block, mask=known, other=float("-inf"))
    sums = tl.load(total + row * blocks + block, mask=known, other=0.0)
    high = tl.max(highs, 0)
    log_total = tl.log(tl.sum(sums * tl.exp((highs - high) * sharpness), 0))
    place = tl.arange(0, KEYS)
    key = tl.load(keys + row * blocks * K + place, mask=place < blocks * K, other=NO_KEY)
    for rank in tl.static_range(K):
        best = tl.max(key, 0)
        token = key_number(best)
        if ids is not None:
            token = tl.load(ids + token)
        tl.store(values + row * K + rank, (key_value(best) - high) * sharpness - log_total)
        tl.store(tokens + row * K + rank, token)
        key = tl.where(key == best, NO_KEY, key)


def best_of_blocks(
    logits: Tensor,
    ids: Tensor | None,
    noise: NoiseKeys,
    k: int,
    first: int = 0,
    block: int = BLOCK,
    warps: int = 4,
) -> Blocks:
    """The first launch: logits [b, lanes, V'] -> of b·lanes rows. first: the number of the first
    token, where these are a part of the vocabulary; ids: of these alone."""
    b, lanes, V = logits.shape
    flat = logits.flatten(0, 1)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    n = b * lanes
    block = max(block, next_power_of_2(k))
    blocks = cdiv(V, block)
    found = Blocks.empty(n, blocks, k, logits.device)
    apart = lanes if n * blocks <= ONE_WAVE else 1
    _block_kernel[(blocks, b, apart)](
        flat,
        ids,
        noise.slots.contiguous(),
        noise.positions.contiguous(),
        noise.temperatures,
        noise.seeds,
        *found,
        V,
        flat.stride(0),
        lanes,
        first,
        APART=noise.temperatures.stride(0),
        SEEDS_APART=noise.seeds.stride(0),
        K=k,
        BLOCK=block,
        num_warps=warps,
    )
    return found


def top_noisy(
    logits: Tensor, ids: Tensor | None, noise: NoiseKeys, k: int, block: int = BLOCK, warps: int = 4
) -> TopTokens:
    """The k best guesses of each lane's sample, of equal scores the lower id first: [b, lanes, k].

    Args:
        logits: [b, lanes, V'] bfloat16, float16 or float32.
        ids: [V'] int64, the target's token of each; None: the same.
        block: a power of two.
    Raises: ValueError if k is not in 1 … 16, or above V'.
    """
    b, lanes, V = logits.shape
    if not 1 <= k <= min(MAX_TOP, V):
        raise ValueError(f"k = {k}: must be between 1 and {MAX_TOP}, and at most the {V} tokens")
    blocks = best_of_blocks(logits, ids, noise, k, 0, block, warps)
    count, device = blocks.keys.shape[1], logits.device
    found = TopTokens(
        torch.empty(b, lanes, k, device=device),
        torch.empty(b, lanes, k, dtype=torch.int64, device=device),
    )
    _merge_kernel[(b * lanes,)](
        ids,
        noise.slots.contiguous(),
        noise.temperatures,
        *blocks,
        *found,
        count,
        lanes,
        APART=noise.temperatures.stride(0),
        K=k,
        BLOCKS=next_power_of_2(count),
        KEYS=next_power_of_2(count * k),
        num_warps=1 if count * k <= 256 else 4,
    )
    return found
