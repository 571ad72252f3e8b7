"""Decays and betas of gated DeltaNet in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import next_power_of_2, overlapping
from mamba_eagle.kernels.triton_math import previous_done, softplus


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
