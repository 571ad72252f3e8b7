"""How a Mamba2 mixer combines its output with the gate, which differs between families."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mamba_eagle.kernels.float8.torch import Rounded
from mamba_eagle.layers.layer import Layer, Total
from mamba_eagle.layers.norm import GatedGroupRMSNorm, Norm, RMSNorm
from mamba_eagle.model_config import Mamba2Config, NormGroups


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


class HeadNormThenGate(Norm):
    """``weight * rmsnorm(y) * silu(gate)`` of each head, all with the same weight [P], as in gated
    DeltaNet. y, gate [n, heads * P]."""

    def forward(self, y: Tensor, gate: Tensor) -> Tensor | Rounded:
        return self._ops.head_norm_then_gate(y, gate, self.weight, self.eps, self.rounding)


class SharedGroupsNorm(Layer):
    """Either of the two norms above where some of its groups lie on several ranks: these add up
    their sums of squares. y, gate [n, size], of a rank's channels."""

    def __init__(self, size: int, groups: NormGroups, eps: float, gate_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups, self.eps, self.gate_first = groups, eps, gate_first
        self.total = Total()
        # this rank's channels of each group that it has channels of
        first = groups.first_channel // groups.group_size
        last = (groups.first_channel + size - 1) // groups.group_size
        borders = [g * groups.group_size - groups.first_channel for g in range(first, last + 2)]
        borders = [min(max(border, 0), size) for border in borders]
        self.sizes = [end - begin for begin, end in zip(borders, borders[1:])]
        self.first = first

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        y, gated = y.float(), F.silu(gate.float())
        if self.gate_first:
            y = y * gated
        squares = y.new_zeros(y.shape[0], self.groups.num_groups)
        for i, part in enumerate(y.split(self.sizes, dim=-1)):
            squares[:, self.first + i] = part.square().sum(-1)
        mean = self.total(squares)[:, self.first :] / self.groups.group_size
        scale = torch.rsqrt(mean + self.eps)
        parts = [part * scale[:, i, None] for i, part in enumerate(y.split(self.sizes, dim=-1))]
        normed = self.weight.float() * torch.cat(parts, dim=-1)
        return (normed if self.gate_first else normed * gated).to(gate.dtype)


class GateOnly(Layer):
    """``y * silu(gate)`` without norm and weight. y, gate [n, size]."""

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        return (y.float() * F.silu(gate.float())).to(gate.dtype)


def make_gated_norm(config: Mamba2Config, eps: float) -> nn.Module:
    """The module for ``config.norm``; it takes y and gate, both [n, inner_size]."""
    if config.norm == "gate_only":
        return GateOnly()
    if config.norm_groups is not None:
        gate_first = config.norm == "gate_first"
        return SharedGroupsNorm(config.inner_size, config.norm_groups, eps, gate_first)
    kind = {"gate_first": GatedGroupRMSNorm, "norm_first": NormThenGate}[config.norm]
    return kind(config.inner_size, config.num_groups, eps)
