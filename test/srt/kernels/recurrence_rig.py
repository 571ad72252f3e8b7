"""Recurrences with the same bits however a token is served: what holds of every rule.

A rule's kernels run on a GPU, or as ``gluon_rig`` runs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from forms import DEVICE
from tensor_checks import Draw, relative_error
from torch import Tensor
from triton_rig import tree_layout
from verify_rig import HIDDEN, path_to, random_mixer, random_tree, truncated

from mamba_eagle.backend.place import Cuda
from mamba_eagle.backend.pools import KVPool, RequestTable, StatePool
from mamba_eagle.backend.prefill import prefill_parts
from mamba_eagle.backend.state import SchemeSize
from mamba_eagle.backend.triton.exact_backend import ExactBackend
from mamba_eagle.core import SamplingParams
from mamba_eagle.kernels.prefill_plan import PrefillPlan, Prompt, prefill_plan
from mamba_eagle.kernels.recurrence.layout import Tiles
from mamba_eagle.kernels.tree_verify.layout import Folds, Sizes, TreeLayout
from mamba_eagle.message import FirstChunk, JournalPart, PrefillItem, StateSave
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree

TILES = (None, Tiles(16, 0, 1), Tiles(8, 0, 2))
GARBAGE = 1e4  # in rows that must not be read


def same(found: Tensor, wanted: Tensor) -> bool:
    """Bit by bit."""
    return torch.equal(found, wanted) and not bool(found.isnan().any())


class Span(NamedTuple):
    """Tokens [begin, end) of a sequence, with state slots."""

    sequence: int
    begin: int
    end: int
    source: int
    saves: tuple[tuple[int, int], ...]


class Rule(ABC):
    """Kernels, and what the tokens of b sequences feed into them."""

    sizes: Sizes
    state: Tensor  # [b, H, P, N], before them
    length: int

    @property
    def batch(self) -> int:
        return len(self.state)

    def scan(self, spans: list[Span], state: Tensor, tiles: Tiles | None = None) -> list[Tensor]:
        """The outputs of each span; states go to their slots."""
        prompts, first = [], 0
        for span in spans:
            prompts.append(Prompt(first, span.end - span.begin, span.source, span.saves))
            first += span.end - span.begin
        plan = prefill_plan(prompts, partial(torch.tensor, device=DEVICE))
        y = self.prompts(spans, state, plan, tiles)
        return list(y.split([span.end - span.begin for span in spans]))

    @abstractmethod
    def prompts(
        self, spans: list[Span], state: Tensor, plan: PrefillPlan, tiles: Tiles | None
    ) -> Tensor: ...

    @abstractmethod
    def make_rows(self, W: int) -> None:
        """Of b requests."""

    @abstractmethod
    def verify(self, source: Any, layout: TreeLayout, state: Tensor, tiles: Tiles | None) -> Tensor:
        """The nodes' inputs are those of the tokens ``source``."""

    @abstractmethod
    def fold(self, folds: Folds, state: Tensor) -> None: ...


def assert_definitions_bits(rule: Rule, wanted_y: Tensor, wanted_states: Tensor) -> None:
    """A prompt of all tokens of the first sequence. wanted_y [l, H, P] and wanted_states
    [l, H, P, N], after each token: by definition."""
    state = torch.cat([rule.state, torch.zeros_like(rule.state)])
    (y,) = rule.scan([Span(0, 0, rule.length, 0, ((rule.length, 1),))], state)
    wanted, last = wanted_y.flatten(1).to(y.dtype), wanted_states[-1]
    y_error = relative_error(y.float(), wanted.double())
    state_error = relative_error(state[1], last.double())
    equal = float((state[1] == last).double().mean())
    print(f"relative error: y {y_error:.1e}, state {state_error:.1e}; equal {equal:.6f}")
    assert y_error < (1e-6 if y.dtype == torch.float32 else 1e-4) and state_error < 1e-6
    assert same(state[1], last)
    assert same(y, wanted)


def of_spans(part: Tensor, spans: list[Span]) -> Tensor:
    """[b, l, ·] -> [n, ·]"""
    return torch.cat([part[span.sequence, span.begin : span.end] for span in spans])


@dataclass
class Served:
    """A request: its state is after ``folded`` tokens, the journal's rows follow it."""

    end: int  # tokens run
    journal: list[int] = field(default_factory=list)

    @property
    def folded(self) -> int:
        return self.end - len(self.journal)


class Server:
    """Serves the sequences of ``tokens`` to the end, in pieces that chance decides.

    Every output is compared with that of one pass over the whole sequence, every state with that
    of a pass to its position.
    """

    def __init__(self, rule: Rule, nodes: int, seed: int) -> None:
        self.rule, self.nodes, self.draw = rule, nodes, Draw(seed)
        self.batch, self.length = rule.batch, rule.length
        self.max_journal = max(20, 2 * nodes)
        b, self.W = self.batch, self.max_journal + nodes
        rule.make_rows(self.W)
        self.state = torch.cat([rule.state, torch.zeros_like(rule.state)])
        spans = [Span(i, 0, self.length, i, ((self.length, b + i),)) for i in range(b)]
        self.wanted = torch.stack(rule.scan(spans, self.state))
        self.requests = [Served(0) for _ in range(b)]

    def run(self) -> None:
        self.prompt()
        while min(request.end for request in self.requests) < self.length - self.nodes:
            self.step()
            self.check_states()

    def prompt(self) -> None:
        """In chunks, with other requests or alone."""
        for _ in range(3):
            spans = []
            for i, request in enumerate(self.requests):
                count = self.draw.below(min(20, self.length // 4))
                if count:
                    save = ((count, self.batch + i),)
                    source = self.batch + i if request.end else i
                    spans.append(Span(i, request.end, request.end + count, source, save))
                    request.end += count
            if not spans:
                continue
            tiles = TILES[self.draw.below(len(TILES))]
            for span, y in zip(spans, self.rule.scan(spans, self.state, tiles)):
                assert same(y, self.wanted[span.sequence, span.begin : span.end]), (tiles, span)
        for i, request in enumerate(self.requests):
            if not request.end:
                self.state[self.batch + i] = self.state[i]

    def step(self) -> None:
        running = [i for i, r in enumerate(self.requests) if r.end <= self.length - self.nodes]
        T = min((1, 5, self.nodes)[self.draw.below(3)], self.nodes)
        tree = random_tree(len(running), T, T, self.draw.generator)
        rows, paths, picked = [], [], torch.zeros(len(running), T, dtype=torch.int64)
        for at, i in enumerate(running):
            request = self.requests[i]
            free = [row for row in range(self.W) if row not in request.journal]
            order = torch.randperm(len(free), generator=self.draw.generator)[:T]
            rows.append([free[k] for k in order.tolist()])
            paths.append(path_to(tree, at, self.draw.below(T)))
            picked[at] = torch.randint(self.length, (T,), generator=self.draw.generator)
            for depth, node in enumerate(paths[at]):
                picked[at, node] = request.end + depth
        folds = [
            len(self.requests[i].journal) > self.max_journal - self.nodes or self.draw.below(4) == 0
            for i in running
        ]
        y = self.verify(running, tree, rows, picked, folds)
        for at, i in enumerate(running):
            request, path = self.requests[i], paths[at]
            if folds[at]:
                request.journal = []
            begin = request.end
            found = y[at, path]
            assert same(found, self.wanted[i, begin : begin + len(path)]), (T, tree.parents[at])
            kept = self.draw.below(len(path) + 1, 1)
            request.journal += [rows[at][node] for node in path[:kept]]
            request.end += kept
        if self.draw.below(3) == 0:
            self.fold(running)

    def verify(self, running, tree, rows, picked, folds) -> Tensor:  # type: ignore[no-untyped-def]
        """y [b, T, H*P]; the nodes' inputs are those of the tokens ``picked``."""
        T = picked.shape[1]
        who, table = torch.tensor(running)[:, None], torch.tensor(rows)
        lengths, journal = self.journals(running)
        layout = tree_layout(
            tree, who[:, 0], self.batch + who[:, 0], table, journal, tuple(lengths),
            fold=tuple(folds),
        )  # fmt: skip
        source = (who.to(DEVICE), picked.to(DEVICE))
        tiles = TILES[self.draw.below(len(TILES))]
        y = self.rule.verify(source, layout, self.state, tiles)
        return y.view(len(running), T, -1)

    def journals(self, who: list[int]) -> tuple[list[int], Tensor]:
        lengths = [len(self.requests[i].journal) for i in who]
        journal = torch.full((len(who), self.max_journal), -7)
        for at, i in enumerate(who):
            journal[at, : lengths[at]] = torch.tensor(self.requests[i].journal)
        return lengths, journal

    def fold(self, who: list[int]) -> None:
        """A part of each journal; the rest stays."""
        lengths, journal = self.journals(who)
        kept = [self.draw.below(length + 1) for length in lengths]
        slots = torch.tensor(who)
        parts = (slots, self.batch + slots, journal, torch.tensor(kept))
        self.rule.fold(Folds(*(part.to(DEVICE) for part in parts)), self.state)
        for i, count in zip(who, kept):
            del self.requests[i].journal[:count]

    def check_states(self) -> None:
        b = self.batch
        pool = torch.cat([self.rule.state, torch.zeros_like(self.rule.state)])
        at = [(i, r.folded) for i, r in enumerate(self.requests) if r.folded]
        self.rule.scan([Span(i, 0, end, i, ((end, b + i),)) for i, end in at], pool)
        for i, end in at:
            assert same(self.state[b + i], pool[b + i]), (i, end)


class Glue:
    """What a runner has of two layers on a device, and the raw inputs of one sequence."""

    def __init__(self, config: Any, length: int) -> None:
        self.config, self.length = config, length
        self.layers = [random_mixer(self.config, i, i).to(DEVICE).bfloat16() for i in range(2)]
        self.table = RequestTable(4, 200, DEVICE)
        self.backend = ExactBackend(Cuda(DEVICE), torch.bfloat16)
        rule = self.backend.state_rounding("nearest", torch.float32, self.table)
        self.pool = StatePool(2, 9, self.config, HIDDEN, rule, torch.bfloat16, DEVICE)
        size = SchemeSize(2, HIDDEN, rows=32, nodes=8, accepts=8)
        self.scheme: Any = self.backend.state_scheme(
            "deferred", config, size, self.table, self.pool
        )
        kind = self.backend.journal_kind(self.layers, self.pool)
        own = (self.layers, self.pool, self.table, self.backend.place)
        self.journals = kind(2, 16, *own)
        self.kv = KVPool(0, 1, None, torch.bfloat16, DEVICE)
        draw = Draw(0)
        self.inputs = [
            [
                draw.normal(length, width).bfloat16().to(DEVICE)
                for width in (config.conv_dim, config.gate_size)
            ]
            for _ in self.layers
        ]

    def prompt(
        self,
        state_slot: int,
        start: int,
        end: int,
        source: int | None = None,
        saves: dict[int, int] | None = None,
        journal: JournalPart | None = None,
    ) -> list[Tensor]:
        """A pass over tokens [start, end): each layer's outputs. saves: position -> state slot."""
        first = None
        if source is not None:
            first = FirstChunk(sampling=SamplingParams(), output_start=end, load_from=source)
        item = PrefillItem(
            slot=0, state_slot=state_slot, start=start, token_ids=[0] * (end - start),
            kv_slots=[0] * (end - start), first=first,
            saves=[StateSave(*save) for save in (saves or {}).items()], journal=journal,
        )  # fmt: skip
        parts = prefill_parts([item])
        given = (parts, self.pool, self.kv, self.table.kv_slots, self.config)
        context: Any = self.backend.prefill_context(*given)
        if journal is not None:
            places = self.journals.places(parts)
            assert places is not None
            self.journals.keep(context, places)
        given = zip(self.layers, self.inputs)
        return [context.recur(layer, *(part[start:end] for part in own)) for layer, own in given]

    def step(self, begin: int, nodes: int, draw: Draw) -> int:
        """A tree for request 1, whose path continues the sequence; returns the path's length."""
        tree = random_tree(1, nodes, nodes, draw.generator)
        path = path_to(tree, 0, draw.below(nodes))
        tokens = torch.randint(begin, (nodes,), generator=draw.generator)
        tokens[path] = begin + torch.arange(len(path))
        slots = torch.tensor([1], device=DEVICE)
        layout = self.scheme.begin(slots, Tree(*(part.to(DEVICE) for part in tree)))
        for layer, own, wanted in zip(self.layers, self.inputs, self.wanted):
            channels, raw = (part[tokens] for part in own)
            y = self.scheme.verify(layer, layout, channels, self.scheme.gates_of(layer, raw))
            assert same(y[path], wanted[begin : begin + len(path)])
        accepted = Truncated(*(part.to(DEVICE) for part in truncated([path], [len(path)])))
        features = torch.zeros(1, nodes, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        self.scheme.accept(layout, accepted, features)
        self.table.processed[1] += len(path)
        return len(path)

    def run(self) -> None:
        """Convolution and gates included."""
        draw = Draw(1)
        self.wanted = self.prompt(0, 0, self.length, -1, {27: 4, 30: 7})
        self.prompt(1, 0, 13, -1)
        found = self.prompt(1, 13, 30, None, {20: 5}, JournalPart(0, 20, 30))
        for y, wanted in zip(found, self.wanted):
            assert same(y, wanted[13:30])
        self.journals.replay(JournalPart(0, 20, 27), 5)
        assert same(self.pool.ssm[:, 5], self.pool.ssm[:, 4])
        assert same(self.pool.conv[:, 5], self.pool.conv[:, 4])
        assert same(self.pool.ssm[:, 1], self.pool.ssm[:, 7])

        slots, position = torch.tensor([1], device=DEVICE), 30
        self.table.state_slot[1], self.table.processed[1] = 1, position
        self.scheme.start(slots, slots)
        while position < self.length - 8:
            position += self.step(position, draw.below(9, 1), draw)
        keep = self.scheme.journal_len(slots) - 1  # all but the last
        self.scheme.finish(slots, slots, keep)
        self.prompt(0, 0, position - 1, -1)
        assert same(self.pool.ssm[:, 1], self.pool.ssm[:, 0])
        assert same(self.pool.conv[:, 1], self.pool.conv[:, 0])
