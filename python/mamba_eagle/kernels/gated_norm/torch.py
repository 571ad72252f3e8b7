"""Gated RMSNorms of Mamba2 and of gated DeltaNet in torch; sums in float32."""

import torch.nn.functional as F
from torch import Tensor


def gated_group_rms_norm(
    y: Tensor, gate: Tensor, weight: Tensor, group_size: int, eps: float
) -> Tensor:
    """``weight · rmsnorm(y · silu(gate))``, a norm for each group of neighbouring channels.

    y, gate [n, size]; weight [size].
    """
    gated = y.float() * F.silu(gate.float())
    groups = gated.unflatten(-1, (-1, group_size))
    normed = F.rms_norm(groups, (group_size,), None, eps).flatten(-2)
    return (weight * normed.to(gate.dtype)).to(gate.dtype)


def head_norm_then_gate(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight · rmsnorm(y) · silu(gate)``, a norm for each head, all with the same weight.

    y, gate [n, heads * P]; weight [P].
    """
    heads = y.float().unflatten(-1, (-1, len(weight)))
    normed = F.rms_norm(heads, weight.shape, weight.float(), eps).flatten(-2)
    return (normed * F.silu(gate.float())).to(gate.dtype)
