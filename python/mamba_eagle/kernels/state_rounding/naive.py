"""Rounding a recurrent state to 16 bits stochastically, one number at a time.

A float32 number x lies between two neighbours of the narrower type, at ``low + f · (high - low)``.
It becomes ``high`` with probability f, so the error is 0 on average and what a token adds to a
state is not lost, however small it is beside the state (Croci et al. 2022,
https://doi.org/10.1098/rsos.211631). Nearest rounding loses all that is below half a step.

The random bits are a function of the request's seed, the number of tokens that the state has seen,
the layer, and the place of the number in the layer's state:

    key  = splitmix64(token_key(seed, position) xor (DOMAIN + layer))
    bits = the highest 16 bits of a 32-bit hash of the place, keyed by both halves of the key

``token_key`` is that of ``sampling_noise``; DOMAIN keeps the two uses apart. The hash's constants
are those of "lowbias32" (https://nullprogram.com/blog/2018/07/31/).
"""

import math
import struct

from mamba_eagle.kernels.sampling_noise.naive import splitmix64

DOMAIN = 0x53544154  # "STAT"
_MASK = 2**32 - 1


def state_key(seed: int, position: int, layer: int) -> int:
    """Of the state of ``layer`` after ``position`` tokens: an unsigned integer of 64 bits."""
    token_key = splitmix64(splitmix64(seed) ^ position)
    return splitmix64(token_key ^ (DOMAIN + layer))


def random_bits(key: int, place: int) -> int:
    """Uniform in [0, 2**16)."""
    x = place ^ (key & _MASK)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = (x ^ (x >> 15)) ^ (key >> 32)
    x = (x * 0x846CA68B) & _MASK
    return x >> 16


def round_bfloat16(x: float, bits: int) -> float:
    """x (a float32 number) to one of its two neighbours with 8 bits of precision.

    Their distance is 2**16 in the integers that stand for float32 numbers.
    """
    if math.isnan(x):
        return x
    number = struct.unpack("<I", struct.pack("<f", x))[0]
    cut = (number + bits) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", cut))[0])


def round_float16(x: float, bits: int) -> float:
    """x (a float32 number) to one of its two neighbours in float16, at most 65504 from 0.

    Below 2**-14 neighbours are 2**-24 apart; elsewhere 2**-10 of the power of two below x.
    """
    if math.isnan(x):
        return x
    size = abs(x)
    if size >= 65504.0:
        return math.copysign(65504.0, x)
    exponent = max(math.frexp(size)[1] - 1, -14) if size else -14
    step = 2.0 ** (exponent - 10)
    if exponent == -14:  # what float32 keeps of a number of this size, in units of 2**-37
        size = round(size * 2.0**37) / 2.0**37
    chance = (bits >> 3) / 2.0**13
    rounded = math.floor(size / step + chance) * step
    return math.copysign(min(rounded, 65504.0), x)
