"""Mamba2's gated RMSNorm in torch; sums in float32."""

from __future__ import annotations

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
