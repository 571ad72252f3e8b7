"""RMS norms: the plain one, and Mamba2's gated one over groups of channels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from mamba_eagle.kernels import numba_math
from mamba_eagle.kernels.gated_norm.cpu import gated_group_rms_norm
from mamba_eagle.kernels.pointwise import TORCH, Normed, pointwise_ops
from mamba_eagle.kernels.rms_norm.cpu import rms_norm
from mamba_eagle.layers.layer import Layer


class _Norm(Layer):
    """``weight`` [size], and after ``prepare`` a view of it where the fused kernels can be used."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self._fused: np.ndarray | None = None
        self._ops = TORCH

    def prepare(self) -> None:
        self._ops = pointwise_ops(self.weight.device, self.weight.dtype)
        if numba_math.usable(self.weight.device, self.weight.dtype):
            self._fused = self.weight.detach().numpy()


class RMSNorm(_Norm):
    """``weight * x / rms(x)`` over the last dimension; sums in float32. x [n, size]."""

    def after(self, stream: Tensor, added: Tensor) -> Normed:
        """The norm of ``stream + added``, and that sum; of inputs that nobody else looks at
        afterwards, since results may take their place."""
        if self._fused is None:
            return self._ops.add_rms_norm(stream, added, self.weight, self.eps)
        stream = stream + added
        return Normed(self.forward(stream), stream)

    def forward(self, x: Tensor) -> Tensor:
        if self._fused is None:
            return self._ops.rms_norm(x, self.weight, self.eps)
        out = torch.empty_like(x)
        rms_norm(x.numpy(), self._fused, self.eps, out.numpy())
        return out


class GatedGroupRMSNorm(_Norm):
    """``weight * rmsnorm_group(y * silu(gate))``: gate first, then a norm over each group.

    y, gate [n, size]; groups are ``size // num_groups`` neighbouring channels (Mamba2's
    ``norm_before_gate=False``, the form that Nemotron-H publishes).
    """

    def __init__(self, size: int, num_groups: int, eps: float) -> None:
        super().__init__(size, eps)
        self.group_size = size // num_groups

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        if self._fused is None:
            return self._ops.gated_group_rms_norm(y, gate, self.weight, self.group_size, self.eps)
        out = torch.empty_like(y)
        gated_group_rms_norm(
            y.numpy(),
            gate.contiguous().numpy(),
            self._fused,
            self.group_size,
            self.eps,
            out.numpy(),
        )
        return out
