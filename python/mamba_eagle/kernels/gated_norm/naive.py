"""Mamba2's gated RMSNorm, row by row and group by group in float64.

    g = y · silu(gate)
    out_i = weight_i · g_i / sqrt(mean(g² over the group of i) + eps)

The gate comes before the norm (arXiv 2405.21060, section 7; ``norm_before_gate=False`` in
state-spaces/mamba). A group is ``group_size`` neighbouring channels.

Gated DeltaNet (arXiv 2412.06464) has the norm first, and one weight for all heads:

    out_i = weight_(i mod P) · y_i / sqrt(mean(y² over the head of i) + eps) · silu(gate_i)
"""

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


def head_norm_then_gate(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y, gate: [n, heads * P]; weight: [P] -> [n, heads * P] float64."""
    gate, size = gate.double(), len(weight)
    heads = [y[:, first : first + size] for first in range(0, y.shape[1], size)]
    normed = torch.cat([rms_norm(head, weight, eps) for head in heads], dim=1)
    return normed * gate / (1 + torch.exp(-gate))
