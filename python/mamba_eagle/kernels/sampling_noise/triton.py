"""torch.py's noise in one pass: a kernel that reads two integers per row and writes [n, V]."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import cdiv, next_power_of_2
from mamba_eagle.kernels.sampling_noise import torch as noise

GAMMA = tl.constexpr(noise.GAMMA)
MULTIPLIER_1 = tl.constexpr(noise.MULTIPLIER_1)
MULTIPLIER_2 = tl.constexpr(noise.MULTIPLIER_2)
SHIFT = tl.constexpr(64 - noise.BITS)
SCALE = tl.constexpr(2.0**-noise.BITS)
LARGEST = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def _xor_shifted(x, shift):
    return x ^ (x.to(tl.uint64) >> shift).to(tl.int64)


@triton.jit
def _finalize(x):
    x = _xor_shifted(x, 30) * MULTIPLIER_1
    return _xor_shifted(x, 27) * MULTIPLIER_2


@triton.jit
def mixed(x):
    """SplitMix64's output that follows the state x, an int64."""
    return _xor_shifted(_finalize(x + GAMMA), 31)


@triton.jit
def row_key(seed, position):
    """The key of a row, from two int64 scalars."""
    return mixed(mixed(seed) ^ position)


@triton.jit
def token_bits(key, token):
    """int64 in [0, 2**31) for tokens (int32) of the row with this key."""
    x = _finalize(key + (token + 1).to(tl.int64) * GAMMA)
    return (x.to(tl.uint64) >> SHIFT).to(tl.int64)


@triton.jit
def gumbel_of(bits):
    """Noise from ``token_bits``, float32. The sampler's kernels add the same: not one operation of
    it may differ from one kernel to another."""
    complement = (bits.to(tl.float32) + 0.5) * SCALE  # 1 - u
    complement = tl.minimum(complement, LARGEST)
    # -log(1 - c) is imprecise for small c: there, its series
    tail = 1.0 / 3 + complement * 0.25
    series = complement * (1.0 + complement * (0.5 + complement * tail))
    exponential = tl.where(complement < 0.03, series, -tl.log(1.0 - complement))
    return -tl.log(exponential)


@triton.jit
def _gumbel_kernel(
    seed,  # [n] int64
    position,  # [n] int64
    out,  # [n, V] float32
    V,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = row_key(tl.load(seed + row), tl.load(position + row))
    bits = token_bits(key, column)
    tl.store(out + row * V + column, gumbel_of(bits), mask=column < V)


def gumbel(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """As torch.py's gumbel: seed, position [n] int64 -> [n, V] float32."""
    out = torch.empty(len(seed), vocab_size, dtype=torch.float32, device=seed.device)
    block = min(1024, next_power_of_2(vocab_size))
    grid = (len(seed), cdiv(vocab_size, block))
    _gumbel_kernel[grid](seed.contiguous(), position.contiguous(), out, vocab_size, BLOCK=block)
    return out
