"""The first half of a decoder layer with either Mamba2 or attention, followed by an MLP."""

from __future__ import annotations

from torch import Tensor

from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.layer import Layer, Total
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.layers.rotary import make_attention
from mamba_eagle.model_config import Mamba2Config, ModelConfig


class MixerLayer(Layer):
    """``layer`` is the index among all layers, from which the config gives the kind of mixer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        kind = config.blocks[layer]
        index = config.places_before(layer, kind)
        self.input_layernorm = RMSNorm(size, eps)
        self.is_mamba = kind == "recurrent"
        if self.is_mamba:
            assert isinstance(config.recurrence, Mamba2Config)
            self.mamba = Mamba2Mixer(config.recurrence, size, eps, index)
        else:
            assert config.attention is not None
            self.self_attn = make_attention(config.attention, size, index, eps)
        self.total = Total()

    def connect(self) -> None:
        mixer = self.mamba if self.is_mamba else self.self_attn
        self.input_layernorm.rounding = mixer.input_rounding

    def mixed(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """hidden [n, hidden_size] -> the mixer's output [n, hidden_size], without the residual."""
        mixer = self.mamba if self.is_mamba else self.self_attn
        return self.total(mixer(self.input_layernorm(hidden), ctx))
