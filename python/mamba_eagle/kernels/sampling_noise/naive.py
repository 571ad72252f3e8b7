"""Gumbel noise keyed by (seed, position, token id), one number at a time.

SplitMix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2714064.2660195) hashes 64-bit
integers. Seed and position make a key, and token v takes output v of the sequence that starts at
that key:

    key  = hash(hash(seed) xor position)
    bits = the highest 31 bits of hash(key + v · GAMMA)

With u uniform in (0, 1), ``-log(-log(u))`` is standard Gumbel noise (Gumbel-max trick).
"""

import math

BITS = 31
GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """The output that follows ``state``, an unsigned integer of 64 bits."""
    z = (state + GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def hash_bits(seed: int, position: int, token: int) -> int:
    """Uniform in [0, 2**31)."""
    key = splitmix64(splitmix64(seed) ^ position)
    return splitmix64((key + token * GAMMA) & _MASK) >> (64 - BITS)


def gumbel(seed: int, position: int, token: int) -> float:
    """Noise of about -3 to 22. The integer is taken as 1 - u: the large values, which decide a
    sample, then come from small integers and are not rounded to a grid."""
    complement = (hash_bits(seed, position, token) + 0.5) / 2**BITS  # 1 - u
    return -math.log(-math.log1p(-complement))
