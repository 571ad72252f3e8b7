"""Prompt chunks on a GPU: two kernels per layer for all chunks, without waiting."""

from functools import cached_property
from typing import Any

from torch import Tensor

from mamba_eagle.backend.prefill import PlannedPrefill
from mamba_eagle.backend.triton.layer import conv_weights, sizes_of
from mamba_eagle.kernels.causal_conv.triton_prefill import prefill_conv
from mamba_eagle.kernels.ssd.triton import scan


class TritonPrefillContext(PlannedPrefill):
    """Mamba2."""

    @cached_property
    def keys(self) -> Tensor | None:
        return self.round_keys(self.plan.ends)

    def _recur(self, layer: Any, xbc: Tensor, dt: Tensor) -> Tensor:
        i, weights, sizes = layer.index, conv_weights(layer), sizes_of(layer.config)
        x, dt, B, C = prefill_conv(xbc, dt, weights, self.pool.conv[i], self.plan, sizes)
        state, keys = self.pool.ssm[i], self.keys
        return scan(x, dt, weights.A, B, C, layer.D, state, self.plan, round_keys=keys, layer=i)
