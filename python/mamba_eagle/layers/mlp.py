"""Feed-forward layers, plain and gated: ``down(silu(gate(x)) * up(x))``."""

import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.kernels.float8.torch import Rounded, Rounding
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.linear import JoinedLayer, Linear
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.model_config import Span
from mamba_eagle.parallel.cut import Cut, columns, once, rows
from mamba_eagle.parallel.shard import Shard


def gate_and_up(own: Span, width: int) -> Cut:
    """The channels ``own`` of both halves of a matrix that has gate and up projection, ``width``
    rows each."""
    return rows(own, Span(width + own.begin, width + own.end))


def mlp_cuts(shard: Shard, down: Linear, *above: str) -> dict[str, Cut]:
    """Of an MLP whose last matrix is ``down_proj``. above: names of those before it."""
    own = shard.width(down.weight.shape[1])
    inputs = [f"{name}.{part}" for name in above for part in ("weight", "bias")]
    return {
        **dict.fromkeys(inputs, rows(own)),
        "down_proj.weight": columns(own),
        "down_proj.bias": once(down.weight.shape[0], shard),
    }


def gated(both: Tensor, down: Linear, ops: LayerOps) -> Tensor:
    """``down(silu(gate) * up)`` of the gate and up projections [n, 2 * size]."""
    return down(ops.silu_and_mul(both, down.rounding))


class GatedMLP(JoinedLayer):
    """Three matrices and SiLU, named as in Llama: hidden [n, hidden_size] -> the same."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        return mlp_cuts(shard, self.down_proj, "gate_proj", "up_proj")

    def projections(self) -> dict[str, list[Linear]]:
        return {"both": [self.gate_proj, self.up_proj]}

    @property
    def products(self) -> tuple[Linear | None, Linear]:
        """Gate and up projection as one, of a prepared layer, if they are; and the last one."""
        return self._joined.get("both"), self.down_proj

    def forward(self, hidden: Tensor | Rounded) -> Tensor:
        both, down = self.products
        if both is not None:
            return gated(both(hidden), down, self._ops)
        return down(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class PackedGatedMLP(Layer):
    """Gate and up projection in one matrix, named as in Granite: [n, hidden_size] in and out."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.input_linear = Linear(hidden_size, 2 * intermediate_size)
        self.output_linear = Linear(intermediate_size, hidden_size)

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        width = self.output_linear.weight.shape[1]
        own = shard.width(width)
        return {
            "input_linear.weight": gate_and_up(own, width),
            "output_linear.weight": columns(own),
        }

    @property
    def products(self) -> tuple[Linear | None, Linear]:
        """As of GatedMLP."""
        return self.input_linear, self.output_linear

    def forward(self, hidden: Tensor) -> Tensor:
        return gated(self.input_linear(hidden), self.output_linear, self._ops)


class ReluSquaredMLP(Layer):
    """``down(relu(up(x))²)``, without a gate (Nemotron-H). x [n, hidden_size], same output, of a
    rank's channels a part of the sum."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def cuts(self, shard: Shard) -> dict[str, Cut]:
        return mlp_cuts(shard, self.down_proj, "up_proj")

    @property
    def input_rounding(self) -> Rounding | None:
        """How a norm before this layer may round its inputs to float8."""
        return self.up_proj.rounding

    def forward(self, hidden: Tensor | Rounded, ctx: ForwardContext | None = None) -> Tensor:
        above = self._ops.relu_squared(self.up_proj(hidden), self.down_proj.rounding)
        return self.down_proj(above)
