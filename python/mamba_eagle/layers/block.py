"""One residual layer: norm, mixer, add. ModelConfig.blocks names the mixers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from mamba_eagle.kernels.float8.torch import Rounded
from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.layer import Layer, Residual, Total
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.layers.mlp import ReluSquaredMLP
from mamba_eagle.layers.moe import LatentMoE
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.model_config import Mamba2Config, ModelConfig


class Block(Layer):
    """``hidden + mixer(norm(hidden))``; ``kind`` is recurrent, attention, mlp or moe."""

    def __init__(self, kind: str, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer: nn.Module
        if kind == "recurrent":
            assert isinstance(config.recurrence, Mamba2Config)
            self.mixer = Mamba2Mixer(config.recurrence, config.hidden_size, config.norm_eps, index)
        elif kind == "attention":
            assert config.attention is not None
            self.mixer = Attention(config.attention, config.hidden_size, index)
        elif kind == "moe":
            assert config.moe is not None
            self.mixer = LatentMoE(config.moe, config.hidden_size, config.mlp_bias)
        else:
            self.mixer = ReluSquaredMLP(
                config.hidden_size, config.intermediate_size, config.mlp_bias
            )
        self.total = Total()

    def connect(self) -> None:
        self.norm.rounding = getattr(self.mixer, "input_rounding", None)

    def residuals(self) -> tuple[Residual, ...]:
        return (Residual(self.norm, self.mixer, self.total),)

    def forward(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        return hidden + self.total(self.mixer(self.norm(hidden), ctx))


def run_layers(layers: Sequence[nn.Module], hidden: Tensor, ctx: ForwardContext) -> Tensor:
    """Some layers in a row; ``hidden`` [n, hidden_size] may be overwritten."""
    run = ctx.run(layers, hidden)
    if run is not None:
        return run
    for layer in layers:
        hidden = layer(hidden, ctx)
    return hidden


def run_with_late_sums(
    layers: Sequence[Any],
    hidden: Tensor,
    ctx: ForwardContext,
    norm: Callable[[Any], RMSNorm],
    made: Callable[[Any, Tensor, Tensor | Rounded], tuple[Tensor, Tensor]],
) -> Tensor:
    """Some layers in a row, none if ``layers`` is empty, whose last sums are left to the norm of
    the next layer, which may have a kernel for both. ``hidden`` [n, hidden_size] may be
    overwritten.

    Args:
        norm: a layer's first one.
        made: of a layer, the stream and its norm: the stream, and what is to be added to it.
    """
    if not layers:
        return hidden
    run = ctx.run(layers, hidden)
    if run is not None:
        return run
    first, *others = layers
    hidden, added = made(first, hidden, norm(first)(hidden))
    for layer in others:
        normed, hidden = norm(layer).after(hidden, added)
        hidden, added = made(layer, hidden, normed)
    total: Tensor = first.total(added)
    return hidden + total


def make_blocks(config: ModelConfig) -> nn.ModuleList:
    """The layers of ``config.blocks``, each with its place among the layers of its kind."""
    return nn.ModuleList(
        Block(kind, config, config.places_before(layer, kind))
        for layer, kind in enumerate(config.blocks)
    )


def prepare_for_inference(model: nn.Module, ops: LayerOps) -> None:
    """Prepare all layers for inference with a backend's operations, once, after loading the
    weights; see ``Layer.prepare``."""
    for module in model.modules():
        if isinstance(module, Layer):
            module.prepare(ops)
    for module in model.modules():
        if isinstance(module, Layer):
            module.connect()
