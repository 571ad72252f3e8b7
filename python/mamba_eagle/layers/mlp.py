"""Feed-forward layers."""

from torch import Tensor

from mamba_eagle.kernels.float8.torch import Rounded, Rounding
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.linear import Linear
from mamba_eagle.parallel.cut import Cut, columns, once, rows
from mamba_eagle.parallel.shard import Shard


class ReluSquaredMLP(Layer):
    """``down(relu(up(x))²)``, without a gate (Nemotron-H). x [n, hidden_size], same output, of a
    rank's channels a part of the sum."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        own = shard.width(self.up_proj.weight.shape[0])
        return {
            **dict.fromkeys(("up_proj.weight", "up_proj.bias"), rows(own)),
            "down_proj.weight": columns(own),
            "down_proj.bias": once(self.down_proj.weight.shape[0], shard),
        }

    @property
    def input_rounding(self) -> Rounding | None:
        """How a norm before this layer may round its inputs to float8."""
        return self.up_proj.rounding

    def forward(self, hidden: Tensor | Rounded, ctx: ForwardContext | None = None) -> Tensor:
        above, rounding = self.up_proj(hidden), self.down_proj.rounding
        if rounding is None:
            return self.down_proj(self._ops.relu_squared(above))
        return self.down_proj(self._ops.rounded_relu_squared(above, rounding))
