"""torch.py's rounding as one pass on a CPU; the result is the same bit for bit.

Numba has no 16-bit floating-point types, so what is written are the integers that stand for them.
"""

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.kernels.state_rounding.torch import state_keys
from mamba_eagle.machine_code import kernel

_M1, _M2 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_15, _16, _3, _13 = np.uint32(15), np.uint32(16), np.uint32(3), np.uint32(13)
_SIGN, _BODY = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_NORMAL = np.uint32(113 << 23)  # 2**-14
_LARGEST = np.uint32(0x477FE000)  # 65504
_REBIAS = np.uint32(112 << 10)  # between the exponents of float32 and float16
_NAN16 = np.uint16(0x7E00)
_QUIET = np.uint32(0x00400000)


@kernel
def _bits(place, low, high):
    x = place ^ low
    x = np.uint32((x ^ (x >> _16)) * _M1)
    x = (x ^ (x >> _15)) ^ high
    return np.uint32(x * _M2) >> _16


@kernel
def _to_bfloat16(numbers, low, high, out):
    """numbers: [size] uint32, float32 numbers as integers -> out: [size] uint16."""
    for i in range(numbers.shape[0]):
        number = numbers[i]
        if (number & _BODY) > _INFINITY:
            out[i] = np.uint16((number | _QUIET) >> _16)
        else:
            out[i] = np.uint16(np.uint32(number + _bits(np.uint32(i), low, high)) >> _16)


@kernel
def _to_float16(numbers, sizes, lifted, low, high, out):
    """The same; sizes: [size] uint32, without signs; lifted: 2**-14 added to those below it."""
    for i in range(numbers.shape[0]):
        sign = np.uint32(numbers[i] & _SIGN) >> _16
        size = sizes[i]
        if size > _INFINITY:
            out[i] = _NAN16
            continue
        cut = np.uint32(lifted[i] + (_bits(np.uint32(i), low, high) >> _3)) >> _13
        if size < _NORMAL:
            # of 2**-14 … 2**-13, the last 10 bits count steps of 2**-24
            body = np.uint32(cut - (_NORMAL >> _13))
        else:
            largest = _LARGEST >> _13
            body = np.uint32(min(cut, largest) - _REBIAS)
        out[i] = np.uint16(sign | body)


def round_states(states: Tensor, tokens: Tensor, layer: int, dtype: torch.dtype) -> Tensor:
    """As torch.py's round_states, on a CPU."""
    flat = states.float().reshape(len(states), -1).contiguous()
    out = torch.empty(flat.shape, dtype=dtype)
    keys = state_keys(tokens, layer).numpy().view(np.uint64)
    numbers, written = flat.numpy(), out.view(torch.int16).numpy().view(np.uint16)
    for row in range(len(flat)):
        key = int(keys[row])
        low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
        if dtype == torch.bfloat16:
            _to_bfloat16(numbers[row].view(np.uint32), low, high, written[row])
            continue
        size = np.abs(numbers[row])
        lifted = np.where(size < np.float32(2.0**-14), size + np.float32(2.0**-14), size)
        parts = (numbers[row], size, lifted)
        _to_float16(*(part.view(np.uint32) for part in parts), low, high, written[row])
    return out.view(states.shape)
