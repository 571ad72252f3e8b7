"""Drafting for greedy requests without Python between the kernels.

A depth of the tree is one program: the inputs of its lanes, the head's layers, logits, the best
tokens, and the next lanes. What it computes is what ``ModelDrafter`` does depth by depth, bit by
bit: the same kernels, in the same order.

    take ─ inputs ─ entry ─ layers            the entries that wait, rows: b · longest
    outputs ─ logits ─ best ─ expand          of the last entries, rows: b
    lanes ─ inputs ─ … ─ best ─ expand        for each further depth, rows: b · topk
    select                                    the trees
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.backend.programs import DraftPools, Network
from mamba_eagle.core import TreeShape
from mamba_eagle.cpu import abi
from mamba_eagle.cpu.drafting import room_for_trees
from mamba_eagle.cpu.programs.calls import Call, program_of
from mamba_eagle.cpu.programs.embeddings import GroupedRows, StoredRows, stored_rows
from mamba_eagle.cpu.programs.layers import Builder, normed_by, residuals_of
from mamba_eagle.cpu.programs.products import is_called, multiplies, width_of
from mamba_eagle.cpu.spans import drafts as spans
from mamba_eagle.cpu.team import Series
from mamba_eagle.layers.layer import Residual
from mamba_eagle.tree.candidates import likely_nodes
from mamba_eagle.tree.tree import Tree

NS_PER_LOGIT = 1  # that finding the best of them takes


def draft_program(head: Network, pools: DraftPools, scheme: Any) -> DraftProgram | None:
    """None: some part of the head has no program."""
    rows, steps = stored_rows(head.embedding), residuals_of(head.layers)
    fits = (
        rows is not None
        and steps is not None
        and pools.kv.k.dtype == torch.float32
        and pools.kv.num_layers > 0
        and head.norm.rounding is None
        and head.entry is not None
        and is_called(head.entry)
        and multiplies(head.logits)
    )
    if not fits:
        return None
    assert rows is not None and steps is not None
    return DraftProgram(head, steps, rows, pools, scheme)


class DraftProgram:
    """The programs of a head, and the memory that they share."""

    def __init__(
        self,
        head: Network,
        steps: Sequence[Residual],
        rows: StoredRows | GroupedRows,
        pools: DraftPools,
        scheme: Any,
    ) -> None:
        """scheme: the state scheme of the drafter's layers."""
        self.pools, self.rows = pools, rows
        self.frame, self.drafts = abi.Frame(), abi.Drafts()
        self.builder = Builder(self.frame, scheme, pools.kv)
        self._keep_tables()
        entry, outputs = self._entry_calls(head, steps), self._output_calls(head, pools.shape.topk)
        alone = (spans.TAKE, spans.LANES, spans.SELECT)
        take, lanes, select = (Call(kernel, self.drafts, units=1) for kernel in alone)
        self.scratch = self.builder.scratch
        self.calls = [*self.builder.calls, take, lanes, select]  # programs know their addresses
        self.select = program_of("the choice of drafts", [select])
        self.root = program_of("the drafter's outputs", outputs)
        self.entries = program_of("the drafter's entries", [take, *entry])
        self.lanes = program_of("the drafter's depths", [lanes, *entry, *outputs])
        deeper = [self.lanes] * (pools.shape.depth - 1)
        doubts = self.drafts.address + abi.Drafts.doubts.offset
        self.depths = Series([self.entries, self.root, *deeper], doubts)

    # ── the calls ──

    def _shared(self, kernel: Any, block: Any, work: int) -> Call:
        """A call whose units are rows."""
        block.drafts = self.drafts.address
        return self.builder.call(kernel, block, work_per_row=work)

    def _entry_calls(self, head: Network, steps: Sequence[Residual]) -> list[Call]:
        """From row_tokens and row_features to the residual stream."""
        build, size = self.builder, head.entry.weight.shape[0]
        columns = head.entry.weight.shape[1]
        embed = self.rows.call(size, columns, head.scale)
        embed.lies(out="inputs")
        embed.block.tokens = self.drafts.row_tokens
        build.calls.append(embed)
        join = self._shared(spans.JOIN, abi.Join(columns=columns), size // 8)
        join.lies(x="inputs")
        build.rounded(join, head.entry)
        build.product(head.entry, "inputs", "made")
        bias = head.entry.bias
        added = np.zeros(size, np.float32) if bias is None else bias.detach().float().numpy()
        own = abi.Stream(size=size, columns=width_of(head.entry))
        stream = build.call(spans.STREAM, own, work_per_row=size // 8)
        stream.lies(made="made")
        stream.keep(bias=np.ascontiguousarray(added))
        for step in steps:
            build.add(step)
        build.scratch.want("stream", size * 4)
        return list(build.calls)

    def _output_calls(self, head: Network, topk: int) -> list[Call]:
        """From the rows of the stream that are wanted to the next lanes."""
        build, size = self.builder, head.norm.weight.shape[0]
        before = len(build.calls)
        normed = self._shared(spans.OUTPUTS, abi.Outputs(size=size), size)
        normed_by(normed, head.norm)
        normed.lies(out="outputs")
        build.scratch.want("outputs", size * 4)
        build.rounded(normed, head.logits)
        build.product(head.logits, "outputs", "logits")
        tokens = head.logits.weight.shape[0]
        own = abi.Best(columns=width_of(head.logits), tokens=tokens)
        self._shared(spans.BEST, own, tokens * NS_PER_LOGIT).lies(logits="logits")
        for name in ("best", "log_probs"):
            build.scratch.want(name, topk * 8)
        build.calls.append(Call(spans.EXPAND, self.drafts, units=1))
        return list(build.calls[before:])

    # ── the memory ──

    def _keep_tables(self) -> None:
        """Addresses that stay, and room for indices."""
        drafts, (table, entries, kv, most, shape, _) = self.drafts, self.pools
        requests, drafts.positions = table.kv_slots.shape
        drafts.width, drafts.size = entries.features.shape[1:]
        candidates = 1 + shape.topk + max(shape.depth - 1, 0) * shape.topk**2
        drafts.assign(
            frame=self.frame.address, R=requests, padding=kv.padding_slot, max_lanes=most,
            candidates=candidates,
        )  # fmt: skip
        drafts.point(
            table=table.kv_slots, processed=table.processed, last_token=table.last_token,
            remaining=table.remaining, tokens=entries.tokens, features=entries.features,
            pending=entries.pending, done=entries.processed, least=self.pools.min_probability,
        )  # fmt: skip
        longest = max(drafts.width, most)  # of a request, in any pass
        room = dict.fromkeys(("own", "parents", "row_tokens", "row_features", "wanted"), longest)
        room |= {"prefix": 1, "lane_parents": most}
        room |= dict.fromkeys(("all_tokens", "all_parents", "all_scores"), candidates)
        lanes = ("numbers", "scores", "lanes_above", "lane_tokens", "order")
        room |= dict.fromkeys(lanes, shape.topk)
        self._indices = np.zeros(requests * sum(room.values()), np.int64)
        at = self._indices.ctypes.data
        for name, each in room.items():
            setattr(drafts, name, at)
            if name == "all_scores":
                self._scores = self._indices[(at - self._indices.ctypes.data) // 8 :]
            at += requests * each * 8

    def _place(self, rows: int) -> None:
        self.scratch.grow(rows)
        for call in self.calls:
            call.place(self.scratch)
        self.frame.stream, self.drafts.outputs = map(self.scratch.at, ("stream", "outputs"))
        self.drafts.best, self.drafts.log_probs = map(self.scratch.at, ("best", "log_probs"))

    def _kept(self, nodes: int) -> int:
        drafts, least = self.drafts, float(self.pools.min_probability[0])
        b, candidates = drafts.requests, drafts.candidates
        scores = self._scores.view(np.float32)[: b * candidates].reshape(b, candidates)
        return likely_nodes(scores[:, : drafts.seen], least, nodes)

    # ── a step ──

    def trees(self, slots: Tensor, shape: TreeShape, longest: int) -> Tree:
        b, topk = len(slots), shape.topk
        rows = b * max(longest, topk)
        if rows > self.scratch.rows:
            self._place(rows)
        slots, drafts = slots.contiguous(), self.drafts
        drafts.slots, drafts.requests, drafts.longest = slots.data_ptr(), b, longest
        drafts.topk = topk
        self.entries.prepare(b * longest, b, b)
        self.root.prepare(b, b, b)
        self.lanes.prepare(b * topk, b, b)
        self.depths.run(1 + shape.depth)
        drafts.nodes = nodes = self._kept(shape.nodes)
        tree = room_for_trees(b, nodes)
        drafts.tree_tokens, drafts.tree_parents, drafts.tree_depths = map(Tensor.data_ptr, tree[:3])
        drafts.tree_ancestors, drafts.tree_scores = map(Tensor.data_ptr, tree[3:])
        self.select.run(1, 1, 1)
        return tree
