"""The sequence side of a training forward pass: FullSequenceContext, in mixed precision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.kernels.ssd.naive import ssd_chunked
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.layers.mamba2 import Mamba2Mixer


class TrainingContext(FullSequenceContext):
    """The recurrence runs outside of autocast, which would round its sums to bfloat16.

    The convolution is written as a sum of shifted products: the backward pass of a depthwise
    ``conv1d`` is many times slower on a GPU.
    """

    def mamba(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        with torch.autocast(xbc.device.type, enabled=False):
            xbc = xbc.float().unflatten(0, (self.batch, self.length))
            dt = layer.step_size(dt).unflatten(0, (self.batch, self.length))
            weight = layer.conv1d.weight[:, 0]  # [channels, K]
            width = weight.shape[1]
            padded = F.pad(xbc, (0, 0, width - 1, 0))
            out = padded[:, : self.length] * weight[:, 0]
            for k in range(1, width):
                out = torch.addcmul(out, padded[:, k : k + self.length], weight[:, k])
            if layer.conv1d.bias is not None:
                out = out + layer.conv1d.bias
            x, B, C = layer.split_xbc(F.silu(out))
            y = ssd_chunked(x, dt, layer.decay_rate(), B, C, layer.D, layer.config.chunk_size).y
            return y.flatten(2).flatten(0, 1)
