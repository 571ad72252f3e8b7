"""Gumbel noise that is a function of (seed, position, token id) and of nothing else.

A counter-based generator has no state to carry, so a token's noise is the same whichever drafter,
tree, batch or device asks for it. The hash is SplitMix64 (Steele, Lea, Flood 2014,
https://doi.org/10.1145/2714064.2660195), in int64 arithmetic that wraps around: a row's key is a
hash of its seed and position, and token v takes output v of the sequence that starts at the key.
"""

import torch
from torch import Tensor

BITS = 31  # of each hash the highest; they limit the noise to about 22


def _signed(unsigned: int) -> int:
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned


GAMMA = _signed(0x9E3779B97F4A7C15)
MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _xor_shifted_(x: Tensor, shift: int) -> Tensor:
    """x ^= x >>> shift, in place; torch's own shift of int64 copies the sign."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _finalize_(x: Tensor) -> Tensor:
    """SplitMix64's output but for its last step, ``x ^= x >>> 31``: the high BITS pass it as is."""
    _xor_shifted_(x, 30).mul_(MULTIPLIER_1)
    return _xor_shifted_(x, 27).mul_(MULTIPLIER_2)


def mixed(x: Tensor) -> Tensor:
    """SplitMix64's output that follows the state x: int64 -> int64, of the same shape."""
    return _xor_shifted_(_finalize_(x + GAMMA), 31)


def row_keys(seed: Tensor, position: Tensor) -> Tensor:
    """One key for each (seed, position). Both [n] int64 -> [n] int64."""
    return mixed(mixed(seed).bitwise_xor_(position))


def hash_bits(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Uniform integers in [0, 2**BITS). seed, position: [n] int64 -> [n, V] int64.

    Equal bit for bit on all devices.
    """
    steps = torch.arange(1, vocab_size + 1, device=seed.device).mul_(GAMMA)
    x = _finalize_(row_keys(seed, position).unsqueeze(1) + steps)
    return x.bitwise_right_shift_(64 - BITS).bitwise_and_((1 << BITS) - 1)


def gumbel(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, ``-log(-log(u))`` with u in the open interval (0, 1).

    seed, position: [n] int64 -> [n, V] float32. Position is the absolute position of the token
    that is sampled. Formed from 1 - u, so that the large values, which decide, are not rounded
    to a grid.
    """
    scaled = hash_bits(seed, position, vocab_size).float().add_(0.5).mul_(-(2.0**-BITS))
    minus_complement = scaled.clamp_(min=-1.0 + 2.0**-24)  # u - 1, in (-1, 0)
    return minus_complement.log1p_().neg_().log_().neg_()
