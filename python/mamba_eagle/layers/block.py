"""One residual layer: norm, mixer, add. ModelConfig.blocks names the mixers."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.layer import Layer, Residual, Total
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.layers.mlp import GatedMLP, ReluSquaredMLP
from mamba_eagle.layers.moe import LatentMoE
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.model_config import Mamba2Config, ModelConfig


class BeforeSum(NamedTuple):
    """What layers make of the residual stream, to which ``added`` is yet to be added. Both
    [n, hidden_size]; of a rank ``added`` is a part."""

    hidden: Tensor
    added: Tensor


class ResidualLayer(Layer):
    """One that consists of residuals."""

    in_programs = False  # these are all of it, and programs may compute them instead

    @abstractmethod
    def steps(self) -> tuple[Residual, ...]:
        """What ``forward`` adds, one after the other, unless a family overrides it."""

    def forward(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        for step in self.steps():
            hidden = hidden.add(step.made(hidden, ctx), alpha=step.scale)
        return hidden


class Block(ResidualLayer):
    """``hidden + mixer(norm(hidden))``, whose mixer may be an MLP or experts."""

    in_programs = True

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        kind = config.blocks[layer]
        index = config.places_before(layer, kind)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer: nn.Module
        if kind == "recurrent":
            assert isinstance(config.recurrence, Mamba2Config)
            self.mixer = Mamba2Mixer(config.recurrence, config.hidden_size, index, config.norm_eps)
        elif kind == "attention":
            assert config.attention is not None
            self.mixer = Attention(config.attention, config.hidden_size, index, config.norm_eps)
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

    def steps(self) -> tuple[Residual, ...]:
        return (Residual(self.norm, self.mixer, self.total),)


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


class PreNormLayer(ResidualLayer):
    """A mixer and then an MLP, each of a norm of the residual stream, under a family's names. A
    family names the classes of which it has its own, or overrides ``new_attention`` or ``new_mlp``.
    Mixers are made of their config, the hidden size, the index and the norms' epsilon."""

    names = LayerNames()
    attention: ClassVar[Any] = Attention
    recurrent: ClassVar[Any] = Mamba2Mixer
    experts: ClassVar[Any]  # in place of the MLP where ``is_sparse``

    def __init__(self, config: ModelConfig, layer: int) -> None:
        """layer: the number of this one among all."""
        super().__init__()
        size, eps, kind = config.hidden_size, config.norm_eps, config.blocks[layer]
        index = config.places_before(layer, kind)
        if kind == "attention":
            name, mixer = self.names.attention, self.new_attention(config, index)
        else:
            name, mixer = self.names.recurrent, self.recurrent(config.recurrence, size, index, eps)
        mlp = self.new_mlp(config, layer)
        self.parts = LayerParts(RMSNorm(size, eps), mixer, RMSNorm(size, eps), mlp)
        names = (self.names.norm, name, self.names.mlp_norm, self.names.mlp)
        for own, part in zip(names, self.parts, strict=True):
            setattr(self, own, part)
        self.total = Total()

    def steps(self) -> tuple[Residual, ...]:
        norm, mixer, mlp_norm, mlp = self.parts
        last = Residual(mlp_norm, mlp, self.total, takes_context=False)
        return Residual(norm, mixer, self.total), last

    def new_attention(self, config: ModelConfig, index: int) -> nn.Module:
        """index: the layer's among those of its kind."""
        return self.attention(config.attention, config.hidden_size, index, config.norm_eps)

    def new_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        if config.moe is not None and self.is_sparse(config, layer):
            return self.experts(config.moe, config.hidden_size)
        return GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def is_sparse(self, config: ModelConfig, layer: int) -> bool:
        """Of a model with experts: whether this layer has any."""
        return False

    def connect(self) -> None:
        for step in self.steps():
            step.norm.rounding = getattr(step.body, "input_rounding", None)
            step.norm.rounded_from = getattr(step.body, "rounded_from", 0)


def run_layers(layers: Sequence[nn.Module], hidden: Tensor, ctx: ForwardContext) -> Tensor:
    """Some layers in a row; ``hidden`` [n, hidden_size] may be overwritten."""
    run = ctx.run(layers, hidden)
    if run is not None:
        return run
    for layer in layers:
        hidden = layer(hidden, ctx)
    return hidden


def run_with_late_sums(layers: Sequence[Any], hidden: Tensor, ctx: ForwardContext) -> Tensor:
    """``run_layers`` of ``ResidualLayer``s, with sums as of ``until_last_sum``."""
    if not layers:
        return hidden
    run = ctx.run(layers, hidden)
    if run is not None:
        return run
    hidden, added = until_last_sum(layers, hidden, ctx)
    total: Tensor = layers[0].total(added)
    return hidden + total


def until_last_sum(
    layers: Sequence[ResidualLayer], hidden: Tensor, ctx: ForwardContext
) -> BeforeSum:
    """Some layers in a row, but for their last sum. Each sum is left to the norm that comes next,
    which may have a kernel for both. Steps have a norm, and neither a scale nor a norm after the
    sum."""
    first, *others = [step for layer in layers for step in layer.steps()]
    added = first.part(first.norm(hidden), ctx)
    for step in others:
        normed, hidden = step.norm.after(hidden, added)
        added = step.part(normed, ctx)
    return BeforeSum(hidden, added)


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
