"""The small operations between matrix products, norms and gates: by torch, or by FlashInfer.

Layers ask ``pointwise_ops`` once, when they are prepared for inference. Before that they use
``TORCH``, which can be differentiated and is the reference.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.kernels import gpu
from mamba_eagle.kernels.rms_norm import naive


class Normed(NamedTuple):
    """A residual stream and its norm, both [n, size]."""

    normed: Tensor
    stream: Tensor


class PointwiseOps:
    """In torch; sums in float32."""

    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``weight · x / rms(x)`` over the last dimension: x [n, size], weight [size]."""
        return naive.rms_norm(x, weight, eps)

    def add_rms_norm(self, stream: Tensor, added: Tensor, weight: Tensor, eps: float) -> Normed:
        """The norm of ``stream + added`` [n, size], and that sum. Neither may be used afterwards:
        the results may stand in their place."""
        stream = stream + added
        return Normed(self.rms_norm(stream, weight, eps), stream)

    def silu_and_mul(self, both: Tensor) -> Tensor:
        """Gate and up projection side by side [n, 2 * size] -> ``silu(gate) * up`` [n, size]."""
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up


class FlashInferOps(PointwiseOps):
    """One kernel each, which rounds once."""

    name = "flashinfer"

    def __init__(self) -> None:
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
_flashinfer_ops = cache(FlashInferOps)


def pointwise_ops(device: torch.device, dtype: torch.dtype) -> PointwiseOps:
    """The fastest for inference with weights and activations of this dtype on this device."""
    return _flashinfer_ops() if gpu.flashinfer_usable(device, dtype) else TORCH
