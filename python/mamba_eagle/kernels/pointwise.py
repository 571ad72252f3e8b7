"""The small operations between matrix products, norms and gates, by torch, Triton or FlashInfer.

Layers call ``pointwise_ops`` once, when they are prepared for inference. Until then they use
``TORCH``, which can be differentiated.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.kernels import gpu
from mamba_eagle.kernels.gated_norm.torch import gated_group_rms_norm
from mamba_eagle.kernels.relu_squared.torch import relu_squared
from mamba_eagle.kernels.rms_norm.torch import rms_norm
from mamba_eagle.kernels.rotary.torch import rotate


class Normed(NamedTuple):
    """A residual stream and its norm, both [n, size]."""

    normed: Tensor
    stream: Tensor


class PointwiseOps:
    """In torch; sums in float32."""

    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``weight · x / rms(x)`` over the last dimension: x [n, size], weight [size]."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, stream: Tensor, added: Tensor, weight: Tensor, eps: float) -> Normed:
        """The norm of ``stream + added`` [n, size], and that sum. The results may overwrite the
        inputs, which must not be used afterwards."""
        stream = stream + added
        return Normed(self.rms_norm(stream, weight, eps), stream)

    def silu_and_mul(self, both: Tensor) -> Tensor:
        """Gate and up projection side by side [n, 2 * size] -> ``silu(gate) * up`` [n, size]."""
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up

    def relu_squared(self, x: Tensor) -> Tensor:
        """``relu(x)²``; the result may overwrite x."""
        return relu_squared(x)

    def gated_group_rms_norm(
        self, y: Tensor, gate: Tensor, weight: Tensor, group_size: int, eps: float
    ) -> Tensor:
        """``weight · rms_norm(y · silu(gate))``, a norm for each group of channels: y, gate
        [n, size], weight [size] -> [n, size]."""
        return gated_group_rms_norm(y, gate, weight, group_size, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn channels i < half with channels i + half; those from 2 * half on stay. x [n, heads,
        D], which the result may overwrite; cos, sin [n, 1, half] float32."""
        return rotate(x, cos, sin)


class TritonOps(PointwiseOps):
    """What FlashInfer does not have."""

    name = "triton"

    def __init__(self) -> None:
        # they need triton
        from mamba_eagle.kernels.gated_norm.triton import gated_norm
        from mamba_eagle.kernels.relu_squared.triton import relu_squared_
        from mamba_eagle.kernels.rotary.triton import rotate_

        self._gated_norm, self._relu_squared = gated_norm, relu_squared_
        self._rotate = rotate_

    def relu_squared(self, x: Tensor) -> Tensor:
        return self._relu_squared(x.contiguous())

    def gated_group_rms_norm(
        self, y: Tensor, gate: Tensor, weight: Tensor, group_size: int, eps: float
    ) -> Tensor:
        return self._gated_norm(y, gate, weight, y.shape[1] // group_size, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._rotate(x, cos, sin)


class FlashInferOps(TritonOps):
    """One kernel each, which rounds once."""

    name = "flashinfer"

    def __init__(self) -> None:
        super().__init__()
        from flashinfer import activation, norm  # an optional package, for GPUs alone

        self.activation, self.norm = activation, norm

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.norm.rmsnorm(x, weight, eps)

    def add_rms_norm(self, stream: Tensor, added: Tensor, weight: Tensor, eps: float) -> Normed:
        self.norm.fused_add_rmsnorm(added, stream, weight, eps)
        return Normed(added, stream)

    def silu_and_mul(self, both: Tensor) -> Tensor:
        return self.activation.silu_and_mul(both)


TORCH = PointwiseOps()
_triton_ops, _flashinfer_ops = cache(TritonOps), cache(FlashInferOps)


def pointwise_ops(device: torch.device, dtype: torch.dtype) -> PointwiseOps:
    """The fastest for inference with weights and activations of this dtype on this device."""
    if gpu.flashinfer_usable(device, dtype):
        return _flashinfer_ops()
    return _triton_ops() if gpu.usable(device, dtype) else TORCH
