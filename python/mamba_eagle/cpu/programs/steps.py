"""The target's part of a decode step without Python between its kernels.

    crowded ─ folds ─ open ─ embed ─ layers ─ norm ─ logits       verify
    accept ─ journals ─ slot table                                commit

Folds are calls that do nothing where a journal has room. What it computes is what the state scheme,
the layers and the accepting kernels do, bit by bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mamba_eagle.backend.pools import KVPool, RequestTable
from mamba_eagle.backend.programs import Committed, Network, Verified
from mamba_eagle.cpu import abi
from mamba_eagle.cpu.programs import layers
from mamba_eagle.cpu.programs.calls import Call, program_of
from mamba_eagle.cpu.programs.embeddings import GroupedRows, StoredRows, stored_rows
from mamba_eagle.cpu.programs.products import multiplies, takes_prepared_inputs, width_of
from mamba_eagle.cpu.spans import layers as layer_spans
from mamba_eagle.cpu.spans import steps as spans
from mamba_eagle.cpu.weights import Mixer
from mamba_eagle.kernels.tree_verify.layout import TreeLayout
from mamba_eagle.layers.adapters import slots_of_rows
from mamba_eagle.layers.context import Rotation
from mamba_eagle.layers.layer import Residual
from mamba_eagle.tree.accept import empty_truncated
from mamba_eagle.tree.tree import Tree


def target_program(
    parts: Network, kv: KVPool, table: RequestTable, scheme: Any, adapted: bool = False
) -> TargetProgram | None:
    """None: some part of the model has no program. scheme: a ``CpuDeferred``. adapted: it adds what
    adapters do."""
    rows = stored_rows(parts.embedding)
    steps = layers.residuals_of(parts.layers, parts.rotary is not None)
    if rows is None or steps is None:
        return None
    if kv.num_layers and kv.k.dtype != torch.float32:
        return None
    if parts.norm.rounding is not None or not multiplies(parts.logits):
        return None
    return TargetProgram(parts, steps, rows, kv, table, scheme, adapted)


class Sized(NamedTuple):
    """Memory of steps of b trees with T nodes, which the next step of that size overwrites."""

    layout: TreeLayout
    positions: Tensor
    step: abi.Step  # as both are before a step
    frame: abi.Frame
    arrays: list[Tensor]


class TargetProgram:
    """The programs of a model, and the memory that they share."""

    def __init__(
        self,
        parts: Network,
        steps: Sequence[Residual],
        rows: StoredRows | GroupedRows,
        kv: KVPool,
        table: RequestTable,
        scheme: Any,
        adapted: bool,
    ) -> None:
        self.parts, self.table, self.scheme = parts, table, scheme
        self.row_slots = abi.RowSlots() if adapted else None
        self.frame, self.step = abi.Frame(), abi.Step()
        self.size = parts.norm.weight.shape[0]
        self._sized: dict[tuple[int, int], Sized] = {}
        self._keep_tables()
        build = self.builder = layers.Builder(self.frame, scheme, kv, self.row_slots)
        build.calls.append(Call(spans.CROWDED, self.step, units=1))
        self._folds(build, steps)
        build.calls.append(Call(spans.OPEN, self.step, units=1))
        self.embed = rows.call(self.size, self.size, parts.scale)
        self.embed.lies(out="stream")
        build.calls.append(self.embed)
        build.scratch.want("stream", self.size * 4)
        for step in steps:
            build.add(step)
        self.norm = self._norm(build)
        build.product(parts.logits, "features", "logits")
        self.logits = build.calls[-1]
        # what a step returns is new memory, and not in the scratch
        self.reads_features = not takes_prepared_inputs(parts.logits)
        named = {"y", "x"} if self.reads_features else {"y"}
        self.logits.scratch = [at for at in self.logits.scratch if at[1] not in named]
        del build.scratch.wanted["logits"]
        self.width = width_of(parts.logits)
        self.program = program_of("the model's step", build.calls)
        self._commit = Call(spans.COMMIT, self.step, units=1)
        self.committing = program_of("accepted tokens", [self._commit])

    # ── the calls ──

    def _folds(self, build: layers.Builder, steps: Sequence[Residual]) -> None:
        for step in steps:
            if isinstance(step.body, Mixer):
                c = step.body.config
                call = build.call(
                    spans.FOLD, abi.Recurrence(step=self.step.address),
                    units_per_row=0, units_per_request=c.num_heads,
                    work=c.inner_size * c.state_size // 16,
                )  # fmt: skip
                build.recurrence(call, step.body, None)

    def _norm(self, build: layers.Builder) -> Call:
        call = build.call(layer_spans.NORM, abi.Norm(size=self.size), work_per_row=self.size)
        layers.normed_by(call, self.parts.norm)
        build.rounded(call, self.parts.logits)
        return call

    # ── the memory ──

    def _keep_tables(self) -> None:
        step, table, rows = self.step, self.table, self.scheme.rows
        size, pool = self.scheme.size, self.scheme.pool
        assert rows.feature.shape[2] == self.size
        step.R, step.columns = table.kv_slots.shape
        step.assign(
            frame=self.frame.address, places=rows.path.shape[1], history=rows.history,
            W=size.rows, size=self.size, layers=size.layers, channels=rows.conv_in.shape[3],
            states=len(pool.feature),
        )  # fmt: skip
        step.point(
            processed=table.processed, state_slot=table.state_slot, path=rows.path,
            journal_lengths=rows.journal_len, row_features=rows.feature,
            pool_features=pool.feature, conv_in=rows.conv_in, table=table.kv_slots,
            last_token=table.last_token, remaining=table.remaining,
        )  # fmt: skip

    def _of_size(self, b: int, T: int) -> Sized:
        found = self._sized.get((b, T))
        if found is None:
            found = self._sized[b, T] = self._new_size(b, T)
        if b * T > self.builder.scratch.rows:
            scratch = self.builder.scratch
            scratch.grow(b * T)
            for call in self.builder.calls:
                call.place(scratch)
        return found

    def _new_size(self, b: int, T: int) -> Sized:
        size, history = self.scheme.size, self.scheme.rows.history
        folded, prefix, positions = (
            torch.zeros(shape, dtype=torch.int64) for shape in ((b,), (b,), (b, T))
        )
        step = abi.Step.from_buffer_copy(self.step)
        step.point(folded=folded, positions=positions)
        step.assign(b=b, T=T, max_journal=size.rows - max(T, size.nodes) - size.spare)
        layout, frame = layers.new_layout(b, T, size.rows, history), abi.Frame(rows=b * T)
        layers.describe_trees(frame, layout)
        sequences = (self.table.kv_slots.numpy(), layout.slots, prefix.numpy())
        layers.describe_attention(frame, sequences, T)
        return Sized(layout, positions, step, frame, [folded, prefix])

    # ── a step ──

    def verify(self, slots: Tensor, kv_slots: Tensor, tree: Tree) -> Verified:
        b, T = tree.tokens.shape
        n, sized, step, frame = b * T, self._of_size(b, T), self.step, self.frame
        features, logits = torch.empty(b, T, self.size), torch.empty(b, T, self.width)
        given = [slots, kv_slots, tree.tokens, tree.parents, tree.depths]
        given = [part.contiguous() for part in given]
        if self.row_slots is not None:
            own = slots_of_rows()
            assert own is not None
            self.row_slots.point(slots=own)
        for block, before in ((step, sized.step), (frame, sized.frame)):
            ctypes.memmove(block.address, before.address, ctypes.sizeof(block))
        step.slots, step.kv_slots, step.tokens, step.parents, step.depths = (
            part.data_ptr() for part in given
        )
        frame.own, frame.stream = step.kv_slots, self.builder.scratch.at("stream")
        frame.parents = frame.above = step.parents
        step.features = self.norm.block.out = features.data_ptr()
        if self.reads_features:
            self.logits.block.x = features.data_ptr()
        self.embed.block.tokens, self.logits.block.y = step.tokens, logits.data_ptr()
        rotation = self._rotation(slots, tree)
        if rotation is not None:
            layers.rotate(frame, rotation)
        self.program.run(n, b, b)
        outputs, scale = self.parts.logits.weight.shape[0], self.parts.logits_scale
        if outputs != self.width:
            logits = logits[..., :outputs].contiguous()
        if scale != 1.0:
            logits = logits * scale
        return Verified(tree, sized.layout, sized.positions, features, logits, self)

    def _rotation(self, slots: Tensor, tree: Tree) -> Rotation | None:
        """The angles of a step, to be kept until its end."""
        if self.parts.rotary is None:
            return None
        positions = self.table.processed[slots][:, None] + tree.depths
        return self.parts.rotary(positions.flatten(), slots.device)

    def commit(
        self, slots: Tensor, kv_slots: Tensor, verified: Verified, target: Tensor, max_depth: int
    ) -> Committed:
        tree, features = verified.tree, verified.features
        b, step, stops = len(slots), self.step, self.table.stop_tokens
        made, folded = empty_truncated(b, max_depth, slots.device), torch.empty_like(slots)
        given = (slots, kv_slots, tree.tokens, tree.parents, features, target)
        given = tuple(part.contiguous() for part in given)
        step.slots, step.kv_slots, step.tokens, step.parents, step.features, step.target = (
            part.data_ptr() for part in given
        )
        step.stops, step.num_stops, step.D = stops.data_ptr(), stops.shape[1], max_depth + 1
        step.path_nodes, step.path_tokens, step.number, step.finished, step.folded_at = (
            part.data_ptr() for part in (*made, folded)
        )
        self.committing.run(1, 1, 1)
        return Committed(made, folded)
