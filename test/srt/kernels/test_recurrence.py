"""The recurrence's kernels: their definition, and the same bits however a token is served."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from forms import DEVICE, GPU
from tensor_checks import Draw, relative_error
from torch import Tensor
from verify_rig import HIDDEN, mamba_config, path_to, random_mixer, random_tree, truncated

pytest.importorskip("triton")

from triton_rig import NANO, tree_layout, triton_backend

from mamba_eagle.backend.journals import JournaledPrefill
from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.prefill import prefill_parts
from mamba_eagle.backend.state import SchemeSize
from mamba_eagle.backend.triton.exact import ExactJournals, ExactPrefillContext, ExactRows
from mamba_eagle.core import SamplingParams
from mamba_eagle.kernels.prefill_plan import Prompt, prefill_plan
from mamba_eagle.kernels.recurrence import gluon_fold, gluon_prompts, gluon_verify, naive
from mamba_eagle.kernels.recurrence.layout import Tiles
from mamba_eagle.kernels.ssd.naive import recurrence_oracle
from mamba_eagle.kernels.tree_verify.layout import Folds, RowBuffers, Sizes
from mamba_eagle.message import FirstChunk, JournalPart, PrefillItem, StateSave
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree

needs_gpu = pytest.mark.skipif(not GPU, reason="no CUDA device")
TILES = (None, Tiles(16, 0, 1), Tiles(8, 0, 2))
GARBAGE = 1e4  # in rows that must not be read
NARROW = Sizes(8, 64, 2, 64)
WIDE = Sizes(4, 128, 1, 256)


def same(found: Tensor, wanted: Tensor) -> bool:
    """Bit by bit."""
    return torch.equal(found, wanted) and not bool(found.isnan().any())


class Tokens(NamedTuple):
    """What the tokens of b sequences feed into a layer."""

    x: Tensor  # [b, l, H*P]
    B: Tensor  # [b, l, G*N]
    C: Tensor  # [b, l, G*N]
    dt: Tensor  # [b, l, H] float32
    A: Tensor  # [H]
    D: Tensor  # [H]
    state: Tensor  # [b, H, P, N], before them


def random_tokens(sizes: Sizes, batch: int, length: int, dtype: torch.dtype, seed: int) -> Tokens:
    draw, (H, P, G, N) = Draw(seed), sizes
    parts = Tokens(
        draw.normal(batch, length, H * P).to(dtype),
        draw.normal(batch, length, G * N).to(dtype),
        draw.normal(batch, length, G * N).to(dtype),
        draw.steps(batch, length, H, largest=0.3),
        draw.decay_rates(H),
        draw.normal(H),
        draw.normal(batch, H, P, N),
    )
    return Tokens(*(part.to(DEVICE) for part in parts))


class Span(NamedTuple):
    """Tokens [begin, end) of a sequence, with state slots."""

    sequence: int
    begin: int
    end: int
    source: int
    saves: tuple[tuple[int, int], ...]


def scan(
    tokens: Tokens,
    sizes: Sizes,
    spans: list[Span],
    state: Tensor,
    tiles: Tiles | None = None,
) -> list[Tensor]:
    """The outputs of each span; states go to their slots."""
    H, P, G, N = sizes
    prompts, first = [], 0
    for span in spans:
        prompts.append(Prompt(first, span.end - span.begin, span.source, span.saves))
        first += span.end - span.begin
    flat = Tokens(*(
        torch.cat([part[span.sequence, span.begin : span.end] for span in spans])
        for part in tokens[:4]
    ), *tokens[4:])  # fmt: skip
    x, B, C = torch.cat(flat[:3], dim=1).split([H * P, G * N, G * N], dim=1)
    x, B, C = x.unflatten(1, (H, P)), B.unflatten(1, (G, N)), C.unflatten(1, (G, N))
    dt = torch.empty(H, -(-first // 16) * 16, device=DEVICE)[:, :first].copy_(flat.dt.t()).t()
    plan = prefill_plan(prompts, partial(torch.tensor, device=DEVICE))
    y = gluon_prompts.scan(x, dt, tokens.A, B, C, tokens.D, state, plan, tiles)
    return list(y.split([span.end - span.begin for span in spans]))


def defined(tokens: Tokens, sizes: Sizes, sequence: int) -> naive.Recurrence:
    H, P, G, N = sizes
    x, B, C = (part[sequence] for part in tokens[:3])
    x, B, C = x.unflatten(1, (H, P)), B.unflatten(1, (G, N)), C.unflatten(1, (G, N))
    at = (tokens.dt[sequence], tokens.A, B, C, tokens.D, tokens.state[sequence])
    return naive.recurrence(x, *at)


def test_the_definition_is_the_recurrence() -> None:
    sizes = Sizes(4, 6, 2, 128)
    tokens = random_tokens(sizes, 1, 30, torch.float32, 0)
    found = defined(tokens, sizes, 0)
    H, P, G, N = sizes
    x, B, C = (part[0] for part in tokens[:3])
    x, B, C = x.unflatten(1, (H, P)), B.unflatten(1, (G, N)), C.unflatten(1, (G, N))
    at = (tokens.dt[0], tokens.A, B, C, tokens.D, tokens.state[0])
    wanted = recurrence_oracle(x, *at)
    assert relative_error(found.y, wanted.y) < 1e-6
    assert relative_error(found.states, wanted.states) < 1e-6


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [NANO, NARROW, WIDE], ids=str)
def test_a_prompt_has_the_definitions_bits(sizes: Sizes, dtype: torch.dtype) -> None:
    tokens = random_tokens(sizes, 1, 21, dtype, 0)
    wanted = defined(tokens, sizes, 0)
    state = torch.cat([tokens.state, torch.zeros_like(tokens.state)])
    (y,) = scan(tokens, sizes, [Span(0, 0, 21, 0, ((21, 1),))], state)
    y_error = relative_error(y.float(), wanted.y.flatten(1).to(dtype).double())
    state_error = relative_error(state[1], wanted.states[-1].double())
    equal = float((state[1] == wanted.states[-1]).double().mean())
    print(f"relative error: y {y_error:.1e}, state {state_error:.1e}; equal {equal:.6f}")
    assert y_error < (1e-6 if dtype == torch.float32 else 1e-4) and state_error < 1e-6
    assert same(state[1], wanted.states[-1])
    assert same(y, wanted.y.flatten(1).to(dtype))


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

    def __init__(self, tokens: Tokens, sizes: Sizes, nodes: int, seed: int) -> None:
        self.tokens, self.sizes, self.nodes, self.draw = tokens, sizes, nodes, Draw(seed)
        H, P, G, N = sizes
        self.batch, self.length = tokens.dt.shape[:2]
        self.max_journal = max(20, 2 * nodes)
        b, self.W, dtype = self.batch, self.max_journal + nodes, tokens.x.dtype
        self.xB = torch.full((b, self.W, H * P + G * N), GARBAGE, dtype=dtype, device=DEVICE)
        self.dt = torch.full((b, self.W, H), GARBAGE, device=DEVICE)
        self.state = torch.zeros(2 * b, H, P, N, device=DEVICE)
        self.state[:b] = tokens.state
        spans = [Span(i, 0, self.length, i, ((self.length, b + i),)) for i in range(b)]
        self.wanted = torch.stack(scan(tokens, sizes, spans, self.state))
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
                count = self.draw.below(20)
                if count:
                    save = ((count, self.batch + i),)
                    source = self.batch + i if request.end else i
                    spans.append(Span(i, request.end, request.end + count, source, save))
                    request.end += count
            if not spans:
                continue
            tiles = TILES[self.draw.below(len(TILES))]
            for span, y in zip(spans, scan(self.tokens, self.sizes, spans, self.state, tiles)):
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
        source = (who.to(DEVICE), picked.to(DEVICE))
        self.xB[who.to(DEVICE), table.to(DEVICE)] = torch.cat(
            [self.tokens.x[source], self.tokens.B[source]], dim=2
        )
        self.dt[who.to(DEVICE), table.to(DEVICE)] = self.tokens.dt[source]
        lengths, journal = self.journals(running)
        layout = tree_layout(
            tree, who[:, 0], self.batch + who[:, 0], table, journal, tuple(lengths),
            fold=tuple(folds),
        )  # fmt: skip
        y = gluon_verify.tree_verify(
            RowBuffers(self.xB, self.dt, self.dt * float("nan")),
            self.tokens.C[source].contiguous(), self.tokens.A, self.tokens.D, self.state, layout,
            self.sizes, TILES[self.draw.below(len(TILES))],
        )  # fmt: skip
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
        gluon_fold.fold_journals(
            RowBuffers(self.xB[None], self.dt[None], self.dt[None] * float("nan")),
            self.tokens.A[None], self.state[None], Folds(*(part.to(DEVICE) for part in parts)),
            self.sizes,
        )  # fmt: skip
        for i, count in zip(who, kept):
            del self.requests[i].journal[:count]

    def check_states(self) -> None:
        b = self.batch
        pool = torch.cat([self.tokens.state, torch.zeros_like(self.tokens.state)])
        at = [(i, r.folded) for i, r in enumerate(self.requests) if r.folded]
        scan(self.tokens, self.sizes, [Span(i, 0, end, i, ((end, b + i),)) for i, end in at], pool)
        for i, end in at:
            assert same(self.state[b + i], pool[b + i]), (i, end)


SERVED = [
    pytest.param(NANO, 3, 16, torch.bfloat16, id="nano"),
    pytest.param(NANO, 1, 1, torch.bfloat16, id="nano-decode"),
    pytest.param(NARROW, 5, 8, torch.float16, id="narrow-float16"),
    pytest.param(WIDE, 2, 16, torch.float32, id="wide-float32"),
    pytest.param(NARROW, 2, 64, torch.bfloat16, id="64-nodes"),
]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sizes, batch, nodes, dtype", SERVED)
def test_bits_do_not_depend_on_how_a_token_was_served(
    sizes: Sizes, batch: int, nodes: int, dtype: torch.dtype, seed: int
) -> None:
    """Prompts in chunks, chains, trees, folds; any batch and tile."""
    tokens = random_tokens(sizes, batch, 80 + nodes, dtype, seed)
    Server(tokens, sizes, nodes, seed).run()


class Glue:
    """What a runner has of two layers on a device, and the raw inputs of one sequence."""

    def __init__(self, length: int) -> None:
        self.config = mamba_config(num_heads=4, head_dim=32, state_size=64)
        self.layers = [random_mixer(self.config, i, i).to(DEVICE).bfloat16() for i in range(2)]
        self.table = RequestTable(4, 200, DEVICE)
        self.backend = triton_backend(torch.bfloat16)
        rule = self.backend.state_rounding("nearest", torch.float32, self.table)
        self.pool = StatePool(2, 9, self.config, HIDDEN, rule, torch.bfloat16, DEVICE)
        size = SchemeSize(2, HIDDEN, rows=32, nodes=8, accepts=8)
        self.scheme = ExactRows(self.config, size, self.table, self.pool)
        at = (self.layers, self.pool, self.table, self.backend.place)
        self.journals = ExactJournals(2, 16, *at)
        draw = Draw(0)
        widths = (self.config.conv_dim, self.config.num_heads)
        self.inputs = [
            [draw.normal(length, width).bfloat16().to(DEVICE) for width in widths]
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
        context: Any = ExactPrefillContext(parts, self.pool, None, self.backend.place)
        if journal is not None:
            places = self.journals.places(parts)
            assert places is not None
            context = JournaledPrefill(context, self.journals, places)
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
            y = self.scheme.verify(layer, layout, *(part[tokens] for part in own))
            assert same(y[path], wanted[begin : begin + len(path)])
        accepted = Truncated(*(part.to(DEVICE) for part in truncated([path], [len(path)])))
        features = torch.zeros(1, nodes, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        self.scheme.accept(layout, accepted, features)
        self.table.processed[1] += len(path)
        return len(path)


@pytest.mark.gpu
@needs_gpu
def test_prompts_trees_and_journals_agree_from_raw_inputs() -> None:
    """Convolution and step sizes included."""
    length, draw = 120, Draw(1)
    glue = Glue(length)
    glue.wanted = glue.prompt(0, 0, length, -1, {27: 4, 30: 7})
    glue.prompt(1, 0, 13, -1)
    found = glue.prompt(1, 13, 30, None, {20: 5}, JournalPart(0, 20, 30))
    for y, wanted in zip(found, glue.wanted):
        assert same(y, wanted[13:30])
    glue.journals.replay(JournalPart(0, 20, 27), 5)
    assert same(glue.pool.ssm[:, 5], glue.pool.ssm[:, 4])
    assert same(glue.pool.conv[:, 5], glue.pool.conv[:, 4])
    assert same(glue.pool.ssm[:, 1], glue.pool.ssm[:, 7])

    slots, position = torch.tensor([1], device=DEVICE), 30
    glue.table.state_slot[1], glue.table.processed[1] = 1, position
    glue.scheme.start(slots, slots)
    while position < length - 8:
        position += glue.step(position, draw.below(9, 1), draw)
    keep = glue.scheme.journal_len(slots) - 1  # all but the last
    glue.scheme.finish(slots, slots, keep)
    glue.prompt(0, 0, position - 1, -1)
    assert same(glue.pool.ssm[:, 1], glue.pool.ssm[:, 0])
    assert same(glue.pool.conv[:, 1], glue.pool.conv[:, 0])
