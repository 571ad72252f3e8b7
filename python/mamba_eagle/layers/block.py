"""One residual layer: norm, mixer, add. ModelConfig.blocks names the mixers."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from mamba_eagle.kernels.float8.torch import Rounded
from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.layer import Layer, Residual, Total
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.layers.mlp import GatedMLP, ReluSquaredMLP
from mamba_eagle.layers.moe import LatentMoE
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.layers.rotary import make_attention
from mamba_eagle.model_config import Mamba2Config, ModelConfig


class BeforeSum(NamedTuple):
    """What a layer makes of the residual stream, to which ``added`` is yet to be added. Both
    [n, hidden_size]; of a rank ``added`` is a part."""

    hidden: Tensor
    added: Tensor


class LateLayer(Layer):
    """One that can leave its last sum to what comes next."""

    total: Total

    @property
    @abstractmethod
    def first_norm(self) -> RMSNorm: ...

    @abstractmethod
    def before_sum(
        self, hidden: Tensor, normed: Tensor | Rounded, ctx: ForwardContext
    ) -> BeforeSum:
        """normed: the first norm of ``hidden``, which may be overwritten."""


class Block(LateLayer):
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

    @property
    def first_norm(self) -> RMSNorm:
        return self.norm

    def before_sum(
        self, hidden: Tensor, normed: Tensor | Rounded, ctx: ForwardContext
    ) -> BeforeSum:
        return BeforeSum(hidden, self.mixer(normed, ctx))


class LayerNames(NamedTuple):
    """What a family calls the parts of its layers; these are Llama's and Bamba's names."""

    norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    attention: str = "self_attn"
    recurrent: str = "mamba"


class LayerParts(NamedTuple):
    norm: RMSNorm
    mixer: Any
    mlp_norm: RMSNorm
    mlp: Any


class PreNormLayer(LateLayer):
    """A mixer and then an MLP, each of a norm of the residual stream, under a family's names. A
    family overrides how those are made of which it has its own."""

    names = LayerNames()

    def __init__(self, config: ModelConfig, layer: int) -> None:
        """layer: the number of this one among all."""
        super().__init__()
        size, eps, kind = config.hidden_size, config.norm_eps, config.blocks[layer]
        index = config.places_before(layer, kind)
        if kind == "attention":
            name, mixer = self.names.attention, self.new_attention(config, index)
        else:
            name, mixer = self.names.recurrent, self.new_recurrent(config, index)
        mlp = self.new_mlp(config, layer)
        self.parts = LayerParts(RMSNorm(size, eps), mixer, RMSNorm(size, eps), mlp)
        names = (self.names.norm, name, self.names.mlp_norm, self.names.mlp)
        for own, part in zip(names, self.parts, strict=True):
            setattr(self, own, part)
        self.total = Total()

    def new_attention(self, config: ModelConfig, index: int) -> nn.Module:
        """index: the layer's among those of its kind."""
        assert config.attention is not None
        return make_attention(config.attention, config.hidden_size, index, config.norm_eps)

    def new_recurrent(self, config: ModelConfig, index: int) -> nn.Module:
        """The same of a recurrent layer."""
        assert isinstance(config.recurrence, Mamba2Config)
        return Mamba2Mixer(config.recurrence, config.hidden_size, config.norm_eps, index)

    def new_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        return GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def connect(self) -> None:
        norm, mixer, mlp_norm, mlp = self.parts
        for before, reader in ((norm, mixer), (mlp_norm, mlp)):
            before.rounding = getattr(reader, "input_rounding", None)

    @property
    def first_norm(self) -> RMSNorm:
        return self.parts.norm

    def forward(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        norm, mixer, mlp_norm, mlp = self.parts
        hidden = hidden + self.total(mixer(norm(hidden), ctx))
        return hidden + self.total(mlp(mlp_norm(hidden)))

    def before_sum(
        self, hidden: Tensor, normed: Tensor | Rounded, ctx: ForwardContext
    ) -> BeforeSum:
        _, mixer, mlp_norm, mlp = self.parts
        normed, hidden = mlp_norm.after(hidden, mixer(normed, ctx))
        return BeforeSum(hidden, mlp(normed))

    def both_residuals(self, scale: float = 1.0) -> tuple[Residual, ...]:
        """For families whose ``residuals`` are a mixer and an MLP."""
        norm, mixer, mlp_norm, mlp = self.parts
        return (
            Residual(norm, mixer, self.total, scale),
            Residual(mlp_norm, mlp, self.total, scale, takes_context=False),
        )


def run_layers(layers: Sequence[nn.Module], hidden: Tensor, ctx: ForwardContext) -> Tensor:
    """Some layers in a row; ``hidden`` [n, hidden_size] may be overwritten."""
    run = ctx.run(layers, hidden)
    if run is not None:
        return run
    for layer in layers:
        hidden = layer(hidden, ctx)
    return hidden


def run_with_late_sums(layers: Sequence[Any], hidden: Tensor, ctx: ForwardContext) -> Tensor:
    """``run_layers`` of ``LateLayer``s: the last sum of each is left to the norm of the next one,
    which may have a kernel for both."""
    if not layers:
        return hidden
    run = ctx.run(layers, hidden)
    if run is not None:
        return run
    first, *others = layers
    hidden, added = first.before_sum(hidden, first.first_norm(hidden), ctx)
    for layer in others:
        normed, hidden = layer.first_norm.after(hidden, added)
        hidden, added = layer.before_sum(hidden, normed, ctx)
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
    prepare_layers(model.modules(), ops)


def prepare_layers(modules: Iterable[nn.Module], ops: LayerOps) -> None:
    layers = [module for module in modules if isinstance(module, Layer)]
    for layer in layers:
        layer.prepare(ops)
    for layer in layers:
        layer.connect()
