"""float32 functions that vectorise, for Numba's code."""

from math import exp as exact_exp
from math import log1p

import numpy as np

from mamba_eagle.machine_code import exactly, kernel

ZERO, HALF, ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C0, _C1, _C2 = map(np.float32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3))
_C3, _C4, _C5 = map(np.float32, (4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1))
_BIAS, _SHIFT = np.int32(127), np.int32(23)
_LINEAR_ABOVE = np.float32(20.0)  # as torch's softplus


@exactly
def exp(x):  # noqa: ANN001, ANN201
    """exp of a float32 within 2 ulp (Cephes' expf); libm's would be a call per element. exp(-inf)
    is 1e-38."""
    x = min(max(x, _LOWEST), _HIGHEST)
    scaled = x * _LOG2_E
    n = np.int32(scaled + (HALF if scaled >= ZERO else -HALF))  # to the nearest
    whole = np.float32(n)
    r = x - whole * _LN2_HIGH - whole * _LN2_LOW
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    power = np.int32(np.int32(n + _BIAS) << _SHIFT).view(np.float32)  # 2**n
    return (p * (r * r) + r + ONE) * power


@exactly
def silu(x):  # noqa: ANN001, ANN201
    return x / (ONE + exp(-x))


@exactly
def sigmoid_of(x):  # noqa: ANN001, ANN201
    return ONE / (ONE + exp(-x))


@exactly
def sigmoid(x, out):  # noqa: ANN001, ANN201
    """x, out [n, size] float32: torch's own rounds the last numbers of a tensor in another way."""
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            out[r, c] = sigmoid_of(x[r, c])


@exactly
def softplus(x):  # noqa: ANN001, ANN201
    return x if x > _LINEAR_ABOVE else np.float32(log1p(exact_exp(x)))


@kernel
def copy_row(source, target):
    """A loop: for ``target[:] = source`` Numba spends seconds on compiling an error's text."""
    for i in range(target.shape[0]):
        target[i] = source[i]
