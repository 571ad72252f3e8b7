"""Gated DeltaNet with the same bits however a token is served: the recurrence itself, on a GPU.

Rows, journals and folds are those of delta.py, but that u is over the length of its key, so that a
fold needs no norm; and the kernel that verifies a tree also folds.
"""

from typing import Any, TypeGuard

from torch import Tensor

from mamba_eagle.backend.pools import StatePool
from mamba_eagle.backend.prefill import PlannedPrefill
from mamba_eagle.backend.triton.deferred import TritonRows
from mamba_eagle.backend.triton.delta import TritonDelta, gates_of
from mamba_eagle.backend.triton.exact import ExactJournals
from mamba_eagle.backend.triton.layer import delta_supported, sizes_of
from mamba_eagle.kernels.causal_conv.triton_prefill import conv_prompts
from mamba_eagle.kernels.delta_recurrence.gluon_prompts import scan
from mamba_eagle.kernels.delta_recurrence.gluon_step import MAX_KEY
from mamba_eagle.kernels.delta_recurrence.gluon_verify import tree_verify
from mamba_eagle.kernels.prefill_plan import PrefillPlan
from mamba_eagle.kernels.recurrence.gluon_fold import fold_journals
from mamba_eagle.kernels.tree_verify.layout import Folds
from mamba_eagle.layers.delta_rule import L2_EPS, DeltaRule
from mamba_eagle.model_config import DeltaConfig, RecurrenceConfig


def exact_delta_supported(config: RecurrenceConfig) -> TypeGuard[DeltaConfig]:
    """Whether the kernels take this delta rule: one decay per head, and their sizes."""
    return delta_supported(config) and not config.channel_decay and config.state_size <= MAX_KEY


class ExactDeltaRows(TritonDelta):
    begin = TritonRows.begin
    kernel = staticmethod(tree_verify)

    def _fold(self, folds: Folds) -> None:
        fold_journals(self.recurrence, None, self.pool.ssm, folds, self.sizes)


def _scanned(
    layer: DeltaRule, channels: Tensor, gates: Tensor, pool: StatePool, plan: PrefillPlan
) -> Tensor:
    history, state = pool.conv[layer.index], pool.ssm[layer.index]
    convolved = conv_prompts(channels, *layer.taps(), history, plan)
    return scan(convolved, gates, state, plan, sizes_of(layer.config), L2_EPS)


class ExactDeltaPrefill(PlannedPrefill):
    def _recur(self, layer: Any, channels: Tensor, raw: Tensor) -> Tensor:
        return _scanned(layer, channels, gates_of(layer, raw), self.pool, self.plan)


class ExactDeltaJournals(ExactJournals):
    _gates = staticmethod(gates_of)

    def _scan(self, layer: Any, channels: Tensor, gates: Tensor, plan: PrefillPlan) -> None:
        _scanned(layer, channels, gates, self.pool, plan)
