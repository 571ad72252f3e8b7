"""RMSNorm in one pass on a CPU, float32: torch takes a dozen operations."""

from math import sqrt

import numpy as np

from mamba_eagle.cpu.vector_math import ONE
from mamba_eagle.cpu.vectors.squares import sum_of_squares
from mamba_eagle.machine_code import exactly


@exactly
def inverse_rms(row, eps):
    """1 / rms."""
    mean = sum_of_squares(row) / np.float32(row.shape[0])
    return ONE / np.float32(sqrt(mean + np.float32(eps)))


@exactly
def rms_norm(x, weight, eps, out):
    """As ``LayerOps.rms_norm``; x, out [n, size], weight [size]."""
    n, size = x.shape
    for r in range(n):
        row, normed = x[r], out[r]
        scale = inverse_rms(row, eps)
        for c in range(size):
            normed[c] = row[c] * scale * weight[c]
