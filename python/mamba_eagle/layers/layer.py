"""The base class of all layers: a module whose call is just its ``forward``."""

from __future__ import annotations

from typing import Any

from torch import nn

from mamba_eagle.layers.ops import LayerOps


class Layer(nn.Module):
    """A module without hooks.

    A decode step of a small model makes about seventy module calls of a few microseconds each;
    the call and the child lookup of ``nn.Module`` would double that time. So calling a layer is
    calling its ``forward``, and children are stored as plain attributes too.
    """

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

    def connect(self) -> None:
        """Tell the layers inside what their neighbours need; called for every layer once all are
        prepared."""
