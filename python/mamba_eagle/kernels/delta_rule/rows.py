"""The rows of delta rules as Triton kernels read them."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.tree_verify.layout import Sizes
from mamba_eagle.kernels.triton_math import exact_dot


class DeltaRows(NamedTuple):
    """The row buffers of all request slots, of one layer or (with a leading dimension) of all."""

    gates: Tensor  # [R, W, H + H], or [R, W, H*N + H] with a decay per channel: g, beta; float32
    keys: Tensor  # [R, W, G*N], out of the convolution
    u: Tensor  # [R, W, H*P] float32


def has_channel_decay(rows: DeltaRows, sizes: Sizes) -> bool:
    return rows.gates.shape[-1] != 2 * sizes.heads


def value_tile(head_dim: int) -> int:
    """The widest power of two, up to 32, that divides a head's values."""
    return min(32, head_dim & -head_dim)


@triton.jit
def float32_dot(a, b, acc=None):
    """acc + a·b, both factors float32 or of 16 bits; nearly as exact as float32."""
    if acc is None:
        acc = tl.zeros([a.shape[0], b.shape[1]], tl.float32)
    return exact_dot(a, b, acc, "tf32x3")


@triton.jit
def decay_sums(at, after, valid, follows):
    """Of g of a journal's rows, at pointers ``at`` and those of the rows that follow, ``after``:
    the sum of all that follow each row, and that of all."""
    sums = tl.cumsum(tl.load(after, mask=follows, other=0.0), 0, reverse=True)
    return sums, tl.sum(tl.load(at, mask=valid, other=0.0), 0)
