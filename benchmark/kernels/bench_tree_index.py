"""Times a step's work on tokens and indices: the Triton kernels beside what torch launches instead.

    PYTHONPATH=python python -m benchmark.kernels.bench_tree_index --output FILE.jsonl

Everything but matrix products, attention and recurrence: choosing tokens from a drafter's logits,
growing and cutting trees, accepting, index tables. Each is timed within a captured graph, so what
the host needs to launch it is not in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmark.lib.launches import Launch, Report, graph_us
from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.pending import PendingSize
from mamba_eagle.backend.place import Cuda
from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.backend.torch.attention import seen_by_next
from mamba_eagle.backend.triton.backend import TritonBackend
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.kernels.tree_attention.torch import pack_paths
from mamba_eagle.kernels.tree_attention.triton_masks import continue_lanes
from mamba_eagle.kernels.tree_verify import triton_rows
from mamba_eagle.kernels.tree_verify.layout import (
    Paths,
    Room,
    TreeLayout,
    free_rows,
)
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree

STEPS, TOPK, NODES, VOCAB, HIDDEN = 5, 3, 8, 131072, 4480
ROOM = Room(history=3, rows=40, max_journal=29, accepts=STEPS + 1)
BATCHES = (1, 8, 32)
LATER = 1 << 30  # output tokens left: no launch of a benchmark ends a request


class Inputs:
    """Of a step of ``batch`` requests, as ``backend`` runs it."""

    def __init__(self, batch: int, backend: Backend) -> None:
        torch.manual_seed(0)
        device = backend.device
        self.batch, self.backend = batch, backend
        self.logits = (4 * torch.randn(batch * TOPK, VOCAB, device=device)).bfloat16()
        self.best = []
        for lanes in (1, *[TOPK] * (STEPS - 1)):
            values = -3 * torch.rand(batch, lanes, TOPK, device=device)
            tokens = torch.randint(VOCAB, values.shape, device=device)
            self.best.append(TopTokens(values.sort(dim=2, descending=True).values, tokens))
        self.table = RequestTable(batch, 4096, device)
        self.table.remaining.fill_(LATER)
        self.slots = torch.arange(batch, device=device)
        self.tree = self.grow()
        self.target = self.tree.tokens.gather(1, self.tree.parents)
        self.kv_slots = torch.arange(batch * NODES, device=device).view(batch, NODES)
        self.above = torch.zeros(batch, TOPK, dtype=torch.int64, device=device)
        places = ROOM.history + ROOM.rows + ROOM.accepts
        path = torch.arange(places, device=device).repeat(batch, 1)
        journal_len = torch.full((batch,), ROOM.max_journal // 2, device=device)
        self.paths = Paths(self.table.state_slot, path, journal_len)
        wide = {"device": device, "dtype": torch.bfloat16}
        self.feature = torch.randn(batch, ROOM.rows, HIDDEN, **wide)
        self.saved, self.made = self.feature[:, 0].clone(), self.feature[:, :NODES].clone()
        self.accepted = Truncated(
            nodes=torch.arange(STEPS + 1, device=device).repeat(batch, 1),
            tokens=torch.zeros(batch, STEPS + 1, dtype=torch.int64, device=device),
            count=torch.full((batch,), 3, device=device),
            finished=torch.zeros(batch, dtype=torch.bool, device=device),
        )

    def top(self) -> object:
        return self.backend.top_log_probs(self.logits, TOPK)

    def grow(self) -> Tree:
        grown = self.backend.candidates(self.table.last_token, TOPK, STEPS)
        for best in self.best:
            grown.expand(best)
        return grown.select(NODES)

    def accept(self) -> None:
        backend = self.backend
        accepted = backend.accept_tokens(self.table, self.slots, self.tree, self.target, STEPS)
        backend.commit_tokens(self.table, self.slots, self.kv_slots, accepted)
        self.table.processed.zero_()  # with both backends: a graph repeats this

    def masks(self) -> object:
        return pack_paths(self.tree.ancestors)

    def lanes(self) -> None:
        seen = None
        for used in range(0, TOPK * (STEPS - 1), TOPK):
            seen = continue_lanes(self.above, seen, used, 100, TOPK * (STEPS - 1)).masks

    def torch_lanes(self) -> None:
        seen = None
        for _ in range(STEPS - 1):
            seen = seen_by_next(seen, self.above)
            pack_paths(seen)

    def rows(self, begin: Callable[..., TreeLayout], accept: Callable[..., None]) -> None:
        tree, accepted = self.tree, self.accepted
        step = begin(self.slots, tree.parents, tree.ancestors, self.paths, ROOM)
        tables = (self.paths, ROOM, self.feature, self.saved)
        accept(step, accepted.nodes, accepted.count, *tables, self.made)
        self.paths.journal_len.fill_(ROOM.max_journal // 2)  # with both backends, as above

    def pending(self) -> Launch:
        size = PendingSize(28, 0, torch.bfloat16, padding_slot=0)
        waiting = self.backend.pending_entries(self.table, size)

        def step() -> None:
            waiting.append(self.slots, self.accepted, self.made, lambda features: features[:, :0])
            waiting.take(self.slots, None, STEPS + 1)
            waiting.processed.zero_()  # with both backends, as above

        return step

    def parts(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Name and launches."""
        triton = self.backend.name == "triton"
        yield "top_tokens", self.top
        yield "tree", self.grow
        yield "accept", self.accept
        yield "masks", self.masks
        yield "lane_masks", self.lanes if triton else self.torch_lanes
        rows = (triton_rows.begin_rows, triton_rows.accept_rows)
        yield "rows", partial(self.rows, *(rows if triton else (begin_rows, accept_rows)))
        yield "pending", self.pending()


def begin_rows(
    slots: Tensor, parents: Tensor, ancestors: Tensor, paths: Paths, room: Room
) -> TreeLayout:
    """As triton_rows.begin_rows, in torch."""
    h, path, length = room.history, paths.path[slots], paths.journal_len[slots]
    offsets = torch.arange(h, device=slots.device)
    return TreeLayout(
        slots=slots,
        state_slots=paths.state_slot[slots],
        journal=path[:, h : h + room.max_journal] - h,
        journal_len=length,
        rows=free_rows(path, length, h, room.rows, parents.shape[1]),
        parents=parents,
        ancestors=pack_paths(ancestors)[..., 0],
        tail=path.gather(1, length[:, None] + offsets),
        fold=length + room.accepts > room.max_journal,
    )


def accept_rows(
    step: TreeLayout,
    nodes: Tensor,
    count: Tensor,
    paths: Paths,
    room: Room,
    feature: Tensor,
    saved: Tensor,
    features: Tensor,
) -> None:
    """As triton_rows.accept_rows, in torch; path entries past the accepted ones are
    meaningless."""
    assert step.fold is not None
    h, slots, fold = room.history, step.slots, step.fold[:, None]
    # the journal's last row; of an empty journal any row, whose feature is not used
    last = step.journal.gather(1, (step.journal_len - 1).clamp(min=0)[:, None])[:, 0].clamp(min=0)
    moved = fold & (step.journal_len > 0)[:, None]
    made, before = feature[slots, last], saved[step.state_slots]
    saved[step.state_slots] = torch.where(moved, made, before)
    feature[slots[:, None], step.rows] = features.to(feature.dtype)

    offsets = torch.arange(h, device=slots.device)
    history = paths.path[slots[:, None], offsets]
    paths.path[slots[:, None], offsets] = torch.where(fold, step.tail, history)
    ends = torch.where(step.fold, 0, step.journal_len)
    columns = h + ends[:, None] + torch.arange(nodes.shape[1], device=slots.device)
    paths.path[slots[:, None], columns] = step.rows.gather(1, nodes) + h
    paths.journal_len[slots] = ends + count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="append JSON lines to this file")
    results = Report(parser.parse_args().output)
    place = Cuda(torch.device("cuda"))
    backends = (TritonBackend(place, torch.bfloat16, False), Backend(place, torch.bfloat16))
    for batch in BATCHES:
        for backend in backends:
            inputs = Inputs(batch, backend)
            for part, launch in inputs.parts():
                num_bytes = inputs.logits.nbytes if part == "top_tokens" else None
                fields = {"mode": part, "path": backend.name, "batch": batch, "nodes": NODES}
                label, us = f"{part} {backend.name} {batch}", graph_us([launch])
                results.add(label, "kernel_tree_index_us", us, num_bytes, **fields)


if __name__ == "__main__":
    main()
