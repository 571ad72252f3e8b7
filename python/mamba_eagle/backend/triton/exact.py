"""Mamba2 with the same bits however a token is served: the recurrence itself, on a GPU.

Rows, journals and folds are those of deferred.py. But no kernel reads L, and a state that has been
folded, in part or not at all, gives the same outputs.
"""

from typing import Any

import torch
from torch import Tensor

from mamba_eagle.backend.journals import SavedJournals
from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.prefill import PlannedPrefill
from mamba_eagle.backend.rows import layer_rows
from mamba_eagle.backend.state import SchemeSize
from mamba_eagle.backend.triton.deferred import TritonDeferred
from mamba_eagle.backend.triton.layer import conv_weights, sizes_of, skip_weights
from mamba_eagle.kernels.causal_conv.triton import tree_conv
from mamba_eagle.kernels.causal_conv.triton_prefill import conv_prompts, prefill_conv, prompt_steps
from mamba_eagle.kernels.prefill_plan import PrefillPlan, Prompt, prefill_plan
from mamba_eagle.kernels.recurrence.gluon_fold import fold_journals
from mamba_eagle.kernels.recurrence.gluon_prompts import scan
from mamba_eagle.kernels.recurrence.gluon_verify import tree_verify
from mamba_eagle.kernels.recurrence.layout import check_sizes
from mamba_eagle.kernels.tree_verify.layout import Folds, TreeLayout
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.message import JournalPart
from mamba_eagle.model_config import Mamba2Config


class ExactRows(TritonDeferred):
    def __init__(
        self, config: Mamba2Config, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        """Raises: ValueError for states of 16 bits and sizes that the kernels do not take."""
        super().__init__(config, size, table, pool)
        check_sizes(self.sizes, pool.ssm)
        self._rates: dict[int, Tensor] = {}  # layer -> A [H]

    def verify(self, layer: Mamba2Mixer, layout: TreeLayout, xbc: Tensor, dt: Tensor) -> Tensor:
        i, weights = layer.index, conv_weights(layer)
        rows = layer_rows(self.recurrence, i)
        self._rates[i] = weights.A
        C = tree_conv(xbc, dt, weights, self.rows.conv_in[i], rows, layout, self.sizes)
        state, skip = self.pool.ssm[i], skip_weights(layer)
        return tree_verify(rows, C, weights.A, skip, state, layout, self.sizes)

    def _fold(self, folds: Folds) -> None:
        if len(self._rates) < self.size.layers:
            return  # nothing has been verified, so all journals are empty
        rates = torch.stack([self._rates[i] for i in range(self.size.layers)])
        fold_journals(self.recurrence, rates, self.pool.ssm, folds, self.sizes)


class ExactPrefillContext(PlannedPrefill):
    def _recur(self, layer: Any, xbc: Tensor, dt: Tensor) -> Tensor:
        i, weights, sizes = layer.index, conv_weights(layer), sizes_of(layer.config)
        x, dt, B, C = prefill_conv(xbc, dt, weights, self.pool.conv[i], self.plan, sizes)
        return scan(x, dt, weights.A, B, C, skip_weights(layer), self.pool.ssm[i], self.plan)


class ExactJournals(SavedJournals):
    """A replay is a prompt whose step sizes are known."""

    def _replay_rows(self, part: JournalPart, state_slot: int) -> None:
        count = part.end - part.start
        rows = torch.arange(part.start, part.end, device=self.trail.device) % self.size
        prompt = Prompt(0, count, state_slot, ((count, state_slot),))
        plan = prefill_plan([prompt], self.place.to_device)
        for i, mixer in enumerate(self.mixers):
            raw, gates = self.conv_in[i, part.slot][rows], self.gates[i, part.slot][rows]
            self._scan(mixer, raw, gates, plan)

    def _gates(self, layer: Any, raw: Tensor) -> Tensor:
        """With the bits of those that prompts and trees make."""
        weights = conv_weights(layer)
        return prompt_steps(raw, weights.dt_bias, weights.step_limit)

    def _scan(self, layer: Any, channels: Tensor, gates: Tensor, plan: PrefillPlan) -> None:
        """From and to the layer's state slots."""
        (H, P, G, N), weights = sizes_of(layer.config), conv_weights(layer)
        history, state = self.pool.conv[layer.index], self.pool.ssm[layer.index]
        out = conv_prompts(channels, weights.conv_weight, weights.conv_bias, history, plan)
        x, B, C = out.split([H * P, G * N, G * N], dim=1)
        x, B, C = x.unflatten(1, (H, P)), B.unflatten(1, (G, N)), C.unflatten(1, (G, N))
        scan(x, gates, weights.A, B, C, skip_weights(layer), state, plan)
