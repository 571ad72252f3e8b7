"""Rows of integer groups as float32, for programs: the embedding is in lm_head's product."""

from __future__ import annotations

import numpy as np

from mamba_eagle.kernels.numba_math import numba
from mamba_eagle.kernels.numba_words import places, pointer_to
from mamba_eagle.kernels.vector_code import LANES, SpanKernel


class Words:
    """Of the span's arguments."""

    # token ids, result, its columns, numbers per row, a factor (of a float32)
    TOKENS, OUT, COLUMNS, SIZE, FACTOR = range(5)
    # addresses of the parts of ``Blocks`` (minimum: 0 for none), bits, what zero is stored as, and
    # whether scales are float32
    CODES, SCALE, MINIMUM, BITS, OFFSET, WIDE = range(5, 11)
    COUNT = 11


AT = places(Words)


def _inline(function):  # noqa: ANN001, ANN202
    """Without leave to round a product and a sum at once: results are those of torch."""
    return function if numba is None else numba.njit(cache=True, error_model="numpy")(function)


@_inline
def _wide(half):  # noqa: ANN001, ANN202
    """A float16, given by its bits, as float32."""
    exponent, fraction = np.int32(half >> 10) & np.int32(31), np.int32(half & 0x3FF)
    if exponent == 0:
        size = np.float32(fraction) * np.float32(2.0**-24)
    elif exponent == 31:
        size = np.int32(np.int32(0x7F800000) | np.int32(fraction << 13)).view(np.float32)
    else:
        bits = np.int32(np.int32(exponent + 112) << 23) | np.int32(fraction << 13)
        size = np.int32(bits).view(np.float32)
    return -size if half & 0x8000 else size


@_inline
def _scale_at(address, index, wide):  # noqa: ANN001, ANN202
    if wide != 0:
        return numba.carray(pointer_to(address), index + 1, np.float32)[index]
    return _wide(numba.carray(pointer_to(address), index + 1, np.uint16)[index])


def _rows(arguments, first, last):  # noqa: ANN001, ANN202
    """Rows [first, last) of the result."""
    w = numba.carray(pointer_to(arguments), AT.COUNT, np.int64)
    tokens = numba.carray(pointer_to(w[AT.TOKENS]), last, np.int64)
    out = numba.carray(pointer_to(w[AT.OUT]), (last, w[AT.COLUMNS]), np.float32)
    factor = numba.carray(pointer_to(w[AT.FACTOR]), 1, np.float32)[0]
    groups, size = w[AT.SIZE] // 32, 64 * w[AT.BITS]  # size: bytes of a group of 16 rows
    offset = np.float32(w[AT.OFFSET])
    for r in range(first, last):
        block, lane = tokens[r] // 16, tokens[r] % 16
        row = out[r]
        for g in range(groups):
            at = block * groups + g
            codes = numba.carray(pointer_to(w[AT.CODES] + at * size), size, np.uint8)
            scale = _scale_at(w[AT.SCALE], at * 16 + lane, w[AT.WIDE])
            minimum = np.float32(0.0)
            if w[AT.MINIMUM] != 0:
                minimum = _scale_at(w[AT.MINIMUM], at * 16 + lane, w[AT.WIDE])
            for c in range(32):
                if w[AT.BITS] == 8:
                    code = codes[c // 4 * 64 + lane * 4 + c % 4]
                else:  # a byte has inputs k and 4 + k of eight
                    both = codes[c // 8 * 64 + lane * 4 + c % 4]
                    code = both >> 4 if c % 8 >= 4 else both & 15
                number = (np.float32(code) - offset) * scale
                if w[AT.MINIMUM] != 0:
                    number += minimum
                row[g * 32 + c] = number
        if factor != np.float32(1.0):
            for c in range(w[AT.SIZE]):
                row[c] *= factor


ROWS = SpanKernel(_rows)
assert LANES == 16  # as above
