"""RMS norms: the plain one, and Mamba2's gated one over groups of channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """``weight * x / rms(x)`` over the last dimension; sums in float32. x [..., size]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class GatedGroupRMSNorm(nn.Module):
    """``weight * rmsnorm_group(y * silu(gate))``: gate first, then a norm over each group.

    y, gate [n, size]; groups are ``size // num_groups`` neighbouring channels (Mamba2's
    ``norm_before_gate=False``, the form that Nemotron-H publishes).
    """

    def __init__(self, size: int, num_groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.group_size = size // num_groups
        self.eps = eps

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        gated = y.float() * F.silu(gate.float())
        groups = gated.unflatten(-1, (-1, self.group_size))
        normed = F.rms_norm(groups, (self.group_size,), None, self.eps).flatten(-2)
        return (self.weight * normed.to(gate.dtype)).to(gate.dtype)
