"""What the chunks of prompts under gated delta rules are made of, in one launch: queries and keys
divided by their norms, values, and decays summed up from each chunk's beginning."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import cdiv, next_power_of_2, overlapping
from mamba_eagle.kernels.triton_math import previous_done

BASE_2 = tl.constexpr(1.0 / math.log(2.0))


@triton.jit(do_not_specialize=["n"])
def _heads_kernel(
    convolved,  # [n, CHANNELS], rows convolved_stride apart: queries, keys, values
    gates,  # [n, 2 * H] float32: decays, betas
    starts,  # [chunks + 1] int32, the first token of each chunk
    heads,  # queries [n, KEYS], keys [n, KEYS], values [n, CHANNELS - 2 * KEYS]
    sums,  # [n, H] float32
    betas,  # [n, H] float32
    n,
    convolved_stride,
    eps,
    CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,  # H, padded
    OVERLAP: tl.constexpr,
):
    """N channels of a chunk's tokens; or, of the last program, its gates."""
    begin, end = tl.load(starts + tl.program_id(0)), tl.load(starts + tl.program_id(0) + 1)
    token = begin + tl.arange(0, CHUNK)
    exists, token = (token < end)[:, None], token.to(tl.int64)[:, None]
    first = tl.program_id(1) * N
    previous_done(OVERLAP)
    if first < CHANNELS:
        channel = first + tl.arange(0, N)[None, :]
        within = exists & (channel < CHANNELS)
        x = tl.load(convolved + token * convolved_stride + channel, mask=within, other=0.0)
        if first < 2 * KEYS:
            wide = x.to(tl.float32)
            x = (wide * tl.rsqrt(tl.sum(wide * wide, 1) + eps)[:, None]).to(x.dtype)
        part = tl.minimum(first // KEYS, 2)
        width = tl.where(part < 2, KEYS, CHANNELS - 2 * KEYS)
        at = heads + part.to(tl.int64) * n * KEYS + token * width + channel - part * KEYS
        tl.store(at, x, mask=within)
    else:
        head = tl.arange(0, HEADS)[None, :]
        inside = exists & (head < H)
        own = gates + token * 2 * H + head
        decay = tl.load(own, mask=inside, other=0.0)
        tl.store(betas + token * H + head, tl.load(own + H, mask=inside), mask=inside)
        tl.store(sums + token * H + head, tl.cumsum(decay, 0) * BASE_2, mask=inside)


class ChunkInputs(NamedTuple):
    """Contiguous; the first three of the model's dtype."""

    q: Tensor  # [n, G, N]
    k: Tensor  # [n, G, N]
    v: Tensor  # [n, H, P]
    g: Tensor  # [n, H] float32, base 2, the sum from the beginning of the token's chunk
    beta: Tensor  # [n, H] float32


def chunk_inputs(
    convolved: Tensor,
    gates: Tensor,
    starts: Tensor,
    chunk: int,
    keys: tuple[int, int],
    eps: float,
) -> ChunkInputs:
    """
    Args:
        convolved: [n, 2·G·N + H·P], queries, keys and values; the last dimension contiguous.
        gates: [n, 2·H] float32, contiguous, decays and betas.
        starts: [chunks + 1] int32, the first token of each chunk, at most ``chunk`` a power of two.
        keys: G and N, a power of two.
        eps: added to squared norms.
    """
    (n, channels), (groups, size), num_heads = convolved.shape, keys, gates.shape[1] // 2
    all_keys = groups * size
    heads = torch.empty(n * channels, dtype=convolved.dtype, device=convolved.device)
    sums, betas = torch.empty(2, n, num_heads, device=convolved.device)
    _heads_kernel[(len(starts) - 1, cdiv(channels, size) + 1)](
        *(convolved, gates, starts, heads, sums, betas, n, convolved.stride(0), eps),
        CHANNELS=channels,
        KEYS=all_keys,
        N=size,
        H=num_heads,
        CHUNK=chunk,
        HEADS=next_power_of_2(num_heads),
        num_warps=4,
        **overlapping(convolved.device),
    )
    q, k, v = heads.split([n * all_keys, n * all_keys, n * (channels - 2 * all_keys)])
    q, k = q.view(n, groups, size), k.view(n, groups, size)
    return ChunkInputs(q, k, v.view(n, num_heads, -1), sums, betas)
