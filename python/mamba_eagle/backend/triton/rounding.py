"""Stochastic rounding inside of the kernels that write states; here only the keys are made."""

from __future__ import annotations

from torch import Tensor

from mamba_eagle.backend.rounding import Stochastic
from mamba_eagle.kernels.state_rounding.triton import token_keys


class TritonStochastic(Stochastic):
    """Keys in one launch; ``round`` is torch's, for what has no kernel."""

    def keys(self, slots: Tensor, positions: Tensor) -> Tensor:
        return token_keys(self.seeds, slots, positions)
