"""naive.py for whole states. Equal bit for bit on all devices and in all forms."""

import torch
from torch import Tensor

from mamba_eagle.kernels.sampling_noise.torch import mixed, row_keys

DOMAIN = 0x53544154
MULTIPLIER_1, MULTIPLIER_2 = 0x7FEB352D, 0x846CA68B
LOW_HALF = 2**32 - 1
SMALLEST_NORMAL = 2.0**-14  # of float16
LARGEST = 65504.0
DTYPES = (torch.float16, torch.bfloat16)

token_keys = row_keys  # of a seed and the number of tokens that a state has seen


def state_keys(tokens: Tensor, layer: int) -> Tensor:
    """tokens: [n] int64, from ``token_keys`` -> [n] int64, for one layer."""
    return mixed(tokens ^ (DOMAIN + layer))


def random_bits(keys: Tensor, size: int) -> Tensor:
    """Uniform in [0, 2**16), for the places 0 … size - 1: keys [n] -> [n, size] int64."""
    low, high = (keys & LOW_HALF)[:, None], ((keys >> 32) & LOW_HALF)[:, None]
    x = torch.arange(size, device=keys.device) ^ low
    x = (x ^ (x >> 16)).mul_(MULTIPLIER_1).bitwise_and_(LOW_HALF)
    x = (x ^ (x >> 15)).bitwise_xor_(high)
    return x.mul_(MULTIPLIER_2).bitwise_and_(LOW_HALF).bitwise_right_shift_(16)


def round_states(states: Tensor, tokens: Tensor, layer: int, dtype: torch.dtype) -> Tensor:
    """Stochastically rounded states of one layer.

    Args:
        states: [n, …] float32, contiguous; a number's place is its index in [n]'s element.
        tokens: [n] int64, from ``token_keys``; dtype: float16 or bfloat16.
    Returns: [n, …] of ``dtype``. float16 ends at ±65504; infinities become that. NaN stays NaN.
    """
    flat = states.float().flatten(1).contiguous()
    bits = random_bits(state_keys(tokens, layer), flat.shape[1]).int()
    if dtype == torch.bfloat16:
        rounded = (flat.view(torch.int32) + bits).bitwise_and_(-65536).view(torch.float32)
    else:
        size = flat.abs()
        # in this range float32 numbers that float16 has are multiples of 2**13 as integers
        lift = (size < SMALLEST_NORMAL).float() * SMALLEST_NORMAL
        number = (size + lift).view(torch.int32) + (bits >> 3)
        rounded = number.bitwise_and_(-8192).view(torch.float32) - lift
        rounded = rounded.clamp_(max=LARGEST).copysign_(flat)
    return torch.where(flat.isnan(), flat, rounded).to(dtype).view(states.shape)
