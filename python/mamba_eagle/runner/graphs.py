"""Decode steps as CUDA graphs: a step of hundreds of kernels is two launches for the host.

A graph repeats the same kernels on the same memory, so there is one for each kind of step: tree
shape, number of requests (a ladder of them; a batch takes the next larger one), whether drafts
follow the sampler's noise, and whether the drafter has a part in it. What pads a batch stands in a
request slot, a state slot and a KV slot that nobody owns, and has no token left to make: it changes
nothing of a request's.

    inputs → [ draft → verify ] → logits → sampler, launch by launch → [ accept, commit ] → outcome

The two parts of a kind are run one right after the other, so all graphs share one pool of memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from mamba_eagle.core import PLAIN, TreeShape
from mamba_eagle.message import DecodeBatch
from mamba_eagle.runner.decode_step import DecodeStep, Outcome, Verified
from mamba_eagle.runner.transfer import host_tensor, to_device
from mamba_eagle.tree.tree import Tree

log = logging.getLogger("mamba_eagle.runner")

Made = TypeVar("Made")


class Kind(NamedTuple):
    """Steps that are the same work."""

    shape: TreeShape
    batch: int
    noisy: bool
    drafter_commits: bool
    stop_tokens: int  # width of their table, which grows


def batch_ladder(most: int) -> list[int]:
    """Batch sizes that have graphs of their own, falling: the steps are at most a third."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64]
    sizes += range(80, 161, 16)
    sizes += range(192, max(most, 192) + 32, 32)
    return sorted({most, *(size for size in sizes if size < most)}, reverse=True)


class GraphedRun:
    """A step of one batch: its rows are the first of the graph's."""

    def __init__(self, graph: _Graph, batch: DecodeBatch) -> None:
        self.graph, self.batch, self.b = graph, batch, len(batch.slots)
        self.slots = graph.slots[: self.b]
        self.verified = graph.verified.rows(self.b)

    def verify(self) -> Verified:
        """Draft, and what the target says of it."""
        self.graph.load(self.batch)
        return self.verified

    def commit(self, target: Tensor) -> Outcome:
        """target [b, T] int64, what the target samples at each node."""
        self.graph.target[: self.b] = target
        self.graph.commit.replay()
        outcome = self.graph.outcome.rows(self.b)
        self.graph.step.told(self.slots, self.verified, outcome.accepted)
        return outcome


class _Graph:
    """The two graphs of a kind, and the memory where their inputs and outputs are."""

    def __init__(self, kind: Kind, graphs: GraphedSteps) -> None:
        self.kind, self.step = kind, graphs.step
        self.drafts = self.step.drafter.on_device or kind.shape == PLAIN
        self.padding = [graphs.padded_slot, *[graphs.step.kv.padding_slot] * kind.shape.nodes]
        device = graphs.logits.device
        self.inputs = to_device([self.padding] * kind.batch, device=device)
        self.slots = self.inputs[:, 0].clone()
        self.kv_slots = self.inputs[:, 1:].clone()
        self.target = torch.zeros_like(self.kv_slots)
        self.logits = graphs.logits[: self.target.numel()]
        self.tree: Tree | None = None
        if not self.drafts:
            self.tree = _empty_tree(*self.target.shape, device)

        for work in (self._verify, self._commit):  # compiles kernels; padding changes nothing
            work()
        self.verify = graphs.record(self._verify)
        self.commit = graphs.record(self._commit)

    def _verify(self) -> None:
        self.slots.copy_(self.inputs[:, 0])
        self.kv_slots.copy_(self.inputs[:, 1:])
        tree = self.tree
        if tree is None:
            shape, noisy = self.kind.shape, self.kind.noisy
            tree = self.step.draft(self.slots, self.kv_slots, shape, noisy)
        self.verified = self.step.verify(self.slots, self.kv_slots, tree, self.logits)

    def _commit(self) -> None:
        steps = self.kind.shape.depth
        self.outcome = self.step.commit(
            self.slots, self.kv_slots, self.verified, self.target, steps
        )

    def load(self, batch: DecodeBatch) -> None:
        """Draft and verify."""
        rows = [[slot, *nodes] for slot, nodes in zip(batch.slots, batch.kv_slots)]
        rows += [self.padding] * (self.kind.batch - len(rows))
        self.inputs.copy_(host_tensor(rows, device=self.inputs.device), non_blocking=True)
        if self.tree is not None:
            inputs = self.inputs[: len(batch.slots)]
            slots, kv_slots = inputs[:, 0].contiguous(), inputs[:, 1:].contiguous()
            drafted = self.step.draft(slots, kv_slots, batch.shape, self.kind.noisy)
            for own, new in zip(self.tree, drafted):
                own[: len(new)] = new
        self.verify.replay()


class _CatchUp:
    """The drafter's pass over what plain steps made, for ``batch`` requests."""

    def __init__(self, batch: int, graphs: GraphedSteps) -> None:
        self.padding, self.drafter = graphs.padded_slot, graphs.step.drafter
        self.slots = to_device([self.padding] * batch, device=graphs.logits.device)
        self._work()  # compiles kernels; padding changes nothing
        self.graph = graphs.record(self._work)

    def _work(self) -> None:
        self.drafter.catch_up(self.slots)

    def run(self, slots: list[int]) -> None:
        padded = [*slots, *[self.padding] * (len(self.slots) - len(slots))]
        self.slots.copy_(host_tensor(padded, device=self.slots.device), non_blocking=True)
        self.graph.replay()


def _empty_tree(b: int, nodes: int, device: torch.device) -> Tree:
    """Nodes that all hang on the root."""
    zeros = torch.zeros(b, nodes, dtype=torch.int64, device=device)
    own = torch.eye(nodes, dtype=torch.bool, device=device).repeat(b, 1, 1)
    own[:, :, 0] = True
    depths = zeros.clone()
    depths[:, 1:] = 1
    return Tree(zeros, zeros.clone(), depths, own, zeros.float())


class GraphedSteps:
    """Steps by kind; each is captured when it is first wanted, or by ``warm_up``."""

    def __init__(self, step: DecodeStep, padded_slot: int, max_nodes: int, vocab: int) -> None:
        """padded_slot: a request slot that nobody owns, of which there are so many before it."""
        self.step, self.padded_slot = step, padded_slot
        self.device = step.table.processed.device
        self.ladder = batch_ladder(padded_slot)
        self.logits = torch.empty(padded_slot * max_nodes, vocab, device=self.device)
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.device)
        self.graphs: dict[Kind, _Graph] = {}
        self.catching_up: dict[int, _CatchUp] = {}  # by batch size
        self.num_bytes = self.logits.nbytes

    def warm_up(self, shapes: list[TreeShape]) -> None:
        """Capture the steps of these shapes, for all batch sizes of the ladder, greedy ones."""
        began, free = time.perf_counter(), torch.cuda.mem_get_info(self.device)[0]
        for batch in self.ladder:  # the largest first
            for shape in reversed(shapes):
                self._graph([self.padded_slot] * batch, shape)
            if shapes != [PLAIN] and self.step.drafter.on_device:
                self._catch_up([self.padded_slot] * batch)
        # and plain steps of requests that the drafter does not follow
        drafter, padding = self.step.drafter, [self.padded_slot]
        drafter.untrack(padding)
        for batch in self.ladder:
            self._graph(padding * batch, PLAIN)
        drafter.release(padding, [-1])
        self.num_bytes = self.logits.nbytes + free - torch.cuda.mem_get_info(self.device)[0]
        log.info(
            "%d CUDA graphs in %.1f s, %.2f GB with the logits",
            len(self.graphs),
            time.perf_counter() - began,
            self.num_bytes / 1e9,
        )

    def prepare(self, batch: DecodeBatch) -> GraphedRun:
        """What comes before the step, and is not of its time: a kind that is new is captured."""
        return GraphedRun(self._graph(batch.slots, batch.shape), batch)

    def _graph(self, slots: list[int], shape: TreeShape) -> _Graph:
        behind = self.step.drafter.prepare(slots, shape)
        if behind:
            self._catch_up(behind)
        kind = Kind(
            shape,
            self._size(slots),
            shape != PLAIN and self.step.sampling.any_noise(slots),
            self.step.drafter_commits,
            self.step.table.stop_tokens.shape[1],
        )
        if kind not in self.graphs:
            self.graphs[kind] = _Graph(kind, self)
        return self.graphs[kind]

    def _catch_up(self, slots: list[int]) -> None:
        if not self.step.drafter.on_device:
            self.step.drafter.catch_up(to_device(slots, device=self.device))
            return
        size = self._size(slots)
        if size not in self.catching_up:
            self.catching_up[size] = _CatchUp(size, self)
        self.catching_up[size].run(slots)

    def _size(self, slots: list[int]) -> int:
        return min(size for size in self.ladder if size >= len(slots))

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """What ``work`` launches, as a graph; nothing of it is run."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self.stream):
            # other threads may use the device meanwhile
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph
