"""Decays and betas of gated DeltaNet in one launch; for scans of prompts summed up by chunks."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import next_power_of_2, overlapping
from mamba_eagle.kernels.triton_math import previous_done, rounded_product, softplus

BASE_2 = tl.constexpr(1.0 / math.log(2.0))


@triton.jit
def _gates_kernel(
    raw,  # [n, 2 * H]
    rate,  # [H]
    bias,  # [H]
    gates,  # [n, 2 * H]
    raw_stride,
    max_beta,
    H: tl.constexpr,
    HP: tl.constexpr,  # heads, padded
    OVERLAP: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.arange(0, HP)
    inside = head < H
    slope = tl.load(rate + head, mask=inside, other=0.0)
    shift = tl.load(bias + head, mask=inside, other=0.0)
    previous_done(OVERLAP)
    raw += row * raw_stride
    decay = tl.load(raw + head, mask=inside, other=0.0).to(tl.float32)
    beta = tl.load(raw + H + head, mask=inside, other=0.0).to(tl.float32)
    gates += row * 2 * H
    tl.store(gates + head, slope * softplus(decay + shift), mask=inside)
    tl.store(gates + H + head, max_beta / (1.0 + tl.exp(-beta)), mask=inside)


def delta_gates(raw: Tensor, rate: Tensor, bias: Tensor, max_beta: float) -> Tensor:
    """``rate · softplus(decay + bias)``, then ``max_beta · sigmoid(beta)``.

    Args:
        raw: [n, 2 * H], decays and betas as they are projected; rows may be apart.
        rate, bias: [H] float32, contiguous; the rate is negative.
    Returns: [n, 2 * H] float32.
    """
    n, heads = len(raw), len(rate)
    gates = torch.empty(n, 2 * heads, dtype=torch.float32, device=raw.device)
    _gates_kernel[(n,)](
        *(raw, rate, bias, gates, raw.stride(0), max_beta),
        H=heads,
        HP=next_power_of_2(heads),
        num_warps=1,
        **overlapping(raw.device),
    )
    return gates


@triton.jit
def _chunk_gates_kernel(
    raw,  # [n, 2 * H], decays, betas
    rate,  # [H]; None: raw has been through what makes gates
    bias,  # [H], or None
    starts,  # [chunks + 1] int32, the first token of each chunk
    sums,  # [n, H] float32
    betas,  # [n, H] float32
    raw_stride,
    max_beta,
    H: tl.constexpr,
    HP: tl.constexpr,  # heads, padded
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.arange(0, HP)[None, :]
    begin, end = tl.load(starts + tl.program_id(0)), tl.load(starts + tl.program_id(0) + 1)
    token = (begin + tl.arange(0, CHUNK))[:, None]
    inside = (token < end) & (head < H)
    previous_done(OVERLAP)
    at = token.to(tl.int64) * H + head
    own = raw + token.to(tl.int64) * raw_stride + head
    decay = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    beta = tl.load(own + H, mask=inside, other=0.0).to(tl.float32)
    if rate is not None:
        slope = tl.load(rate + head, mask=head < H, other=0.0)
        decay = softplus(decay + tl.load(bias + head, mask=head < H, other=0.0))
        decay = tl.where(inside, rounded_product(slope, decay), 0.0)
        beta = max_beta / (1.0 + tl.exp(-beta))
    tl.store(sums + at, tl.cumsum(decay, 0) * BASE_2, mask=inside)
    tl.store(betas + at, beta, mask=inside)


def chunk_gates(
    raw: Tensor, rates: tuple[Tensor, Tensor] | None, max_beta: float, starts: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """``delta_gates`` with decays summed up from each chunk's beginning, in base 2.

    Args:
        rates: rate and bias; None: raw is what ``delta_gates`` returns.
        starts: [chunks + 1] int32, the first token of each chunk, of at most ``chunk``, a power of
            two.
    Returns: sums and betas, [n, H] float32 each.
    """
    n, heads = len(raw), raw.shape[1] // 2
    sums, betas = torch.empty(2, n, heads, device=raw.device)
    _chunk_gates_kernel[(len(starts) - 1,)](
        *(raw, *(rates or (None, None)), starts, sums, betas, raw.stride(0), max_beta),
        H=heads,
        HP=next_power_of_2(heads),
        CHUNK=chunk,
        num_warps=4,
        **overlapping(raw.device),
    )
    return sums, betas
