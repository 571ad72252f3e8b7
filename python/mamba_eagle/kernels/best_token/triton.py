"""best_token in two launches, between which ranks exchange a few keys per row.

The first has a program for each block of a row; the keys of all blocks are exchanged, and the
second takes the largest of a row. Keys hold token ids, so ranks' blocks need not be the same ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.best_token import torch as definition
from mamba_eagle.kernels.best_token.torch import RowNoise
from mamba_eagle.kernels.sampling_noise.triton import gumbel_of, row_key, token_bits
from mamba_eagle.kernels.top_log_probs.triton import (
    NO_KEY,
    NO_SHORT_KEY,
    key_number,
    ranking_key,
    short_key,
    widened_key,
)
from mamba_eagle.kernels.triton_math import rounded_product

BLOCK = 4096
SHORT_BLOCK = 8192  # of scores of 16 bits
REFUSED = tl.constexpr(definition.REFUSED)
NOTHING = tl.constexpr(definition.NOTHING)
NO_TOKEN = tl.constexpr(definition.NO_TOKEN)
REFUSED_SHORT = tl.constexpr(2**31 - 1)

# views of larger tensors may begin anywhere, which is no reason for other machine code
ANY_PLACE = ["seeds", "positions", "temperatures"]


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=ANY_PLACE)
def _best_kernel(
    scores,  # [n, V], rows stride apart
    seeds,  # [n] int64, or None: no noise
    positions,  # [n] int64
    temperatures,  # [n] float32
    keys,  # [n, blocks] int64, out
    V,
    stride,
    first,  # the number of the first token
    BLOCK: tl.constexpr,
):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    number = block * BLOCK + tl.arange(0, BLOCK)
    valid = number < V
    score = tl.load(scores + row * stride + number, mask=valid, other=0.0)
    token = first + number
    if seeds is not None:
        key = row_key(tl.load(seeds + row), tl.load(positions + row))
        temperature = tl.load(temperatures + row)
        score = score + rounded_product(gumbel_of(token_bits(key, token)), temperature)
    refused = (score != score) | (score == float("inf"))
    rank = tl.where(refused, REFUSED, ranking_key(score, token))
    best = tl.max(tl.where(valid, rank, NO_KEY), 0)
    tl.store(keys + row * tl.num_programs(0) + block, best)


@triton.jit
def _token_kernel(keys, tokens, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    best = tl.max(tl.load(keys + row * blocks + block, mask=block < blocks, other=NO_KEY), 0)
    none = (best == REFUSED) | ((best >> 32) == NOTHING)
    tl.store(tokens + row, tl.where(none, NO_TOKEN, key_number(best)))


@triton.jit(do_not_specialize=["first"])
def _short_best_kernel(
    scores,  # [n, V] of 16 bits, rows stride apart
    keys,  # [n, blocks] int64, out
    V,
    stride,
    first,  # the number of the first token
    BLOCK: tl.constexpr,
):
    """As ``_best_kernel``, with keys that take a third of the time."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = tl.arange(0, BLOCK)
    valid = block * BLOCK + place < V
    at = scores + row * stride + block * BLOCK + place
    score = tl.load(at, mask=valid, other=float("-inf"))
    wide = score.to(tl.float32)
    refused = (wide != wide) | (wide == float("inf"))
    key = tl.where(refused, REFUSED_SHORT, short_key(score, place))
    best = tl.max(tl.where(valid, key, NO_SHORT_KEY), 0)
    wide_key = widened_key(best, first + block * BLOCK, score.dtype)
    wide_key = tl.where(best == REFUSED_SHORT, REFUSED, wide_key)
    tl.store(keys + row * tl.num_programs(0) + block, wide_key)


def best_keys(
    scores: Tensor, first: int, width: int, noise: RowNoise | None, block: int = BLOCK
) -> Tensor:
    """The largest key of each block of a row: scores [n, own V] of the tokens from ``first`` on ->
    [n, blocks] int64. width: the largest own V of any rank: all have as many blocks. Scores to
    which noise is added are float32."""
    if noise is None and scores.dtype.itemsize == 2:
        return short_best_keys(scores, first, width)
    n, V = scores.shape
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    keys = torch.empty(n, triton.cdiv(width, block), dtype=torch.int64, device=scores.device)
    _best_kernel[(keys.shape[1], n)](
        scores,
        None if noise is None else noise.seeds.contiguous(),
        None if noise is None else noise.positions.contiguous(),
        None if noise is None else noise.temperatures.contiguous(),
        keys,
        V,
        scores.stride(0),
        first,
        BLOCK=block,
        num_warps=8,
    )
    return keys


def short_best_keys(
    scores: Tensor, first: int, width: int, block: int = SHORT_BLOCK, warps: int = 8
) -> Tensor:
    n, V = scores.shape
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    keys = torch.empty(n, triton.cdiv(width, block), dtype=torch.int64, device=scores.device)
    _short_best_kernel[(keys.shape[1], n)](
        scores, keys, V, scores.stride(0), first, BLOCK=block, num_warps=warps
    )
    return keys


def best_of(scores: Tensor) -> Tensor:
    """The best token where all scores are on one rank: [..., V] -> [...] int64, as torch.py's."""
    keys = best_keys(scores.flatten(0, -2), 0, scores.shape[-1], None)
    return best_tokens(keys).view(scores.shape[:-1])


def best_tokens(keys: Tensor) -> Tensor:
    """[n, blocks] int64 -> [n] int64."""
    n, blocks = keys.shape
    tokens = torch.empty(n, dtype=torch.int64, device=keys.device)
    _token_kernel[(n,)](keys, tokens, blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=1)
    return tokens
