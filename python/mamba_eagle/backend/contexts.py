"""The context of a forward pass over tree nodes, lanes or blocks (see layers/context.py)."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mamba_eagle.backend.attention import BlockRowAttention, NewTokenAttention
from mamba_eagle.backend.state import StateScheme
from mamba_eagle.layers.block_attention import BlockAttention
from mamba_eagle.layers.context import AttentionView, Rotation
from mamba_eagle.layers.recurrent import Recurrent


class VerifyContext:
    """The nodes of b trees: attention under the tree mask, recurrence by the state scheme."""

    rotation: Rotation | None = None

    def __init__(
        self,
        scheme: StateScheme,
        layout: Any,
        attention: NewTokenAttention | None,
        positions: Tensor,
    ) -> None:
        """layout: as returned by the scheme. attention: None if the model has no attention layer.
        positions: [b*T] int64, of the nodes."""
        self.scheme, self.layout = scheme, layout
        self.paged, self.positions = attention, positions

    def run(self, layers: Sequence[nn.Module], hidden: Tensor) -> Tensor | None:
        return self.scheme.run(layers, hidden, self, self.layout)

    def attention(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self.paged is not None
        return self.paged.attend(layer, q, k, v)

    def recur(self, layer: Recurrent, channels: Tensor, raw: Tensor) -> Tensor:
        return self.scheme.verify(layer, self.layout, channels, raw)


class BlockContext:
    """The rows of b drafted blocks, which no recurrent layer processes."""

    rotation: Rotation | None = None

    def __init__(self, attention: BlockRowAttention, positions: Tensor) -> None:
        """positions: [b*N] int64, of the rows."""
        self.paged, self.positions = attention, positions

    def run(self, layers: Sequence[nn.Module], hidden: Tensor) -> Tensor | None:
        return None

    def attention(self, layer: BlockAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.paged.attend(layer, q, k, v)

    def recur(self, layer: Recurrent, channels: Tensor, raw: Tensor) -> Tensor:
        raise AssertionError("block drafters consist of attention layers")
