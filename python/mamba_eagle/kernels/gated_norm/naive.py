"""Mamba2's gated RMSNorm, row by row and group by group in float64.

    g = y · silu(gate)
    out_i = weight_i · g_i / sqrt(mean(g² over the group of i) + eps)

The gate comes before the norm (arXiv 2405.21060, section 7; ``norm_before_gate=False`` in
state-spaces/mamba). A group is ``group_size`` neighbouring channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.kernels.rms_norm.naive import rms_norm


def gated_group_rms_norm(
    y: Tensor, gate: Tensor, weight: Tensor, group_size: int, eps: float
) -> Tensor:
    """y, gate: [n, size]; weight: [size] -> [n, size] float64."""
    y, gate = y.double(), gate.double()
    gated = y * gate / (1 + torch.exp(-gate))
    groups = []
    for first in range(0, y.shape[1], group_size):
        group = slice(first, first + group_size)
        groups.append(rms_norm(gated[:, group], weight[group], eps))
    return torch.cat(groups, dim=1)
