"""What the sampler's kernels have in common: adjusted logits of a row, keys, weights.

"Logits" are adjusted where they are read: penalties, bias, ban of stop tokens. A grammar's mask may
be laid over the logits before: what is -inf stays so.

Tokens are selected by integer keys, which are all different: the high part orders like the float,
the low part ranks lower token ids first. The threshold of a filter is the largest key t such that
the weights of all keys from t on reach a limit (top-k: weight 1, limit k; top-p: the mass, limit p
of the total). Weights are integers, so the order of addition does not matter.

The tokens are those of runner/sampler.py on the same device, bit for bit. Hence: products that are
added to something are rounded first (``rounded_product``), quotients are rounded correctly, and
exponentials and noise are computed as there.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice

from mamba_eagle.kernels.sampling import tables
from mamba_eagle.kernels.sampling_noise.triton import gumbel_of, row_key, token_bits
from mamba_eagle.kernels.triton_math import INTERPRETED, rounded_product

# Parameters: the bits of flags, and where they are numbers their columns.
TEMPERATURE, TOP_P, MIN_P, TOP_K, BIAS, BAN = (
    tl.constexpr(tables.PARAMETERS.index(name))
    for name in ("temperature", "top_p", "min_p", "top_k", "logit_bias", "min_new_tokens")
)
REPETITION, FREQUENCY, PRESENCE = (
    tl.constexpr(tables.NUMBERS.index(f"{name}_penalty"))
    for name in ("repetition", "frequency", "presence")
)
SEED, MOST, BAN_UNTIL = (
    tl.constexpr(tables.INTEGERS.index(name)) for name in ("seed", "top_k", "ban_until")
)
NUMBERS, INTEGERS = tl.constexpr(len(tables.NUMBERS)), tl.constexpr(len(tables.INTEGERS))
NO_TOKEN = tl.constexpr(-1)
MASS = tl.constexpr(tables.MASS)
LOWEST = tl.constexpr(-(2**31))  # below every rising number
INFINITE = tl.constexpr(0x7F800000)  # the rising number of +infinity; those of NaN are above it
IMPOSSIBLE = tl.constexpr(-0x7F800001)  # of -infinity

# views of larger tensors may start at any offset: kernels do not specialize on alignment
ANY_PLACE = ["slots", "positions", "tree_tokens", "ancestors"]


class Reads(NamedTuple):
    """What kernels read of their rows."""

    flags: Any
    logits: Any  # [rows, V], rows row_stride apart
    row_stride: Any
    numbers: Any
    integers: Any
    prompt_seen: Any
    output_counts: Any
    bias: Any
    stops: Any
    V: Any
    slots: Any
    positions: Any
    tree_tokens: Any
    ancestors: Any
    T: Any

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As kernels take them: all up to V as one, ``tables``, in which every member is
        specialized, and the others by themselves, since kernels do not specialize on them."""
        first = Reads._fields.index("slots")
        return self[:first], *self[first:]


class Row(NamedTuple):
    number: Any  # int64
    request: Any
    slot: Any
    asked: Any  # the request's flags


@triton.jit
def row_of(number, reads):
    request = number // reads.T
    slot = tl.load(reads.slots + request)
    return Row(number, request, slot, tl.load(reads.flags + slot))


# ── parameters ───────────────────────────────────────────────────────────────────────────────


@triton.jit
def asks(asked, WHAT: tl.constexpr):
    """Whether a request asks for a parameter. asked: its flags."""
    return ((asked >> WHAT) & 1) != 0


@triton.jit
def lists(asked):
    """Whether a request's tokens come from a short list: top-k or top-p."""
    return asks(asked, TOP_K) | asks(asked, TOP_P)


@triton.jit
def number_of(numbers, slot, WHAT: tl.constexpr):
    """A parameter of a request."""
    return tl.load(numbers + slot * NUMBERS + WHAT)


@triton.jit
def integer_of(integers, slot, WHAT: tl.constexpr):
    return tl.load(integers + slot * INTEGERS + WHAT)


# ── numbers ──────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _exp(x):
    """As torch's exp on the same device; ``tl.exp`` is an approximation."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def mass_of(x, highest, temperature):
    """How much a token counts in top-p, int64."""
    share = _exp(tl.div_rn(x - highest, temperature + tl.zeros_like(x)))
    return (share * MASS).to(tl.int64)


@triton.jit
def rising_of(x):
    """int32 in the order of the floats; NaN is the largest."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def float_of(rising):
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_of(rising, token, ID_BITS: tl.constexpr):
    """int64 from 0, by rising number and then by falling token id."""
    last: tl.constexpr = (1 << ID_BITS) - 1
    return ((rising.to(tl.int64) + 0x80000000) << ID_BITS) | (last - token).to(tl.int64)


@triton.jit
def key_rising(key, ID_BITS: tl.constexpr):
    return ((key >> ID_BITS) - 0x80000000).to(tl.int32)


@triton.jit
def key_token(key, ID_BITS: tl.constexpr):
    last: tl.constexpr = (1 << ID_BITS) - 1
    return last - (key & last)


@triton.jit
def token_of(best, ID_BITS: tl.constexpr):
    """The token of the best score's key; NO_TOKEN if that score is not finite."""
    rising = key_rising(best, ID_BITS)
    finite = (rising < INFINITE) & (rising > IMPOSSIBLE) & (best >= 0)
    return tl.where(finite, key_token(best, ID_BITS), NO_TOKEN)


@triton.jit
def threshold(key, weight, limit, BITS: tl.constexpr):
    """The largest t such that the weights of keys >= t reach ``limit``; 0 if all do not."""
    found = tl.zeros([], tl.int64)
    one = tl.full([], 1, tl.int64)
    for step in range(BITS):
        trial = found | (one << (BITS - 1 - step))
        reached = tl.sum(tl.where(key >= trial, weight, 0), 0)
        found = tl.where(reached >= limit, trial, found)
    return found


@triton.jit
def mass_limit(total, top_p):
    """The mass that top-p keeps of ``total``; at least the best token has some of it."""
    share = (total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
    return tl.maximum(share, 1)


# ── logits ───────────────────────────────────────────────────────────────────────────────────


@triton.jit
def adjusted(token, row, reads):
    """Logits of some tokens, [n] int32, after penalties, bias and ban, float32; -inf beyond the
    vocabulary."""
    valid, T = token < reads.V, reads.T
    at = reads.logits + row.number * reads.row_stride + token
    x = tl.load(at, mask=valid, other=float("-inf")).to(tl.float32)
    cell = row.slot * reads.V + token
    if asks(row.asked, REPETITION) | asks(row.asked, FREQUENCY) | asks(row.asked, PRESENCE):
        count = tl.load(reads.output_counts + cell, mask=valid, other=0)
        for other in range(1, T):  # the root is counted already
            on_path = tl.load(reads.ancestors + row.number * T + other) != 0
            drafted = tl.load(reads.tree_tokens + row.request * T + other)
            count += (on_path & (drafted == token)).to(tl.int32)
        seen = tl.load(reads.prompt_seen + cell, mask=valid, other=0) != 0
        repetition = number_of(reads.numbers, row.slot, REPETITION) + tl.zeros_like(x)
        repeated = tl.where(x > 0, tl.div_rn(x, repetition), rounded_product(x, repetition))
        x = tl.where(seen | (count > 0), repeated, x)
        frequency = number_of(reads.numbers, row.slot, FREQUENCY)
        x = x - rounded_product(count.to(tl.float32), frequency)
        x = x - tl.where(count > 0, number_of(reads.numbers, row.slot, PRESENCE), 0.0)
    if asks(row.asked, BIAS):
        x = x + tl.load(reads.bias + cell, mask=valid, other=0.0)
    if asks(row.asked, BAN):
        ban_until = integer_of(reads.integers, row.slot, BAN_UNTIL)
        early = tl.load(reads.positions + row.number) < ban_until
        stop = tl.load(reads.stops + cell, mask=valid, other=0) != 0
        x = tl.where(early & stop, float("-inf"), x)
    return x


@triton.jit
def noise_key_of(row, reads):
    seed = integer_of(reads.integers, row.slot, SEED)
    return row_key(seed, tl.load(reads.positions + row.number))


@triton.jit
def noisy_key(x, kept, token, noise_key, temperature, ID_BITS: tl.constexpr):
    """Keys of ``x + temperature · noise``; -1 where not ``kept``."""
    noise = gumbel_of(token_bits(noise_key, token))
    score = x + rounded_product(noise, temperature)
    return tl.where(kept, key_of(rising_of(score), token, ID_BITS), -1)


@triton.jit
def above_floor(x, highest, row, reads):
    """Which tokens min-p keeps: its number is ``temperature * log(min_p)``."""
    floor = highest + number_of(reads.numbers, row.slot, MIN_P)
    return (x >= floor) | (asks(row.asked, MIN_P) == 0)
