"""The best tokens of a vocabulary in parts, as torch.py packs them: with noise (top_noisy) or none.

A launch finds what each block of a rank's tokens tells. Another joins blocks or ranks: to the best
tokens of all, or to what a rank tells the others.

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
    LOW_HALF,
    NO_KEY,
    key_number,
    key_value,
    ranking_key,
)
from mamba_eagle.kernels.top_noisy import torch as definition
from mamba_eagle.kernels.top_noisy.torch import NoiseKeys
from mamba_eagle.kernels.triton_math import rounded_product

BLOCK = 2048  # tokens
COLDEST = tl.constexpr(definition.COLDEST)
ONE_WAVE = 512  # programs that run at once on a large GPU

# views of larger tensors may start at any offset: kernels do not specialize on alignment
ANY_PLACE = ["slots", "positions"]


@triton.jit
def _sharpness(temperature):
    """By what differences of scores are multiplied before exp."""
    return tl.where(temperature > 0.0, 1.0 / tl.maximum(temperature, COLDEST), 1.0)


@triton.jit
def _total(high, log_total):
    """What stands after the keys."""
    bits = high.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return bits | (log_total.to(tl.int32, bitcast=True).to(tl.int64) & LOW_HALF)


@triton.jit(do_not_specialize=["lanes", "first"], do_not_specialize_on_alignment=ANY_PLACE)
def _block_kernel(
    logits,  # [b·lanes, V], rows stride apart
    ids,  # [V] int64, the target's tokens, or None
    slots,  # [b], or None: no noise
    positions,  # [b]
    temperatures,  # [R], APART from each other
    seeds,  # [R], SEEDS_APART
    parts,  # [b·lanes, blocks, K + 1] int64, out
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
    number = block * BLOCK + tl.arange(0, BLOCK)
    valid = number < V
    if slots is not None:
        slot = tl.load(slots + request)
        temperature = tl.load(temperatures + slot * APART)
        sharpness = _sharpness(temperature)
        token = first + number
        if ids is not None:
            token = tl.load(ids + number, mask=valid, other=0).to(tl.int32)
        noise_key = row_key(tl.load(seeds + slot * SEEDS_APART), tl.load(positions + request))
        noise = rounded_product(gumbel_of(token_bits(noise_key, token)), temperature)
    for lane in range(tl.program_id(2), lanes, tl.num_programs(2)):
        row = request * lanes + lane
        x = tl.load(logits + row * stride + number, mask=valid, other=float("-inf"))
        score = x.to(tl.float32)
        if slots is not None:
            score += noise
        high = tl.max(score, 0)
        gap = score - tl.where(high == float("-inf"), 0.0, high)
        if slots is not None:
            gap *= sharpness
        at = parts + (row * tl.num_programs(0) + block) * (K + 1)
        tl.store(at + K, _total(high, tl.log(tl.sum(tl.exp(gap), 0))))
        key = tl.where(valid, ranking_key(score, first + number), NO_KEY)
        for rank in tl.static_range(K):
            best = tl.max(key, 0)
            tl.store(at + rank, best)
            key = tl.where(key == best, NO_KEY, key)


@triton.jit(
    do_not_specialize=["count", "lanes", "row_stride", "part_stride"],
    do_not_specialize_on_alignment=["slots"],
)
def _join_kernel(
    parts,  # parts of n rows with K + 1 numbers each, int64
    ids,  # [V'] int64, the target's tokens, or None
    slots,  # [b], or None: no noise
    temperatures,  # [R], APART from each other
    packed,  # [n, K + 1] int64, out, or None
    values,  # [n, K], out if not packed
    tokens,  # [n, K], out if not packed
    count,  # of the parts
    lanes,
    row_stride,
    part_stride,
    APART: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,  # padded
    KEYS: tl.constexpr,  # count·K, padded
):
    row = tl.program_id(0).to(tl.int64)
    sharpness = 1.0
    if slots is not None:
        sharpness = _sharpness(tl.load(temperatures + tl.load(slots + row // lanes) * APART))
    parts += row * row_stride
    part = tl.arange(0, PARTS)
    known = part < count
    last = tl.load(parts + part * part_stride + K, mask=known, other=0)
    highs = (last >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    highs = tl.where(known, highs, float("-inf"))
    logs = (last & LOW_HALF).to(tl.int32).to(tl.float32, bitcast=True)
    high = tl.max(highs, 0)
    base = tl.where(high == float("-inf"), 0.0, high)
    log_total = tl.log(tl.sum(tl.exp((highs - base) * sharpness + logs), 0))
    if packed is not None:
        tl.store(packed + row * (K + 1) + K, _total(high, log_total))
    place = tl.arange(0, KEYS)
    at = parts + place // K * part_stride + place % K
    key = tl.load(at, mask=place < count * K, other=NO_KEY)
    for rank in tl.static_range(K):
        best = tl.max(key, 0)
        if packed is not None:
            tl.store(packed + row * (K + 1) + rank, best)
        else:
            token = key_number(best)
            if ids is not None:
                token = tl.load(ids + token)
            tl.store(values + row * K + rank, (key_value(best) - base) * sharpness - log_total)
            tl.store(tokens + row * K + rank, token)
        key = tl.where(key == best, NO_KEY, key)


def _of_blocks(
    logits: Tensor,
    first: int,
    ids: Tensor | None,
    noise: NoiseKeys | None,
    k: int,
    block: int,
    warps: int = 4,
) -> Tensor:
    """What each block tells: [b, lanes, V'] -> [b·lanes, blocks, k + 1] int64. A block with fewer
    than k tokens has keys that are none."""
    b, lanes, V = logits.shape
    flat = logits.flatten(0, 1)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    block = max(block, next_power_of_2(k))
    blocks = cdiv(V, block)
    parts = torch.empty(b * lanes, blocks, k + 1, dtype=torch.int64, device=logits.device)
    apart = lanes if b * lanes * blocks <= ONE_WAVE else 1
    added: tuple[Tensor | None, ...] = (None,) * 4
    if noise is not None:
        at = (noise.slots.contiguous(), noise.positions.contiguous())
        added = (*at, noise.temperatures, noise.seeds)
    _block_kernel[(blocks, b, apart)](
        *(flat, ids, *added, parts, V, flat.stride(0), lanes, first),
        APART=0 if noise is None else noise.temperatures.stride(0),
        SEEDS_APART=0 if noise is None else noise.seeds.stride(0),
        K=k,
        BLOCK=block,
        num_warps=warps,
    )
    return parts


def _joined(
    parts: Tensor,
    noise: NoiseKeys | None,
    lanes: int,
    ids: Tensor | None = None,
    packed: Tensor | None = None,
    found: TopTokens | None = None,
) -> None:
    """The parts [n, count, k + 1] int64 become one, in ``packed`` or ``found``."""
    n, count, k = parts.shape[0], parts.shape[1], parts.shape[2] - 1
    _join_kernel[(n,)](
        *(parts, ids, None if noise is None else noise.slots.contiguous()),
        None if noise is None else noise.temperatures,
        *(packed, *(found or (None, None)), count, lanes, parts.stride(0), parts.stride(1)),
        APART=0 if noise is None else noise.temperatures.stride(0),
        K=k,
        PARTS=next_power_of_2(count),
        KEYS=next_power_of_2(count * k),
        num_warps=1 if count * k <= 256 else 4,
    )


def _empty(lanes: int, k: int, n: int, device: torch.device) -> TopTokens:
    shape = (n // lanes, lanes, k)
    log_probs = torch.empty(shape, device=device)
    return TopTokens(log_probs, torch.empty(shape, dtype=torch.int64, device=device))


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
    parts = _of_blocks(logits, 0, ids, noise, k, block, warps)
    found = _empty(lanes, k, b * lanes, logits.device)
    _joined(parts, noise, lanes, ids, found=found)
    return found


def packed(
    logits: Tensor,
    first: int,
    ids: Tensor | None,
    noise: NoiseKeys | None,
    k: int,
    block: int = BLOCK,
) -> Tensor:
    """What a rank tells of its part of the vocabulary: [b, lanes, own V'] -> [b·lanes, k + 1]
    int64. first: the number of its first token; ids: of its own alone."""
    parts = _of_blocks(logits, first, ids, noise, k, block)
    out = torch.empty(len(parts), k + 1, dtype=torch.int64, device=parts.device)
    _joined(parts, noise, logits.shape[1], packed=out)
    return out


def merged(parts: Tensor, ids: Tensor | None, noise: NoiseKeys | None, lanes: int) -> TopTokens:
    """Of all ranks' packed rows [ranks, b·lanes, k + 1] -> [b, lanes, k]. ids: [V'] int64, the
    target's token of each; None: the same."""
    _, n, numbers = parts.shape
    found = _empty(lanes, numbers - 1, n, parts.device)
    _joined(parts.contiguous().transpose(0, 1), noise, lanes, ids, found=found)
    return found
