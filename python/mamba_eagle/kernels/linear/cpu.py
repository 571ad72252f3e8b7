"""Matrix products of very few rows on a CPU, float32, one thread.

One row is bound by how fast the weight streams in, and a BLAS made for large products falls short
of that: all products of the embedded model for one row take 0.40 ms here, 0.95 ms with oneDNN's
packed weights and 1.05 ms with MKL (one core of an EPYC 9005, measured).
"""

from __future__ import annotations

from mamba_eagle.kernels.numba_math import ZERO, kernel

MOST_ROWS = 2  # above, oneDNN's blocked product is faster


@kernel
def few_rows(x, weight, y):
    """y = x Wᵀ. x [n, in], weight [out, in], y [n, out]; four outputs at a time share x."""
    n, size = x.shape
    outputs = weight.shape[0]
    o = 0
    while o + 4 <= outputs:
        w0, w1, w2, w3 = weight[o], weight[o + 1], weight[o + 2], weight[o + 3]
        for r in range(n):
            row = x[r]
            t0, t1, t2, t3 = ZERO, ZERO, ZERO, ZERO
            for i in range(size):
                value = row[i]
                t0 += value * w0[i]
                t1 += value * w1[i]
                t2 += value * w2[i]
                t3 += value * w3[i]
            y[r, o], y[r, o + 1], y[r, o + 2], y[r, o + 3] = t0, t1, t2, t3
        o += 4
    while o < outputs:
        w0 = weight[o]
        for r in range(n):
            row, t0 = x[r], ZERO
            for i in range(size):
                t0 += row[i] * w0[i]
            y[r, o] = t0
        o += 1
