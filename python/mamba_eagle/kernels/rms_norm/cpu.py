"""naive.py's norms as one pass each on a CPU, float32: torch's take a dozen operations."""

from __future__ import annotations

from math import sqrt

import numpy as np

from mamba_eagle.kernels.numba_math import ONE, ZERO, kernel, silu


@kernel
def _scale(squares, size, eps):
    """1 / rms from the sum of squares."""
    return ONE / np.float32(sqrt(squares / np.float32(size) + np.float32(eps)))


@kernel
def rms_norm(x, weight, eps, out):
    """As naive.rms_norm; x, out [n, size], weight [size]."""
    n, size = x.shape
    for r in range(n):
        row, normed = x[r], out[r]
        squares = ZERO
        for c in range(size):
            squares += row[c] * row[c]
        scale = _scale(squares, size, eps)
        for c in range(size):
            normed[c] = row[c] * scale * weight[c]


@kernel
def gated_group_rms_norm(y, gate, weight, group_size, eps, out):
    """As naive.gated_group_rms_norm; y, gate, out [n, size], weight [size]."""
    n, size = y.shape
    for r in range(n):
        for first in range(0, size, group_size):
            last = first + group_size
            part, gates, normed = y[r, first:last], gate[r, first:last], out[r, first:last]
            scales, squares = weight[first:last], ZERO
            for c in range(group_size):
                gated = part[c] * silu(gates[c])
                normed[c] = gated
                squares += gated * gated
            scale = _scale(squares, group_size, eps)
            for c in range(group_size):
                normed[c] *= scale * scales[c]
