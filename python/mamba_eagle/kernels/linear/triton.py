"""Products with matrices of 16 bits on a GPU, for few tokens.

A program multiplies some rows of the weight with all columns of up to 64 tokens. The weight is the
first factor: it has enough rows for the tensor cores' widest instruction however few tokens there
are. The columns are never divided among programs: a sum is made of ordered steps of 16 columns in
one float32 accumulator, so a row has the same bits whatever the tile and the number of tokens
(test_step_sums.py), and nothing is left to be added up. What that needs is enough reads in flight.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import cdiv, launches_overlap, next_power_of_2, overlapping
from mamba_eagle.kernels.staged import Staged
from mamba_eagle.kernels.triton_math import exact_dot, fetch_ahead, previous_done


class Config(NamedTuple):
    """How a product is divided; the result does not depend on it."""

    rows: int  # of the weight, per program: a power of two
    tokens: int  # per program: a power of two, at least 16
    columns: int  # per iteration: a power of two, at least 16
    warps: int
    stages: int  # iterations in flight
    ahead: int = 8  # of a row, 128 bytes each, fetched while the previous kernel drains; 2^k or 0


# not specialized, so that all numbers of tokens share machine code
@Staged
@triton.jit(do_not_specialize=["n"])
def _linear_kernel(
    x,  # [n, columns], rows x_stride apart
    weight,  # [out, columns]
    bias,  # [out], or None
    y,  # [n, out]
    n,
    out,
    columns,
    x_stride,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_row, is_token = row < out, token < n
    rows = weight + tl.minimum(row, out - 1).to(tl.int64)[:, None] * columns
    tokens = x + token.to(tl.int64)[None, :] * x_stride
    fetch_ahead(rows, 0, columns, AHEAD)
    previous_done(OVERLAP)
    column = tl.arange(0, COLUMNS)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for first in tl.range(0, columns, COLUMNS, num_stages=STAGES):
        at = first + column
        inside = at < columns
        w = tl.load(
            rows + at[None, :], mask=inside[None, :], other=0.0, eviction_policy="evict_first"
        )
        t = tl.load(tokens + at[:, None], mask=inside[:, None] & is_token[None, :], other=0.0)
        acc = exact_dot(w, t, acc, "tf32")
    if bias is not None:
        acc += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    outputs = y + token.to(tl.int64)[None, :] * out + row[:, None]
    tl.store(outputs, acc.to(y.dtype.element_ty), mask=is_row[:, None] & is_token[None, :])


def choose_config(n: int) -> Config:
    """For Hopper; measured with benchmark/kernels/bench_linear.py."""
    if n > 64:
        return Config(128, 128, 64, 8, 3)
    return Config(64, min(64, max(16, next_power_of_2(n))), 128, 4, 5)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """``y_ro = Σ_i x_ri w_oi + b_o``, sums in float32.

    Args:
        x: [n, in], bfloat16 or float16; its last dimension is contiguous.
        weight: [out, in], contiguous, of the same dtype; bias: [out].
        out: [n, out] contiguous, for the result; None: a new tensor.
    """
    (n, columns), rows = x.shape, weight.shape[0]
    y = torch.empty(n, rows, dtype=x.dtype, device=x.device) if out is None else out
    config = config or choose_config(n)
    _linear_kernel[(cdiv(rows, config.rows), cdiv(n, config.tokens))](
        *(x, weight, bias, y, n, rows, columns, x.stride(0)),
        ROWS=config.rows,
        TOKENS=config.tokens,
        COLUMNS=config.columns,
        STAGES=config.stages,
        AHEAD=config.ahead if launches_overlap(x.device) else 0,
        num_warps=config.warps,
        **overlapping(x.device),
    )
    return y
