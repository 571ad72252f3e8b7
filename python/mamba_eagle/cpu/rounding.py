"""Stochastic rounding by Numba."""

from torch import Tensor

from mamba_eagle.backend.rounding import Stochastic
from mamba_eagle.cpu.ops.state_rounding import round_states


class CpuStochastic(Stochastic):
    def round(self, states: Tensor, keys: Tensor | None, layer: int) -> Tensor:
        assert keys is not None
        return round_states(states, keys, layer, self.dtype)
