"""Passes over whole sequences in mixed precision.

The recurrence runs outside of autocast, which would round its sums to bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.kernels.ssd.torch import ssd_chunked
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.train.heads.unrolled import convolve


class TrainingContext(FullSequenceContext):
    """Whole sequences, one pass."""

    def recur(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        with torch.autocast(xbc.device.type, enabled=False):
            xbc = xbc.float().unflatten(0, (self.batch, self.length))
            dt = layer.step_size(dt).unflatten(0, (self.batch, self.length))
            x, B, C = layer.split_xbc(convolve(layer, [xbc]))
            y = ssd_chunked(x, dt, layer.decay_rate(), B, C, layer.D, layer.config.chunk_size).y
            return y.flatten(2).flatten(0, 1)
