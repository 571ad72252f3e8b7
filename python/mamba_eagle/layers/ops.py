"""The operations that layers are made of, in torch.

A backend has its own ``LayerOps`` and hands them to the layers when they are prepared for
inference. Before that layers use ``TORCH``, which can be differentiated and is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.kernels.gated_norm.torch import gated_group_rms_norm
from mamba_eagle.kernels.relu_squared.torch import relu_squared
from mamba_eagle.kernels.rms_norm.torch import rms_norm
from mamba_eagle.kernels.rotary.torch import rotate


class Normed(NamedTuple):
    """A residual stream and its norm, both [n, size]."""

    normed: Tensor
    stream: Tensor


# x [n, in], bias [out] or None -> [n, out]
Product: TypeAlias = Callable[[Tensor, "Tensor | None"], Tensor]


class LayerOps:
    """In torch; sums in float32."""

    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``weight · x / rms(x)`` over the last dimension: x [n, size], weight [size]."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, stream: Tensor, added: Tensor, weight: Tensor, eps: float) -> Normed:
        """The norm of ``stream + added`` [n, size], and that sum. Neither may be used afterwards:
        the results may stand in their place."""
        stream = stream + added
        return Normed(self.rms_norm(stream, weight, eps), stream)

    def silu_and_mul(self, both: Tensor) -> Tensor:
        """Gate and up projection side by side [n, 2 * size] -> ``silu(gate) * up`` [n, size]."""
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up

    def relu_squared(self, x: Tensor) -> Tensor:
        """``relu(x)²`` of x, which nobody looks at afterwards: the result may take its place."""
        return relu_squared(x)

    def gated_group_rms_norm(
        self, y: Tensor, gate: Tensor, weight: Tensor, group_size: int, eps: float
    ) -> Tensor:
        """``weight · rms_norm(y · silu(gate))`` by groups of channels: y, gate [n, size], weight
        [size] -> [n, size]."""
        return gated_group_rms_norm(y, gate, weight, group_size, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Channel i < half turns with channel i + half, those behind stay: x [n, heads, D], which
        nobody looks at afterwards; cos, sin [n, 1, half] float32."""
        return rotate(x, cos, sin)

    def pack_linear(self, weight: Tensor) -> Product | None:
        """A faster product with ``weight`` [out, in], which will not change any more; None if
        there is none."""
        return None

    def grouped_linear(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Rows ``[ends[e-1], ends[e])`` of x [m, in] by expert e's weight [E, out, in] -> [m, out].

        ends: [E] int64, increasing, the last one m.
        """
        out = x.new_empty(x.shape[0], weight.shape[1])
        begin = 0
        for expert, end in enumerate(ends.tolist()):
            if end > begin:
                torch.mm(x[begin:end], weight[expert].t(), out=out[begin:end])
            begin = end
        return out


TORCH = LayerOps()
