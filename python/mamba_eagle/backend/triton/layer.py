"""Sizes and weights of recurrent layers, in the form that the Triton kernels take."""

from typing import TypeGuard

from torch import Tensor

from mamba_eagle.kernels.causal_conv.triton import ConvWeights
from mamba_eagle.kernels.tree_verify.layout import Sizes
from mamba_eagle.layers.layer import per_layer
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.model_config import DeltaConfig, Mamba2Config, RecurrenceConfig


def sizes_supported(config: RecurrenceConfig) -> TypeGuard[Mamba2Config]:
    """Whether the kernels support this recurrence, as they do Mamba2's of all published models."""
    if not isinstance(config, Mamba2Config):
        return False
    channels = config.num_heads // config.num_groups * config.head_dim
    power = config.state_size & (config.state_size - 1) == 0
    return config.head_dim >= 16 and channels % 16 == 0 and power and config.state_size >= 16


def delta_supported(config: RecurrenceConfig) -> TypeGuard[DeltaConfig]:
    """The same for delta rules."""
    if not isinstance(config, DeltaConfig):
        return False
    power = config.state_size & (config.state_size - 1) == 0
    return config.head_dim % 16 == 0 and power and config.state_size >= 16


def sizes_of(config: Mamba2Config | DeltaConfig) -> Sizes:
    return Sizes(config.num_heads, config.head_dim, config.num_groups, config.state_size)


@per_layer
def conv_weights(layer: Mamba2Mixer) -> ConvWeights:
    """Weights that are used before the recurrence."""
    return ConvWeights(
        *layer.taps(),
        layer.dt_bias.detach().float(),
        layer.decay_rate(),
        layer.config.time_step_limit,
    )


@per_layer
def skip_weights(layer: Mamba2Mixer) -> Tensor:
    """D [H] float32."""
    return layer.D.detach().float()
