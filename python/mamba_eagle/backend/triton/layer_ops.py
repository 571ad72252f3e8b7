"""Layer operations on a GPU: Triton's, and FlashInfer's for norms and gates if it is installed."""

from __future__ import annotations

from torch import Tensor

from mamba_eagle.backend.torch.layer_ops import CudaOps
from mamba_eagle.kernels.gated_norm.triton import gated_norm
from mamba_eagle.kernels.relu_squared.triton import relu_squared_
from mamba_eagle.kernels.rotary.triton import rotate_
from mamba_eagle.layers.ops import Normed


class TritonOps(CudaOps):
    name = "triton"

    def relu_squared(self, x: Tensor) -> Tensor:
        return relu_squared_(x.contiguous())

    def gated_group_rms_norm(
        self, y: Tensor, gate: Tensor, weight: Tensor, group_size: int, eps: float
    ) -> Tensor:
        return gated_norm(y, gate, weight, y.shape[1] // group_size, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate_(x, cos, sin)


class FlashInferOps(TritonOps):
    """One kernel per operation, which rounds once."""

    name = "flashinfer"

    def __init__(self) -> None:
        from flashinfer import activation, norm  # an optional package for GPUs

        self.activation, self.norm = activation, norm

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.norm.rmsnorm(x, weight, eps)

    def add_rms_norm(self, stream: Tensor, added: Tensor, weight: Tensor, eps: float) -> Normed:
        self.norm.fused_add_rmsnorm(added, stream, weight, eps)
        return Normed(added, stream)

    def silu_and_mul(self, both: Tensor) -> Tensor:
        return self.activation.silu_and_mul(both)
