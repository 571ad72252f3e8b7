"""What the fused CPU kernels share: compiler options, and float32 functions that vectorise.

Numba compiles the ``cpu.py`` of each folder to machine code and caches it on disk
(numba_cache.py). Kernels run on one thread, unless they are ``threaded`` (threads.py). They
take float32 on a CPU; backend/choose.py decides where they are used.

Sums may be reordered so that they run in vector registers. NaN and infinity keep their meaning:
``nnan`` and ``ninf`` are not among the fast-math flags.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp as exact_exp
from math import log1p
from typing import Any

import numpy as np

from mamba_eagle.kernels.numba_cache import own_cache_folder

try:
    import numba
    from numba import prange
except ImportError:  # an optional accelerator: the torch path does the same work
    numba, prange = None, range

if numba is not None and not numba.config.CACHE_DIR:  # NUMBA_CACHE_DIR
    numba.config.CACHE_DIR = str(own_cache_folder() or "")

_OPTIONS = {"cache": True, "nogil": True, "error_model": "numpy", "boundscheck": False}


def kernel(function: Callable[..., Any], parallel: bool = False) -> Callable[..., Any]:
    """Compile; sums may be evaluated in any order. parallel: loops over ``prange`` use threads."""
    if numba is None:
        return function
    return numba.njit(
        fastmath={"reassoc", "contract", "arcp", "nsz"}, parallel=parallel, **_OPTIONS
    )(function)


def exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile; operations keep the order in which they are written."""
    return function if numba is None else numba.njit(fastmath={"contract"}, **_OPTIONS)(function)


def strictly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile; each operation is rounded as it is written, so the bits of what is computed do not
    depend on the code around it."""
    return function if numba is None else numba.njit(**_OPTIONS)(function)


ZERO, HALF, ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C0, _C1, _C2 = (
    np.float32(1.9875691500e-4),
    np.float32(1.3981999507e-3),
    np.float32(8.3334519073e-3),
)
_C3, _C4, _C5 = (
    np.float32(4.1665795894e-2),
    np.float32(1.6666665459e-1),
    np.float32(5.0000001201e-1),
)
_BIAS, _SHIFT = np.int32(127), np.int32(23)
_LINEAR_ABOVE = np.float32(20.0)  # as torch's softplus


# Bits of a float32 but the sign, and those of infinity: NaN is above it.
SIZE, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)


@exactly
def ordered(bits):  # noqa: ANN001, ANN201
    """Bits of a float32 as an integer that rises with it, which vectorises; its own inverse."""
    return np.int32(bits ^ (np.int32(bits >> np.int32(31)) & SIZE))


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
def sigmoid(x, out):  # noqa: ANN001, ANN201
    """x, out [n, size] float32: torch's own rounds the last numbers of a tensor in another way."""
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            out[r, c] = ONE / (ONE + exp(-x[r, c]))


@exactly
def softplus(x):  # noqa: ANN001, ANN201
    return x if x > _LINEAR_ABOVE else np.float32(log1p(exact_exp(x)))
