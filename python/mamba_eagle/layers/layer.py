"""The base class of all layers: a module whose call is just its ``forward``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mamba_eagle.layers.ops import TORCH, LayerOps
from mamba_eagle.parallel.cut import Cut
from mamba_eagle.parallel.groups import ALONE
from mamba_eagle.parallel.shard import Shard

AnyLayer = TypeVar("AnyLayer", bound="Layer")
Made = TypeVar("Made")


class Layer(nn.Module):
    """A module without hooks.

    A decode step of a small model makes about seventy module calls of a few microseconds each;
    the call and the child lookup of ``nn.Module`` would double that time. So calling a layer is
    calling its ``forward``, and children are stored as plain attributes too.
    """

    _ops: LayerOps = TORCH  # the backend's, once the layer is prepared

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value

    def prepare(self, ops: LayerOps) -> None:
        """Use a backend's operations, pack weights and derive constants; call it once, after the
        weights are loaded.

        Outputs stay the same up to rounding. Afterwards the layer is not differentiable, and its
        weights must not change.
        """
        self._ops = ops

    def connect(self) -> None:
        """Tell the layers inside what their neighbours need; called for every layer once all are
        prepared."""

    def rehearse(self, device: torch.device) -> None:
        """Launch kernels once that only some numbers of tokens need, so that none is compiled while
        serving."""

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        """What a rank holds of this layer's own tensors, by name, if the layer is split: it is then
        made again from the rank's config (parallel/shard.py). A tensor that is not named here is
        copied to all ranks."""
        return {}

    def head_cuts(self, shard: Shard) -> dict[str, Cut]:
        """The same of tensors with a row for each token of a vocabulary, which may be split where
        layers are not."""
        return {}


def per_layer(make: Callable[[AnyLayer], Made]) -> Callable[[AnyLayer], Made]:
    """What ``make`` derives of a layer's weights, once: the layer keeps it in ``derived``."""

    def found(layer: AnyLayer) -> Made:
        derived: dict[Any, Made] = layer.__dict__.setdefault("derived", {})
        if found not in derived:
            derived[found] = make(layer)
        return derived[found]

    return found


class Residual(NamedTuple):
    """``hidden + scale · after(total(body(norm(hidden))))``: what most layers consist of."""

    norm: Any  # an RMSNorm, or None
    body: Any  # a mixer, called with the context, or an MLP
    total: Total
    scale: float = 1.0
    takes_context: bool = True
    after: Any = None  # an RMSNorm, or None

    def made(self, hidden: Tensor, ctx: Any) -> Tensor:
        """What is added, not yet scaled."""
        made = self.total(self.part(hidden if self.norm is None else self.norm(hidden), ctx))
        return made if self.after is None else self.after(made)

    def part(self, normed: Any, ctx: Any) -> Tensor:
        """The body's output, of a rank a part of the sum."""
        made: Tensor = self.body(normed, ctx) if self.takes_context else self.body(normed)
        return made


class Total(Layer):
    """The sum over all ranks of what each has computed, [n, hidden_size]. Only where it is called
    do ranks exchange anything; on a single rank it gives what it gets."""

    @property
    def alone(self) -> bool:
        """Whether there is a single rank."""
        return self._ops.group is ALONE

    def forward(self, partial: Tensor) -> Tensor:
        return self._ops.total(partial)
