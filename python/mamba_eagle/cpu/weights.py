"""A Mamba2 layer's weights in the form that the kernels take."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.cpu.ops.causal_conv import step_sizes
from mamba_eagle.cpu.ops.tree_verify import LayerWeights
from mamba_eagle.layers.mamba2 import Mamba2Mixer

SOFTPLUS = 100  # multiply-adds that take about as long

_weights: WeakKeyDictionary[Mamba2Mixer, LayerWeights] = WeakKeyDictionary()


def layer_weights(layer: Mamba2Mixer) -> LayerWeights:
    """A layer's weights in the form that the kernels take; they must not change afterwards."""
    found = _weights.get(layer)
    if found is None:
        found = _weights[layer] = _layer_weights(layer)
    return found


def _layer_weights(layer: Mamba2Mixer) -> LayerWeights:
    taps = layer.conv1d.weight.detach()[:, 0].t()  # [K, C]
    bias = layer.conv1d.bias
    last = taps.new_zeros(taps.shape[1]) if bias is None else bias.detach()
    heads = torch.stack([layer.decay_rate(), layer.dt_bias.detach(), layer.D.detach()])
    low, high = layer.config.time_step_limit
    return LayerWeights(
        torch.cat([taps, last[None]]).float().numpy(),
        heads.detach().float().numpy(),
        np.float32(low),
        np.float32(high),
    )


def step_sizes_of(layer: Mamba2Mixer, raw: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """As the layer's ``step_size``, with the bits that decode steps give it, and the decays: raw
    [n, H] -> [n, H] float32 each."""
    weights = layer_weights(layer)
    steps, decay = np.empty(raw.shape, np.float32), np.empty(raw.shape, np.float32)
    given = (raw.contiguous().numpy(), weights.heads, weights.low, weights.high)
    step_sizes(steps.size * SOFTPLUS, *given, steps, decay)
    return steps, decay
