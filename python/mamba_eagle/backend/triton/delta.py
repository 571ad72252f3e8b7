"""Rows and folds of delta rules on a GPU."""

from collections.abc import Callable

from torch import Tensor

from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.state import SchemeSize
from mamba_eagle.backend.triton.deferred import TritonRows
from mamba_eagle.kernels.causal_conv.triton import conv_nodes
from mamba_eagle.kernels.delta_rule.rows import DeltaRows
from mamba_eagle.kernels.delta_rule.triton import tree_verify
from mamba_eagle.kernels.delta_rule.triton_fold import fold_journals
from mamba_eagle.kernels.delta_rule.triton_gates import chunk_gates, delta_gates
from mamba_eagle.kernels.tree_verify.layout import Folds, TreeLayout
from mamba_eagle.layers.delta_rule import L2_EPS, DeltaRule, GatedDeltaNet
from mamba_eagle.layers.layer import per_layer
from mamba_eagle.model_config import DeltaConfig
from mamba_eagle.tree.tree import Tree


def gates_of(layer: DeltaRule, raw: Tensor) -> Tensor:
    """``layer.gates``, of decays per head in one launch."""
    if not isinstance(layer, GatedDeltaNet):
        return layer.gates(raw)
    return delta_gates(raw, *_rates(layer), layer.config.max_beta)


def chunk_gates_of(
    layer: DeltaRule, raw: Tensor, starts: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """The same for a scan by chunks, which begin at ``starts``."""
    if not isinstance(layer, GatedDeltaNet):
        return chunk_gates(layer.gates(raw), None, 0.0, starts, chunk)
    return chunk_gates(raw, _rates(layer), layer.config.max_beta, starts, chunk)


@per_layer
def _rates(layer: GatedDeltaNet) -> tuple[Tensor, Tensor]:
    rate = -layer.A_log.detach().float().exp()
    return rate, layer.dt_bias.detach().float().contiguous()


class TritonDelta(TritonRows):
    """Folds are one launch at the start of a step: states are written once for all layers, and
    verified after that."""

    kernel: Callable[..., Tensor] = staticmethod(tree_verify)
    gates_of = staticmethod(gates_of)

    def __init__(
        self, config: DeltaConfig, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        super().__init__(config, size, table, pool)
        self.recurrence = DeltaRows(self.gates, *self.parts)

    def begin(self, slots: Tensor, tree: Tree) -> TreeLayout:
        step = super().begin(slots, tree)
        self._fold(Folds(*step[:4], step.fold, step.round_keys))
        return step

    def verify(
        self, layer: DeltaRule, layout: TreeLayout, channels: Tensor, gates: Tensor
    ) -> Tensor:
        i = layer.index
        rows = DeltaRows(*(part[i] for part in self.recurrence))
        convolved = conv_nodes(channels, *layer.taps(), self.rows.conv_in[i], layout)
        state = self.pool.ssm[i]
        return self.kernel(rows, gates, convolved, state, layout, self.sizes, L2_EPS)

    def _fold(self, folds: Folds) -> None:
        fold_journals(self.recurrence, self.pool.ssm, folds, self.sizes, L2_EPS)
