"""A recurrent layer's weights in the form that the kernels take."""

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.cpu.ops.causal_conv import step_sizes
from mamba_eagle.cpu.ops.tree_verify import LayerWeights
from mamba_eagle.layers.delta_rule import GatedDeltaNet
from mamba_eagle.layers.layer import per_layer
from mamba_eagle.layers.mamba2 import Mamba2Mixer

Mixer = Mamba2Mixer | GatedDeltaNet
SOFTPLUS = 100  # multiply-adds that take about as long


@per_layer
def layer_weights(layer: Mixer) -> LayerWeights:
    """A layer's weights in the form that the kernels take; they must not change afterwards."""
    taps = layer.conv1d.weight.detach()[:, 0].t()  # [K, C]
    bias = layer.conv1d.bias
    last = taps.new_zeros(taps.shape[1]) if bias is None else bias.detach()
    rate, skip, (low, high) = _heads_of(layer)
    heads = torch.stack([rate, layer.dt_bias.detach(), skip])
    return LayerWeights(
        torch.cat([taps, last[None]]).float().numpy(),
        heads.detach().float().numpy(),
        np.float32(low),
        np.float32(high),
    )


def _heads_of(layer: Mixer) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """Rates and D [H], and the limits of ``LayerWeights``."""
    if isinstance(layer, Mamba2Mixer):
        return layer.decay_rate(), layer.D.detach(), layer.config.time_step_limit
    rate = -layer.A_log.detach().float().exp()
    return rate, torch.zeros_like(rate), (0.0, layer.config.max_beta)


def step_sizes_of(layer: Mixer, raw: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """As the layer's ``gates``, with the bits that decode steps give them, and the decays: raw
    [n, E] -> [n, E], [n, H] float32."""
    weights = layer_weights(layer)
    steps = np.empty(raw.shape, np.float32)
    decay = np.empty((len(raw), layer.config.num_heads), np.float32)
    given = (raw.contiguous().numpy(), weights.heads, weights.low, weights.high)
    step_sizes(steps.size * SOFTPLUS, *given, steps, decay)
    return steps, decay
