"""Gated experts chosen by sigmoid scores, and shared ones beside them (DeepSeek-V3)."""

from __future__ import annotations

from torch import Tensor

from mamba_eagle.layers.gated_mlp import GatedMLP
from mamba_eagle.layers.moe import Experts, Mixture, SigmoidRouter, silu_gate
from mamba_eagle.model_config import MoEConfig


class SigmoidMoE(Mixture):
    """hidden [n, hidden_size] -> [n, hidden_size], of a rank's experts, and of its part of the
    shared ones, a part of the sum. The router must see equal bits on all ranks."""

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        width = config.intermediate_size
        self.gate = SigmoidRouter(config, hidden_size)
        self.experts = Experts(
            config.num_experts, hidden_size, width, 2 * width, silu_gate, config.held
        )
        self.has_shared = config.shared_intermediate_size > 0
        if self.has_shared:
            self.shared_experts = GatedMLP(hidden_size, config.shared_intermediate_size)

    def forward(self, hidden: Tensor) -> Tensor:
        routed = self.experts(hidden, self.gate(hidden))
        return routed + self.shared_experts(hidden) if self.has_shared else routed
