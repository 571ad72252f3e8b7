"""How a Mamba2 mixer combines its output with the gate, which differs between families."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.norm import GatedGroupRMSNorm, RMSNorm
from mamba_eagle.model_config import Mamba2Config


class NormThenGate(RMSNorm):
    """``weight * rmsnorm_group(y) * silu(gate)`` (Mamba2's ``norm_before_gate=True``).

    y, gate [n, size]; a group is ``size // num_groups`` adjacent channels.
    """

    def __init__(self, size: int, num_groups: int, eps: float) -> None:
        super().__init__(size, eps)
        self.group_size = size // num_groups

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        groups = y.float().unflatten(-1, (-1, self.group_size))
        normed = F.rms_norm(groups, (self.group_size,), None, self.eps).flatten(-2)
        return (self.weight.float() * normed * F.silu(gate.float())).to(gate.dtype)


class GateOnly(Layer):
    """``y * silu(gate)`` without norm and weight. y, gate [n, size]."""

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        return (y.float() * F.silu(gate.float())).to(gate.dtype)


def make_gated_norm(config: Mamba2Config, eps: float) -> nn.Module:
    """The module for ``config.norm``; it takes y and gate, both [n, inner_size]."""
    if config.norm == "gate_only":
        return GateOnly()
    kind = {"gate_first": GatedGroupRMSNorm, "norm_first": NormThenGate}[config.norm]
    return kind(config.inner_size, config.num_groups, eps)
