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

from mamba_eagle.backend.cpu.calls import Call, table_of
from mamba_eagle.backend.cpu.embeddings import GroupedRows, StoredRows, stored_rows
from mamba_eagle.backend.cpu.fused import (
    Builder,
    is_called,
    multiplies,
    residuals_of,
    width_of,
)
from mamba_eagle.backend.drafts import DraftPools, HeadParts
from mamba_eagle.core import TreeShape
from mamba_eagle.kernels import numba_drafts as spans
from mamba_eagle.kernels.numba_drafts import Drafts
from mamba_eagle.kernels.numba_spans import Frame
from mamba_eagle.kernels.numba_team import Program, Series
from mamba_eagle.layers.layer import Residual
from mamba_eagle.tree.candidates import kept_nodes
from mamba_eagle.tree.tree import Tree

NS_PER_LOGIT = 1  # that finding the best of them takes


def draft_program(head: HeadParts, pools: DraftPools, scheme: Any) -> DraftProgram | None:
    """None: some part of the head has no program."""
    rows, steps = stored_rows(head.embedding), residuals_of(head.layers)
    fits = (
        rows is not None
        and steps is not None
        and pools.kv.k.dtype == torch.float32
        and pools.kv.num_layers > 0
        and head.norm.rounding is None
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
        head: HeadParts,
        steps: Sequence[Residual],
        rows: StoredRows | GroupedRows,
        pools: DraftPools,
        scheme: Any,
    ) -> None:
        """scheme: the state scheme of the drafter's layers."""
        self.pools, self.rows = pools, rows
        self.frame = np.zeros(Frame.COUNT, np.int64)
        self.words = np.zeros(Drafts.COUNT, np.int64)
        self.builder = Builder(self.frame, scheme, pools.kv)
        self._keep_tables()
        entry, outputs = self._entry_calls(head, steps), self._output_calls(head, pools.shape.topk)
        take, lanes, select = map(self._alone, (spans.TAKE, spans.LANES, spans.SELECT))
        self.scratch = self.builder.scratch
        self.calls = [*self.builder.calls, take, lanes, select]  # programs know their addresses
        self.select = Program(table_of([select]))
        self.entries = Program(table_of([take, *entry]))
        self.root = Program(table_of(outputs))
        self.lanes = Program(table_of([lanes, *entry, *outputs]))
        deeper = [self.lanes] * (pools.shape.depth - 1)
        doubts = self.words[Drafts.DOUBTS :].ctypes.data
        self.depths = Series([self.entries, self.root, *deeper], doubts)

    # ── the calls ──

    def _alone(self, kernel: Any) -> Call:
        """A call of one unit."""
        call = Call(kernel, [0, 0], units=1)
        call.words[:] = self.frame.ctypes.data, self.words.ctypes.data
        return call

    def _shared(self, kernel: Any, count: int, work: int) -> Call:
        """A call whose units are rows; ``count`` words."""
        call = self.builder.call(kernel, [0] * count, work_per_row=work)
        call.words[1] = self.words.ctypes.data
        return call

    def _entry_calls(self, head: HeadParts, steps: Sequence[Residual]) -> list[Call]:
        """From ROW_TOKENS and ROW_FEATURES to the residual stream."""
        build, size = self.builder, head.entry.weight.shape[0]
        columns = head.entry.weight.shape[1]
        embed = self.rows.call(size, columns, head.scale)
        embed.scratch[1] = ("inputs", 0)
        embed.words[0] = self.words[Drafts.ROW_TOKENS]
        build.calls.append(embed)
        join = self._shared(spans.JOIN, 7, size // 8)
        join.scratch[2], join.words[3] = ("inputs", 0), columns
        build.rounded(join, 4, head.entry)
        build.product(head.entry, "inputs", "made")
        bias = head.entry.bias
        added = np.zeros(size, np.float32) if bias is None else bias.detach().float().numpy()
        stream = build.call(
            spans.STREAM, [0, size, 0, width_of(head.entry), 0], work_per_row=size // 8
        )
        stream.scratch[2] = ("made", 0)
        stream.keep(4, np.ascontiguousarray(added))
        for step in steps:
            build.add(step)
        build.scratch.want("stream", size * 4)
        return list(build.calls)

    def _output_calls(self, head: HeadParts, topk: int) -> list[Call]:
        """From the rows of the stream that are WANTED to the next lanes."""
        build, size, norm = self.builder, head.norm.weight.shape[0], head.norm
        before = len(build.calls)
        normed = self._shared(spans.OUTPUTS, 9, size)
        normed.keep(2, norm.weight.detach().float().contiguous().numpy())
        normed.keep(3, np.array([norm.eps], np.float64))
        normed.words[4] = size
        normed.scratch[5] = ("outputs", 0)
        build.scratch.want("outputs", size * 4)
        build.rounded(normed, 6, head.logits)
        build.product(head.logits, "outputs", "logits")
        tokens = head.logits.weight.shape[0]
        best = self._shared(spans.BEST, 5, tokens * NS_PER_LOGIT)
        best.scratch[2] = ("logits", 0)
        best.words[3:5] = width_of(head.logits), tokens
        for name in ("best", "log_probs"):
            build.scratch.want(name, topk * 8)
        expand = Call(spans.EXPAND, [0, 0, 0], units=1)
        expand.words[:2] = self.frame.ctypes.data, self.words.ctypes.data
        expand.keep(2, self.pools.min_probability)
        build.calls.append(expand)
        return list(build.calls[before:])

    # ── the memory ──

    def _keep_tables(self) -> None:
        """Addresses that stay, and room for indices."""
        w, (table, entries, kv, most, shape, _) = self.words, self.pools
        requests, positions = table.kv_slots.shape
        w[Drafts.R], w[Drafts.POSITIONS] = requests, positions
        w[Drafts.WIDTH], w[Drafts.SIZE] = entries.features.shape[1:]
        w[Drafts.PADDING], w[Drafts.MAX_LANES] = kv.padding_slot, most
        kept = {
            Drafts.KV_SLOTS: table.kv_slots,
            Drafts.PROCESSED: table.processed,
            Drafts.LAST_TOKEN: table.last_token,
            Drafts.REMAINING: table.remaining,
            Drafts.TOKENS: entries.tokens,
            Drafts.FEATURES: entries.features,
            Drafts.PENDING: entries.pending,
            Drafts.DONE: entries.processed,
        }
        for place, tensor in kept.items():
            assert tensor.is_contiguous()
            w[place] = tensor.data_ptr()
        longest = max(entries.features.shape[1], most)  # of a request, in any pass
        candidates = 1 + shape.topk + max(shape.depth - 1, 0) * shape.topk**2
        w[Drafts.CANDIDATES] = candidates
        room = {
            Drafts.OWN: longest, Drafts.PARENTS: longest, Drafts.PREFIX: 1,
            Drafts.LANE_PARENTS: most, Drafts.ROW_TOKENS: longest, Drafts.ROW_FEATURES: longest,
            Drafts.WANTED: longest, Drafts.ALL_TOKENS: candidates,
            Drafts.ALL_PARENTS: candidates, Drafts.ALL_SCORES: candidates,
            Drafts.NUMBERS: shape.topk, Drafts.SCORES: shape.topk, Drafts.ABOVE: shape.topk,
            Drafts.LANE_TOKENS: shape.topk, Drafts.ORDER: shape.topk,
        }  # fmt: skip
        self._indices = np.zeros(requests * sum(room.values()), np.int64)
        at = self._indices.ctypes.data
        for place, each in room.items():
            w[place] = at
            at += requests * each * 8

    def _place(self, rows: int) -> None:
        self.scratch.grow(rows)
        for call in self.calls:
            call.place(self.scratch)
        self.frame[Frame.STREAM] = self.scratch.at("stream")
        self.words[Drafts.OUTPUTS] = self.scratch.at("outputs")
        self.words[Drafts.BEST] = self.scratch.at("best")
        self.words[Drafts.LOG_PROBS] = self.scratch.at("log_probs")

    # ── a step ──

    def trees(self, slots: Tensor, shape: TreeShape, longest: int) -> Tree:
        b, topk = len(slots), shape.topk
        rows = b * max(longest, topk)
        if rows > self.scratch.rows:
            self._place(rows)
        slots, w = slots.contiguous(), self.words
        w[Drafts.SLOTS : Drafts.NODES + 1] = slots.data_ptr(), b, longest, topk, shape.nodes
        self.entries.prepare(b * longest, b, b)
        self.root.prepare(b, b, b)
        self.lanes.prepare(b * topk, b, b)
        self.depths.run(1 + shape.depth)
        depth, doubts = w[Drafts.DEPTH], w[Drafts.DOUBTS]
        w[Drafts.NODES] = nodes = kept_nodes(shape, int(depth), bool(doubts))
        tree = room_for_trees(b, nodes)
        w[Drafts.TREE_TOKENS : Drafts.TREE_SCORES + 1] = [part.data_ptr() for part in tree]
        self.select.run(1, 1, 1)
        return tree


def room_for_trees(b: int, nodes: int) -> Tree:
    """Trees that are yet to be written."""
    tokens, parents, depths = torch.empty(3, b, nodes, dtype=torch.int64).unbind()
    ancestors = torch.empty(b, nodes, nodes, dtype=torch.bool)
    return Tree(tokens, parents, depths, ancestors, torch.empty(b, nodes))
