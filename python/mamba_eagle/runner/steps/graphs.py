"""Decode steps as CUDA graphs: the host launches one to four instead of hundreds of kernels.

A graph repeats the same kernels on the same memory, so there are graphs for each kind of step. A
kind is a tree shape, a batch size (a batch takes the next larger size of a ladder), whether any
request takes more than an argmax (then drafts use the sampler's noise, and tokens are counted),
whether any has an adapter, whether the drafter observes the accepted tokens, and whether the host
needs the trees before they are verified, because a request has a grammar. Batches are padded with
requests that have no tokens left to generate and that use a request slot, a state slot and a KV
slot which no real request ever gets, so padding does not affect any request.

    inputs → [ draft → verify → sample → accept, commit ] → outcome
    inputs → [ draft → verify ] → logits → [ sample ] → target → [ accept, commit ] → …    plain
    inputs → [ draft ] → [ verify ] → masks, sampler → …                           with a grammar

A plain step is the same with and without a grammar, which may choose in place of its sampler.
With pipeline stages there are four, and messages between graphs. Other steps may be executed
between the parts of a step there: what it has in the graphs' memory is then saved, and comes back
before its next part (``GraphedSteps.occupy``).

Nothing is sampled in graphs, and operations are launched one by one, where the backend does not
sample in kernels, or where the tokens are chosen elsewhere. The graphs of a kind run back to
back, or as if they did, so all graphs share one memory pool.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mamba_eagle.backend.programs import Committed, Verified
from mamba_eagle.core import PLAIN, TreeShape
from mamba_eagle.drafting.base import StepPart
from mamba_eagle.message import DecodeBatch
from mamba_eagle.parallel.groups import Window
from mamba_eagle.runner.sampling_state import BatchNoise
from mamba_eagle.runner.steps.decode_step import DecodeStep, Drafted
from mamba_eagle.tree.tree import Tree, empty_trees

log = logging.getLogger("mamba_eagle.runner")


class Kind(NamedTuple):
    """Steps of the same kind consist of the same kernels."""

    shape: TreeShape
    batch: int  # requests, padding included
    sampled: bool  # some request takes more than an argmax
    adapted: bool  # some request has an adapter
    drafter_commits: bool
    stop_tokens: int  # width of the stop token table, which may grow
    # draft and verify are two graphs, between which trees are sent to the host, which makes the
    # masks of grammars while the device verifies, or to other stages
    apart: bool = False


def batch_ladder(max_batch: int) -> list[int]:
    """Batch sizes with graphs of their own, largest first; less than a third of a batch is
    padding."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64]
    sizes += range(80, 161, 16)
    sizes += range(192, max(max_batch, 192) + 32, 32)
    return sorted({max_batch, *(size for size in sizes if size < max_batch)}, reverse=True)


def memory_of(parts: Any) -> list[Tensor]:
    """The memory of all tensors in nested tuples, each once, [bytes] uint8. Tensors may be views
    that overlap."""
    found: dict[int, Tensor] = {}
    waiting = [parts]
    while waiting:
        part = waiting.pop()
        if isinstance(part, tuple):
            waiting += part
        elif part is not None and (x := torch.as_tensor(part)).numel():
            memory = x.untyped_storage()
            empty = torch.empty(0, dtype=torch.uint8, device=x.device)
            found[memory.data_ptr()] = empty.set_(memory)
    return list(found.values())


class GraphedRun:
    """A step of one batch, whose requests are the first ones of the graph's batch."""

    def __init__(self, graph: _Graph, batch: DecodeBatch, part: StepPart) -> None:
        self.graph, self.batch, self.part, self.b = graph, batch, part, len(batch.slots)
        self.graphs, self.chooser = graph.graphs, graph.step.chooser
        self.memory: list[Tensor] = []  # what a later part needs of the graphs' memory
        self.saved: list[Tensor] = []
        self.has_verified = False
        self.samples = graph.samples  # ``commit`` needs no tokens
        self.slots = graph.slots[: self.b]
        self.verified = graph.verified.first(self.b)

    def draft(self) -> Drafted:
        """Draft trees; if no grammar needs them before, they are there after ``verify`` only."""
        self.graphs.occupy(self)
        if self.graph.kind.apart:
            self.graph.load(self.batch, self.part)
            self.graph.draft.replay()
            if self.part.shape != PLAIN:
                self.chooser.relay(self.graph.verified.tree)
        return Drafted(self.verified.tree, self.graph.kv_slots[: self.b])

    def resume(self) -> None:
        """Before anything of this step is read, since others may have been executed meanwhile."""
        self.graphs.occupy(self)

    def leave(self) -> None:
        """Other steps are executed before the next part of this one."""
        self.memory = self.graph.memory(self.has_verified)
        self.saved = [torch.empty_like(part) for part in self.memory]
        torch._foreach_copy_(self.saved, self.memory)

    def come_back(self) -> None:
        if self.saved:
            torch._foreach_copy_(self.memory, self.saved)

    def verify(self, drafted: Drafted) -> Verified:
        """Run the target on the trees, which are where the graph has them."""
        graph, stages = self.graph, self.chooser.stages
        if not graph.kind.apart:
            graph.load(self.batch, self.part)
        if graph.arrives is not None:
            graph.arrives.copy_(stages.take(graph.arrives))
        graph.verify.replay()
        if graph.leaves is not None:
            stages.hand_on(graph.leaves.clone())
        self.has_verified = True
        return self.verified

    def commit(self, drafted: Drafted, verified: Verified, target: Tensor | None) -> Committed:
        """Commit the accepted nodes. target: [b, T] int64, the token sampled at each node; None:
        sample them."""
        if not self.graph.whole:  # else that is done
            if target is not None:
                self.graph.target[: self.b] = target
            else:
                self.graph.sample.replay()
                self.chooser.tell(self.graph.target[: self.b])
            self.graph.commit.replay()
        self.graphs.occupant = None
        committed = self.graph.committed.first(self.b)
        counted = self.graph.counts
        step = self.graph.step
        step.observe_on_host(self.slots, verified, committed.accepted, self.part, counted)
        return committed


class _Graph:
    """The graphs of a kind, and the memory of their inputs and outputs."""

    def __init__(self, kind: Kind, part: StepPart, graphs: GraphedSteps) -> None:
        """part: the drafter's part in all steps of this kind."""
        self.kind, self.part, self.step, self.graphs = kind, part, graphs.step, graphs
        self.place = graphs.place
        step = self.step
        self.samples = step.chooser.samples_in_graphs(kind.sampled)
        self.counts = self.samples and kind.sampled
        # whether no step gets its tokens from elsewhere: ``verify`` is all of it
        self.whole = self.samples and not kind.apart and kind.shape != PLAIN
        self.padding = [graphs.padded_slot, *[graphs.step.kv.padding_slot] * kind.shape.nodes]
        self.inputs = self.place.to_device([self.padding] * kind.batch)
        self.slots = self.inputs[:, 0].clone()
        self.kv_slots = self.inputs[:, 1:].clone()
        self.target = torch.zeros_like(self.kv_slots)
        self.logits = graphs.logits[: self.target.numel()]
        self.tree: Tree | None = None  # what the host drafts
        if not (step.drafter.on_device or kind.shape == PLAIN):
            self.tree = empty_trees(kind.batch, kind.shape.nodes, self.place.device)

        # Compiles kernels; runs on padding alone. Stages may differ in which kinds of steps they
        # have: they exchange nothing here.
        self._step()
        self.recorded: list[torch.cuda.CUDAGraph | NoGraph] = []
        if self.whole:
            self.verify = self._record(self._step)
            return
        if kind.apart:
            self.draft = self._record(self._draft)
            self.verify = self._record(self._verify)
        else:
            self.verify = self._record(self._draft_and_verify)
        if self.samples:
            self.sample = self._record(self._sample)
        self.commit = self._record(self._commit)

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | NoGraph:
        self.recorded.append(self.graphs.record(work))
        return self.recorded[-1]

    def reset(self) -> None:
        """Forget what was captured."""
        for graph in self.recorded:
            graph.reset()

    def works(self) -> list[Callable[[], None]]:
        """What the graphs repeat, in order."""
        sample = [self._sample] if self.samples else []
        return [self._draft, self._verify, *sample, self._commit]

    def _draft(self) -> None:
        self.slots.copy_(self.inputs[:, 0])
        self.kv_slots.copy_(self.inputs[:, 1:])
        self.drafted = self.tree
        if self.drafted is None:
            self.drafted = self._drafted(self.slots, self.kv_slots, self.part)

    def _drafted(self, slots: Tensor, kv_slots: Tensor, part: StepPart) -> Tree:
        noise = BatchNoise(self.step.sampling, slots) if self.kind.sampled else None
        return self.step.draft(slots, kv_slots, part, noise)

    def _verify(self) -> None:
        assert self.drafted is not None
        window = self.graphs.window
        with self.step.chooser.stages.through(window):
            self.verified = self.step.verify(
                self.slots, self.kv_slots, self.drafted, self.kind.adapted, self.logits
            )
        self.arrives, self.leaves = window.arrives, window.leaves

    def _draft_and_verify(self) -> None:
        self._draft()
        self._verify()

    def _step(self) -> None:
        for work in self.works():
            work()

    def _sample(self) -> None:
        chosen = self.step.sample(self.slots, self.verified, self.kind.sampled)
        if self.whole:  # nothing else writes it
            self.target = chosen
        else:
            self.target.copy_(chosen)

    def _commit(self) -> None:
        self.committed = self.step.commit(
            self.slots, self.kv_slots, self.verified, self.target, self.part
        )
        if self.counts:
            accepted = self.committed.accepted
            self.step.sampling.count(self.slots, accepted.tokens, accepted.count)

    def memory(self, has_verified: bool) -> list[Tensor]:
        """What a step needs after it has drafted, or verified, each [bytes] uint8."""
        return self._after_verify if has_verified else self._after_draft

    @functools.cached_property
    def _after_draft(self) -> list[Tensor]:
        return memory_of((self.slots, self.kv_slots, self.verified.tree))

    @functools.cached_property
    def _after_verify(self) -> list[Tensor]:
        return memory_of((self.slots, self.kv_slots, self.verified))

    def load(self, batch: DecodeBatch, part: StepPart) -> None:
        """Copy the inputs to the device, with the trees if the host drafts them."""
        inputs = [[slot, *nodes] for slot, nodes in zip(batch.slots, batch.kv_slots)]
        inputs += [self.padding] * (self.kind.batch - len(inputs))
        self.inputs.copy_(self.place.host_tensor(inputs), non_blocking=True)
        if self.tree is not None:
            own = self.inputs[: len(batch.slots)]
            slots, kv_slots = own[:, 0].contiguous(), own[:, 1:].contiguous()
            drafted = self._drafted(slots, kv_slots, part)
            for kept, new in zip(self.tree, drafted):
                kept[: len(new)] = new


class _CatchUp:
    """A graph of the drafter's pass over tokens that plain steps added, for ``batch`` requests."""

    def __init__(self, batch: int, graphs: GraphedSteps) -> None:
        self.padding, self.drafter = graphs.padded_slot, graphs.step.drafter
        self.place = graphs.place
        self.slots = self.place.to_device([self.padding] * batch)
        self._work()  # compiles kernels; runs on padding alone
        self.graph = graphs.record(self._work)

    def _work(self) -> None:
        self.drafter.catch_up(self.slots)

    def run(self, slots: Sequence[int]) -> None:
        """slots: request slots, at most as many as the graph's batch."""
        padded = [*slots, *[self.padding] * (len(self.slots) - len(slots))]
        self.slots.copy_(self.place.host_tensor(padded), non_blocking=True)
        self.graph.replay()


class GraphedSteps:
    """Graphs by kind of step; each is captured by ``warm_up`` or when it is first needed."""

    done = "captured"  # what ``warm_up`` has done with them, for the log

    def __init__(self, step: DecodeStep, padded_slot: int, max_nodes: int, vocab: int) -> None:
        """padded_slot: the request slot of padding, which follows all others; so it is also the
        largest batch size. max_nodes: the largest tree. vocab: the width of the logits."""
        self.step, self.padded_slot, self.place = step, padded_slot, step.backend.place
        self.device = self.place.device
        self.ladder = batch_ladder(padded_slot)
        self.logits = torch.empty(
            padded_slot * max_nodes, vocab, dtype=step.model.logits_dtype, device=self.device
        )
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.device)
        self.graphs: dict[Kind, _Graph] = {}
        self.window = Window()
        self.occupant: GraphedRun | None = None  # whose results are in the graphs' memory
        self.catching_up: dict[int, _CatchUp] = {}  # by batch size
        self.num_bytes = self.logits.nbytes

    def warm_up(self, shapes: list[TreeShape]) -> None:
        """Capture all kinds of steps of these shapes, for all batch sizes of the ladder."""
        began, free = time.perf_counter(), torch.cuda.mem_get_info(self.device)[0]
        drafter, padding = self.step.drafter, [self.padded_slot]
        adapted = (False, True) if self.step.adapters.num_slots else (False,)
        kinds = list(itertools.product((False, True), adapted))
        for batch in self.ladder:  # the largest first
            for shape in reversed(shapes):
                for kind in kinds:
                    self._capture(padding * batch, shape, *kind)
            if drafter.on_device and drafter.catches_up:
                self._catch_up(padding * batch)
        # and plain steps of untracked requests
        drafter.untrack(padding)
        for batch in self.ladder:
            for kind in kinds:
                self._capture(padding * batch, PLAIN, *kind)
        drafter.release(padding, [-1])
        self.num_bytes = self.logits.nbytes + free - torch.cuda.mem_get_info(self.device)[0]
        took, size = time.perf_counter() - began, self.num_bytes / 1e9
        what = "%d kinds of steps %s in %.1f s, %.2f GB with the logits"
        log.info(what, len(self.graphs), self.done, took, size)

    def prepare(self, batch: DecodeBatch) -> GraphedRun:
        """Prepare a step, capturing its kind if it is new; not part of its measured time."""
        sampled = self.step.sampling.any_need(batch.slots)
        adapted = self.step.adapters.any(batch.slots)
        graph, part = self._capture(batch.slots, batch.shape, sampled, adapted)
        return GraphedRun(graph, batch, part)

    def _capture(
        self, slots: list[int], shape: TreeShape, sampled: bool, adapted: bool
    ) -> tuple[_Graph, StepPart]:
        part = self.step.drafter.prepare(slots, shape)
        if part.needs_catch_up:
            self._catch_up(part.needs_catch_up)
        commits, stops = self.step.drafter_commits(part), self.step.table.stop_tokens.shape[1]
        size, apart = self._size(slots), self._apart(slots, shape)
        kind = Kind(shape, size, sampled, adapted, commits, stops, apart)
        if kind not in self.graphs:
            self.graphs[kind] = _Graph(kind, part, self)
        return self.graphs[kind], part

    def _apart(self, slots: list[int], shape: TreeShape) -> bool:
        has_grammar = shape != PLAIN and self.step.constraints.any(slots)
        return has_grammar or self.step.chooser.stages.size > 1

    def occupy(self, run: GraphedRun | None) -> None:
        """Before a part of ``run``, or of no step, is executed."""
        if run is self.occupant:
            return
        if self.occupant is not None:
            self.occupant.leave()
        if run is not None:
            run.come_back()
        self.occupant = run

    def _catch_up(self, slots: Sequence[int]) -> None:
        self.occupy(None)
        if not self.step.drafter.on_device:
            self.step.drafter.catch_up(self.place.to_device(slots))
            return
        size = self._size(slots)
        if size not in self.catching_up:
            self.catching_up[size] = _CatchUp(size, self)
        self.catching_up[size].run(slots)

    def _size(self, slots: Sequence[int]) -> int:
        return min(size for size in self.ladder if size >= len(slots))

    @property
    def num_graphs(self) -> int:
        """Kinds of steps and sizes of catching up that are captured."""
        return len(self.graphs) + len(self.catching_up)

    def close(self) -> None:
        """Forget all graphs, once the device is done with them."""
        torch.cuda.synchronize(self.device)
        for steps in self.graphs.values():
            steps.reset()
        for catching_up in self.catching_up.values():
            catching_up.graph.reset()

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | NoGraph:
        """Capture the kernels that ``work`` launches, without running them."""
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


class RehearsedSteps(GraphedSteps):
    """The same works in the same order, for what they launch: nothing is captured."""

    done = "rehearsed"

    def record(self, work: Callable[[], None]) -> NoGraph:
        return NoGraph()


class NoGraph:
    """In the place of a captured one."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...
