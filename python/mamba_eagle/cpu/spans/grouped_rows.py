"""Rows of integer groups as float32, for programs: the embedding is in lm_head's product. The
numbers are those of torch."""

import numpy as np

from mamba_eagle.cpu import abi
from mamba_eagle.cpu.abi import floats, ints, reader
from mamba_eagle.cpu.memory import pointer_to
from mamba_eagle.cpu.span_kernels import SpanKernel
from mamba_eagle.cpu.vectors.code import LANES
from mamba_eagle.machine_code import numba, strictly

given_at = reader(abi.GroupedRows)


@strictly
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


@strictly
def _scale_at(address, index, wide):  # noqa: ANN001, ANN202
    if wide != 0:
        return numba.carray(pointer_to(address), index + 1, np.float32)[index]
    return _wide(numba.carray(pointer_to(address), index + 1, np.uint16)[index])


def _rows(arguments, first, last):  # noqa: ANN001, ANN202
    """Rows [first, last) of the result."""
    own = given_at(arguments)
    tokens, out = ints(own.tokens, last), floats(own.out, (last, own.columns))
    groups, bits, wide, minima = own.size // 32, own.bits, own.wide, own.minimum
    size, offset, factor = 64 * bits, np.float32(own.offset), own.factor  # size: of 16 rows' group
    for r in range(first, last):
        block, lane = tokens[r] // 16, tokens[r] % 16
        row = out[r]
        for g in range(groups):
            at = block * groups + g
            codes = numba.carray(pointer_to(own.codes + at * size), size, np.uint8)
            scale = _scale_at(own.scale, at * 16 + lane, wide)
            minimum = np.float32(0.0)
            if minima != 0:
                minimum = _scale_at(minima, at * 16 + lane, wide)
            for c in range(32):
                if bits == 8:
                    code = codes[c // 4 * 64 + lane * 4 + c % 4]
                else:  # a byte has inputs k and 4 + k of eight
                    both = codes[c // 8 * 64 + lane * 4 + c % 4]
                    code = both >> 4 if c % 8 >= 4 else both & 15
                number = (np.float32(code) - offset) * scale
                if minima != 0:
                    number += minimum
                row[g * 32 + c] = number
        if factor != np.float32(1.0):
            for c in range(own.size):
                row[c] *= factor


ROWS = SpanKernel(_rows)
assert LANES == 16  # as above
