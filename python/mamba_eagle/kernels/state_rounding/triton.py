"""naive.py inside of kernels that write states: nothing but the key is read from memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import cdiv
from mamba_eagle.kernels.sampling_noise.triton import mixed
from mamba_eagle.kernels.state_rounding import torch as rounding

DOMAIN = tl.constexpr(rounding.DOMAIN)
MULTIPLIER_1 = tl.constexpr(rounding.MULTIPLIER_1)
MULTIPLIER_2 = tl.constexpr(rounding.MULTIPLIER_2)
SMALLEST_NORMAL = tl.constexpr(rounding.SMALLEST_NORMAL)
LARGEST = tl.constexpr(rounding.LARGEST)


@triton.jit
def round_state(values, tokens, layer, place, dtype: tl.constexpr):
    """values (float32) rounded stochastically to ``dtype``, float16 or bfloat16.

    Args: tokens: a scalar int64, from ``token_keys``; layer: int; place: of the numbers in the
        layer's state [H, P, N], shaped as ``values``.
    """
    key = mixed(tokens ^ (DOMAIN + layer)).to(tl.uint64)
    x = place.to(tl.uint32) ^ (key & 0xFFFFFFFF).to(tl.uint32)
    x = (x ^ (x >> 16)) * MULTIPLIER_1
    x = (x ^ (x >> 15)) ^ (key >> 32).to(tl.uint32)
    bits = ((x * MULTIPLIER_2) >> 16).to(tl.int32)
    if dtype == tl.bfloat16:
        cut = (values.to(tl.int32, bitcast=True) + bits) & -65536
        rounded = cut.to(tl.float32, bitcast=True)
    else:
        size = tl.abs(values)
        lift = tl.where(size < SMALLEST_NORMAL, SMALLEST_NORMAL, 0.0)
        cut = ((size + lift).to(tl.int32, bitcast=True) + (bits >> 3)) & -8192
        rounded = tl.minimum(cut.to(tl.float32, bitcast=True) - lift, LARGEST)
        rounded = tl.where(values < 0, -rounded, rounded)
    return tl.where(values == values, rounded, values).to(dtype)


@triton.jit
def _token_keys_kernel(
    seeds,  # [R] int64
    slots,  # [n] int64
    positions,  # [n] int64
    keys,  # [n] int64
    n,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    seed = tl.load(seeds + tl.load(slots + at, mask=inside, other=0))
    position = tl.load(positions + at, mask=inside, other=0)
    tl.store(keys + at, mixed(mixed(seed) ^ position), mask=inside)


def token_keys(seeds: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """As torch.py's, of ``seeds[slots]``: seeds [R], slots and positions [n], all int64 -> [n]."""
    keys = torch.empty_like(slots)
    grid = (cdiv(len(slots), 64),)
    _token_keys_kernel[grid](seeds, slots, positions.contiguous(), keys, len(slots), BLOCK=64)
    return keys
