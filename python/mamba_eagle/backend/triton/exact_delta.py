"""Gated DeltaNet with the same bits however a token is served: the recurrence itself, on a GPU.

Rows, journals and folds are those of delta.py, but that u is over the length of its key, so that a
fold needs no norm; and the kernel that verifies a tree also folds.
"""

from typing import Any, TypeGuard

from torch import Tensor

from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.state import SchemeSize
from mamba_eagle.backend.triton.deferred import TritonRows
from mamba_eagle.backend.triton.delta import gates_of
from mamba_eagle.backend.triton.exact import ExactJournals
from mamba_eagle.backend.triton.layer import delta_supported, sizes_of, taps_of
from mamba_eagle.backend.triton.prefill import PlannedPrefill
from mamba_eagle.kernels.causal_conv.triton import conv_nodes
from mamba_eagle.kernels.causal_conv.triton_prefill import conv_prompts
from mamba_eagle.kernels.delta_recurrence.gluon_fold import fold_journals
from mamba_eagle.kernels.delta_recurrence.gluon_prompts import scan
from mamba_eagle.kernels.delta_recurrence.gluon_verify import tree_verify
from mamba_eagle.kernels.delta_recurrence.layout import check_sizes, sizes_fit
from mamba_eagle.kernels.delta_rule.rows import DeltaRows
from mamba_eagle.kernels.prefill_plan import PrefillPlan
from mamba_eagle.kernels.tree_verify.layout import Folds, TreeLayout
from mamba_eagle.layers.delta_rule import L2_EPS
from mamba_eagle.model_config import DeltaConfig, RecurrenceConfig


def exact_delta_supported(config: RecurrenceConfig) -> TypeGuard[DeltaConfig]:
    """Whether the kernels take this delta rule: one decay per head, and their sizes."""
    if not delta_supported(config) or config.channel_decay:
        return False
    return sizes_fit(config.head_dim, config.state_size)


class ExactDeltaRows(TritonRows):
    def __init__(
        self, config: DeltaConfig, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        """Raises: ValueError for states of 16 bits and sizes that the kernels do not take."""
        super().__init__(config, size, table, pool)
        check_sizes(self.sizes, pool.ssm)
        self.recurrence = DeltaRows(self.gates, *self.parts)

    def verify(self, layer: Any, layout: TreeLayout, channels: Tensor, raw: Tensor) -> Tensor:
        i = layer.index
        rows = DeltaRows(*(part[i] for part in self.recurrence))
        gates = gates_of(layer, raw)
        convolved = conv_nodes(channels, *taps_of(layer), self.rows.conv_in[i], layout)
        state = self.pool.ssm[i]
        return tree_verify(rows, gates, convolved, state, layout, self.sizes, L2_EPS)

    def _fold(self, folds: Folds) -> None:
        fold_journals(self.recurrence, self.pool.ssm, folds, self.sizes)


class ExactDeltaPrefill(PlannedPrefill):
    def recur(self, layer: Any, channels: Tensor, raw: Tensor) -> Tensor:
        i, plan = layer.index, self.plan
        convolved = conv_prompts(channels, *taps_of(layer), self.pool.conv[i], plan)
        sizes = sizes_of(layer.config)
        return scan(convolved, gates_of(layer, raw), self.pool.ssm[i], plan, sizes, L2_EPS)


class ExactDeltaJournals(ExactJournals):
    def _gates(self, layer: Any, raw: Tensor) -> Tensor:
        return gates_of(layer, raw)

    def _scan(self, layer: Any, convolved: Tensor, gates: Tensor, plan: PrefillPlan) -> None:
        state, sizes = self.pool.ssm[layer.index], sizes_of(layer.config)
        scan(convolved, gates, state, plan, sizes, L2_EPS)
