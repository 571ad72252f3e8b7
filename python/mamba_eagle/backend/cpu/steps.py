"""The target's part of a decode step without Python between its kernels.

    crowded ─ folds ─ open ─ embed ─ layers ─ norm ─ logits       verify
    accept ─ journals ─ slot table                                commit

Folds are calls that do nothing where a journal has room. What it computes is what the state scheme,
the layers and the accepting kernels do, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.backend.cpu.calls import Call, table_of
from mamba_eagle.backend.cpu.embeddings import GroupedRows, StoredRows, stored_rows
from mamba_eagle.backend.cpu.fused import (
    Builder,
    multiplies,
    residuals_of,
    takes_prepared_inputs,
    width_of,
)
from mamba_eagle.backend.cpu.products import GroupedProduct
from mamba_eagle.backend.cpu.state import CpuDeferred
from mamba_eagle.backend.pools import KVPool, RequestTable
from mamba_eagle.backend.steps import ModelParts, Passed
from mamba_eagle.backend.torch.accept import empty_truncated
from mamba_eagle.kernels import numba_spans, numba_steps
from mamba_eagle.kernels.numba_spans import Frame, Recurrence
from mamba_eagle.kernels.numba_steps import Step
from mamba_eagle.kernels.numba_team import Program
from mamba_eagle.kernels.tree_verify.layout import TreeLayout
from mamba_eagle.layers.layer import Residual
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree


def target_program(
    parts: ModelParts, kv: KVPool, table: RequestTable, scheme: Any
) -> TargetProgram | None:
    """None: some part of the model has no program."""
    rows, steps = stored_rows(parts.embedding), residuals_of(parts.layers)
    if rows is None or steps is None or not isinstance(scheme, CpuDeferred):
        return None
    if kv.num_layers and kv.k.dtype != torch.float32:
        return None
    if parts.norm.rounding is not None or not multiplies(parts.logits):
        return None
    return TargetProgram(parts, steps, rows, kv, table, scheme)


class Sized(NamedTuple):
    """Memory of steps of b trees with T nodes, which the next step of that size overwrites."""

    layout: TreeLayout
    positions: Tensor
    words: np.ndarray  # of Step, as they are before a step
    arrays: list[Tensor]


class TargetProgram:
    """The programs of a model, and the memory that they share."""

    def __init__(
        self,
        parts: ModelParts,
        steps: Sequence[Residual],
        rows: StoredRows | GroupedRows,
        kv: KVPool,
        table: RequestTable,
        scheme: CpuDeferred,
    ) -> None:
        self.parts, self.table, self.scheme = parts, table, scheme
        self.frame = np.zeros(Frame.COUNT, np.int64)
        self.words = np.zeros(Step.COUNT, np.int64)
        self.size = parts.norm.weight.shape[0]
        self._sized: dict[tuple[int, int], Sized] = {}
        self._keep_tables()
        build = self.builder = Builder(self.frame, scheme, kv)
        build.calls.append(self._alone(numba_steps.CROWDED))
        self._folds(build, steps)
        build.calls.append(self._alone(numba_steps.OPEN))
        self.embed = rows.call(self.size, self.size, parts.scale)
        self.embed.scratch[1] = ("stream", 0)
        build.calls.append(self.embed)
        build.scratch.want("stream", self.size * 4)
        for step in steps:
            build.add(step)
        self.norm = self._norm(build)
        build.product(parts.logits, "features", "logits")
        self.logits = build.calls[-1]
        # what a step returns is new memory: where calls name it
        self.features_at = [(self.norm, 4)]
        self.logits_at = 6
        if not isinstance(parts.logits.packed, GroupedProduct):
            self.logits_at = 2
        if not takes_prepared_inputs(parts.logits):
            self.features_at.append((self.logits, 0))
            del self.logits.scratch[0]
        del self.logits.scratch[self.logits_at], build.scratch.wanted["logits"]
        self.width = width_of(parts.logits)
        self.program = Program(table_of(build.calls))
        self._commit = self._alone(numba_steps.COMMIT)
        self.committing = Program(table_of([self._commit]))

    # ── the calls ──

    def _alone(self, kernel: Any) -> Call:
        """A call of one unit."""
        call = Call(kernel, [0, 0], units=1)
        call.words[:] = self.frame.ctypes.data, self.words.ctypes.data
        return call

    def _folds(self, build: Builder, steps: Sequence[Residual]) -> None:
        for step in steps:
            if isinstance(step.body, Mamba2Mixer):
                c = step.body.config
                call = build.call(
                    numba_steps.FOLD, [0] * (Recurrence.COUNT + 1),
                    units_per_row=0, units_per_request=c.num_heads,
                    work=c.inner_size * c.state_size // 16,
                )  # fmt: skip
                build.recurrence(call, step.body, 0)
                call.words[Recurrence.COUNT] = self.words.ctypes.data

    def _norm(self, build: Builder) -> Call:
        norm, logits = self.parts.norm, self.parts.logits
        call = build.call(
            numba_spans.NORM, [0, 0, 0, self.size, 0, 0, 0, 0], work_per_row=self.size
        )
        call.keep(1, norm.weight.detach().float().contiguous().numpy())
        call.keep(2, np.array([norm.eps], np.float64))
        build.rounded(call, 5, logits)
        return call

    # ── the memory ──

    def _keep_tables(self) -> None:
        w, table, rows = self.words, self.table, self.scheme.rows
        size, kept = self.scheme.size, {}
        w[Step.R], w[Step.TABLE_COLUMNS] = table.kv_slots.shape
        w[Step.PLACES], w[Step.HISTORY], w[Step.W] = rows.path.shape[1], rows.history, size.rows
        w[Step.SIZE], w[Step.LAYERS] = self.size, size.layers
        w[Step.CHANNELS], w[Step.STATES] = rows.conv_in.shape[3], len(self.scheme.pool.feature)
        kept = {
            Step.PROCESSED: table.processed,
            Step.STATE_SLOT: table.state_slot,
            Step.JOURNAL_LEN: rows.journal_len,
            Step.PATH: rows.path,
            Step.ROW_FEATURES: rows.feature,
            Step.POOL_FEATURES: self.scheme.pool.feature,
            Step.CONV_IN: rows.conv_in,
            Step.TABLE: table.kv_slots,
            Step.LAST_TOKEN: table.last_token,
            Step.REMAINING: table.remaining,
        }
        assert rows.feature.shape[2] == self.size
        for place, tensor in kept.items():
            assert tensor.is_contiguous()
            w[place] = tensor.data_ptr()

    def _of_size(self, b: int, T: int) -> Sized:
        found = self._sized.get((b, T))
        if found is None:
            found = self._sized[b, T] = self._new_size(b, T)
        if b * T > self.builder.scratch.rows:
            scratch = self.builder.scratch
            scratch.grow(b * T)
            for call in self.builder.calls:
                call.place(scratch)
            self.frame[Frame.STREAM] = scratch.at("stream")
        return found

    def _new_size(self, b: int, T: int) -> Sized:
        size, history = self.scheme.size, self.scheme.rows.history
        shapes = {
            Step.ITS_SLOTS: (b,), Step.STATE_SLOTS: (b,), Step.JOURNAL: (b, size.rows),
            Step.LENGTHS: (b,), Step.ROWS: (b, T), Step.TAIL: (b, history),
            Step.FOLDED: (b,), Step.PREFIX: (b,), Step.POSITIONS: (b, T),
        }  # fmt: skip
        made = {place: torch.zeros(shape, dtype=torch.int64) for place, shape in shapes.items()}
        made[Step.FOLD] = torch.zeros(b, dtype=torch.bool)
        words = self.words.copy()
        for place, tensor in made.items():
            words[place] = tensor.data_ptr()
        words[Step.B], words[Step.T] = b, T
        words[Step.MAX_JOURNAL] = size.rows - max(T, size.nodes) - size.spare
        names = (Step.ITS_SLOTS, Step.STATE_SLOTS, Step.JOURNAL, Step.LENGTHS, Step.ROWS)
        layout = TreeLayout(
            *(made[name].numpy() for name in names),
            None,
            None,
            made[Step.TAIL].numpy(),
            made[Step.FOLD].numpy(),
        )
        return Sized(layout, made[Step.POSITIONS], words, list(made.values()))

    # ── a step ──

    def verify(self, slots: Tensor, kv_slots: Tensor, tree: Tree) -> Passed:
        b, T = tree.tokens.shape
        n, sized, w = b * T, self._of_size(b, T), self.words
        features, logits = torch.empty(b, T, self.size), torch.empty(b, T, self.width)
        given = [slots, kv_slots, tree.tokens, tree.parents, tree.depths]
        given = [part.contiguous() for part in given]
        w[:] = sized.words
        w[Step.SLOTS] = given[0].data_ptr()
        w[Step.KV_SLOTS : Step.DEPTHS + 1] = [part.data_ptr() for part in given[1:]]
        w[Step.FEATURES] = features.data_ptr()
        for call, place in self.features_at:
            call.words[place] = features.data_ptr()
        self.embed.words[0] = given[2].data_ptr()
        self.logits.words[self.logits_at] = logits.data_ptr()
        self.program.run(n, b, b)
        outputs, scale = self.parts.logits.weight.shape[0], self.parts.logits_scale
        if outputs != self.width:
            logits = logits[..., :outputs].contiguous()
        if scale != 1.0:
            logits = logits * scale
        return Passed(sized.layout, sized.positions, features, logits)

    def commit(
        self, slots: Tensor, kv_slots: Tensor, tree: Tree, features: Tensor, target: Tensor,
        max_depth: int,
    ) -> tuple[Truncated, Tensor]:  # fmt: skip
        b, w = len(slots), self.words
        made, folded = empty_truncated(b, max_depth, slots.device), torch.empty_like(slots)
        given = (slots, kv_slots, tree.tokens, tree.parents, features, target)
        given = tuple(part.contiguous() for part in given)
        places = (Step.SLOTS, Step.KV_SLOTS, Step.TOKENS, Step.PARENTS, Step.FEATURES, Step.TARGET)
        for place, part in zip(places, given):
            w[place] = part.data_ptr()
        stops = self.table.stop_tokens
        w[Step.STOPS], w[Step.NUM_STOPS], w[Step.D] = (
            stops.data_ptr(),
            stops.shape[1],
            max_depth + 1,
        )
        w[Step.PATH_NODES : Step.FOLDED_AT + 1] = [part.data_ptr() for part in (*made, folded)]
        self.committing.run(1, 1, 1)
        return made, folded
