"""RMSNorm in one pass on a CPU, float32: torch takes a dozen operations."""

from __future__ import annotations

from math import sqrt

import numpy as np

from mamba_eagle.cpu.vector_math import ONE, ZERO
from mamba_eagle.machine_code import kernel


@kernel
def inverse_rms(squares, size, eps):
    """1 / rms from the sum of squares."""
    return ONE / np.float32(sqrt(squares / np.float32(size) + np.float32(eps)))


@kernel
def rms_norm(x, weight, eps, out):
    """As torch.py's rms_norm; x, out [n, size], weight [size]."""
    n, size = x.shape
    for r in range(n):
        row, normed = x[r], out[r]
        squares = ZERO
        for c in range(size):
            squares += row[c] * row[c]
        scale = inverse_rms(squares, size, eps)
        for c in range(size):
            normed[c] = row[c] * scale * weight[c]
