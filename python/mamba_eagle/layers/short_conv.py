"""Gated short convolutions (LFM2): a recurrence without a state, whose rows are its inputs."""

from collections.abc import Sequence

from torch import Tensor

from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.recurrent import (
    Conv1dWeight,
    Inputs,
    Journal,
    Recurrent,
    Scanned,
    Snapshots,
    TreeMask,
    Verified,
)
from mamba_eagle.model_config import ShortConvConfig, Span
from mamba_eagle.parallel.cut import Cut, columns, once, rows
from mamba_eagle.parallel.shard import Shard, recurrent_heads


class ShortConv(Recurrent):
    """``out_proj(C ⊙ conv(B ⊙ x))``: hidden [n, hidden_size] -> the same, of a rank's channels a
    part of the sum."""

    config: ShortConvConfig

    def __init__(self, config: ShortConvConfig, hidden_size: int, index: int, _: float) -> None:
        super().__init__()
        self.config, self.index = config, index
        channels, bias = config.channels, config.bias
        self.in_proj = Linear(hidden_size, 3 * channels, bias)
        self.conv = Conv1dWeight(channels, config.conv_kernel, bias)
        self.out_proj = Linear(channels, hidden_size, bias)

    @property
    def conv1d(self) -> Conv1dWeight:  # type: ignore[override]
        return self.conv

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        own, size = recurrent_heads(shard, self.config).heads, self.config.channels
        each = rows(*(Span(first + own.begin, first + own.end) for first in (0, size, 2 * size)))
        return {
            **dict.fromkeys(("in_proj.weight", "in_proj.bias"), each),
            **dict.fromkeys(("conv.weight", "conv.bias"), rows(own)),
            "out_proj.weight": columns(own),
            "out_proj.bias": once(self.out_proj.weight.shape[0], shard),
        }

    def gates(self, raw: Tensor) -> Tensor:
        return raw.float()

    def scan(self, inputs: Inputs, state: Tensor | None, chunk: int) -> Scanned:
        if state is None:
            state = self._no_state(inputs.convolved[:, 0])
        return Scanned(inputs.convolved, state)

    def verify(self, nodes: Inputs, journal: Journal, mask: TreeMask, state: Tensor) -> Verified:
        return Verified(nodes.convolved, ())

    def fold(self, journal: Journal, state: Tensor) -> Tensor:
        return state

    def snapshots(self, nodes: Inputs, state: Tensor, parents: Tensor) -> Snapshots:
        return Snapshots(nodes.convolved, self._no_state(nodes.convolved))

    @staticmethod
    def advance(mixers: Sequence[Recurrent], inputs: Inputs, state: Tensor) -> Tensor:
        return state

    def _no_state(self, like: Tensor) -> Tensor:
        """[..., 0, 0, 0] for like [..., channels]."""
        return like.new_zeros(*like.shape[:-1], *self.config.state_shape).float()

    def forward(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        B, C, x = self.in_proj(hidden).chunk(3, dim=-1)
        return self.out_proj(C * ctx.recur(self, B * x, hidden[:, :0]))
