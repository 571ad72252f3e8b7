"""best_token in two launches, between which ranks exchange a few keys per row.

The first has a program for each block of a row; the keys of all blocks are exchanged, and the
second takes the largest of a row. Keys hold token ids, so ranks' blocks need not be the same ones.

One rank alone needs no keys: the first launch finds the largest score of each part of a row, the
second the first place of the largest of all, in one part.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.best_token import torch as definition
from mamba_eagle.kernels.best_token.torch import RowNoise
from mamba_eagle.kernels.gpu import cdiv, next_power_of_2, overlapping
from mamba_eagle.kernels.sampling_noise.triton import gumbel_of, row_key, token_bits
from mamba_eagle.kernels.top_log_probs.triton import (
    NO_KEY,
    PART,
    READ,
    key_number,
    maxima_of,
    ranking_key,
)
from mamba_eagle.kernels.triton_math import previous_done, rounded_product

BLOCK = 4096
REFUSED = tl.constexpr(definition.REFUSED)
NOTHING = tl.constexpr(definition.NOTHING)
NO_TOKEN = tl.constexpr(definition.NO_TOKEN)

# views of larger tensors may start at any offset: kernels do not specialize on alignment
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
    score = tl.load(scores + row * stride + number, mask=valid, other=0.0).to(tl.float32)
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


def best_keys(scores: Tensor, first: int, width: int, noise: RowNoise | None) -> Tensor:
    """The largest key of each block of a row: scores [n, own V] of the tokens from ``first`` on ->
    [n, blocks] int64. width: the largest own V of any rank: all have as many blocks. Scores to
    which noise is added are float32."""
    n, V = scores.shape
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    keys = torch.empty(n, cdiv(width, BLOCK), dtype=torch.int64, device=scores.device)
    added: Sequence[Tensor | None] = (None,) * 3
    if noise is not None:
        added = [part.contiguous() for part in (noise.seeds, noise.positions, noise.temperatures)]
    _best_kernel[(keys.shape[1], n)](
        *(scores, *added, keys, V, scores.stride(0), first),
        BLOCK=BLOCK,
        num_warps=8,
    )
    return keys


def best_tokens(keys: Tensor) -> Tensor:
    """[n, blocks] int64 -> [n] int64."""
    n, blocks = keys.shape
    tokens = torch.empty(n, dtype=torch.int64, device=keys.device)
    _token_kernel[(n,)](keys, tokens, blocks, BLOCKS=next_power_of_2(blocks), num_warps=1)
    return tokens


@triton.jit
def _place_kernel(
    scores,  # [n, V], rows stride apart
    maxima,  # [n, parts] float32, of PART scores each
    tokens,  # [n] int64, out
    V,
    stride,
    parts,
    PART: tl.constexpr,
    PARTS: tl.constexpr,  # parts, padded
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    highs = tl.load(maxima + row * parts + part, mask=part < parts, other=float("-inf"))
    best = tl.max(highs, 0)
    first = tl.min(tl.where(highs == best, part, PARTS - 1), 0)
    token = first * PART + tl.arange(0, PART)
    score = tl.load(scores + row * stride + token, mask=token < V, other=float("-inf"))
    place = tl.min(tl.where(score.to(tl.float32) == best, token, V), 0)
    is_finite = tl.abs(best) < float("inf")
    tl.store(tokens + row, tl.where(is_finite, place, NO_TOKEN).to(tl.int64))


def best_of(scores: Tensor, part: int = PART, read: int = READ, warps: int = 4) -> Tensor:
    """The best token where all scores are on one rank: [..., V] -> [...] int64, as torch.py's."""
    flat = scores.flatten(0, -2)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    (n, V), device = flat.shape, flat.device
    parts = cdiv(V, part)
    maxima = maxima_of(flat, part, read, warps, True)
    tokens = torch.empty(n, dtype=torch.int64, device=device)
    _place_kernel[(n,)](
        *(flat, maxima, tokens, V, flat.stride(0), parts),
        PART=part,
        PARTS=next_power_of_2(parts),
        num_warps=4,
        **overlapping(flat.device),
    )
    return tokens.view(scores.shape[:-1])
