"""Accepting a path of a tree and committing it, in each form against naive.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from forms import DEVICE, GPU, backend_of, device_of, every_form, in_the_interpreter, runs_kernels
from torch import Tensor

from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.kernels.accept import naive
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.simulate import Forced
from mamba_eagle.tree.tree import Tree, ancestor_matrix

torch.set_num_threads(1)

REQUESTS, VOCAB, MAX_PROCESSED = 9, 7, 30
PADDED = REQUESTS - 1  # the request slot of requests that pad a batch: it has ended
TABLES = ("remaining", "processed", "last_token", "stop_tokens", "kv_slots")

test_in_the_interpreter = in_the_interpreter


class Step(NamedTuple):
    slots: Tensor  # [b] request slots
    tree: Tree
    target: Tensor  # [b, T]
    own: Tensor  # [b, T] KV slots

    def to(self, device: torch.device) -> Step:
        tree = Tree(*(part.to(device) for part in self.tree))
        return Step(self.slots.to(device), tree, self.target.to(device), self.own.to(device))


def random_trees(b: int, nodes: int, generator: torch.Generator) -> Tree:
    """Any shape; siblings may share tokens."""
    parents = torch.zeros(b, nodes, dtype=torch.int64)
    depths = torch.zeros_like(parents)
    for node in range(1, nodes):
        parents[:, node] = torch.randint(max(0, node - 4), node, (b,), generator=generator)
        depths[:, node] = depths.gather(1, parents[:, node : node + 1])[:, 0] + 1
    tokens = torch.randint(0, VOCAB, (b, nodes), generator=generator)
    return Tree(tokens, parents, depths, ancestor_matrix(parents, nodes), torch.zeros(b, nodes))


def random_table(generator: torch.Generator, max_stops: int) -> RequestTable:
    """Some requests have ended, some have more stop tokens than others."""
    table = RequestTable(REQUESTS, MAX_PROCESSED + 70, torch.device("cpu"))
    table.remaining = torch.randint(-1, 6, (REQUESTS,), generator=generator) * 2
    table.processed = torch.randint(0, MAX_PROCESSED, (REQUESTS,), generator=generator)
    table.last_token = torch.randint(0, VOCAB, (REQUESTS,), generator=generator)
    table.stop_tokens = torch.randint(0, VOCAB, (REQUESTS, max_stops), generator=generator)
    stops = torch.randint(0, min(max_stops, 3) + 1, (REQUESTS, 1), generator=generator)
    table.stop_tokens[torch.arange(max_stops) >= stops] = -1
    table.remaining[PADDED] = table.processed[PADDED] = 0
    return table


def copied(table: RequestTable, device: torch.device) -> RequestTable:
    other = RequestTable(1, 1, device)
    for name in TABLES:
        setattr(other, name, getattr(table, name).clone().to(device))
    return other


def cases(nodes: int) -> Iterator[tuple[RequestTable, Step]]:
    """The target often agrees with a child; the last two requests pad the batch."""
    generator = torch.Generator().manual_seed(nodes)
    for max_stops in (1, 3, 8) * 2:
        table = random_table(generator, max_stops)
        slots = torch.randperm(PADDED, generator=generator)[:5]
        slots = torch.cat([slots, torch.tensor([PADDED] * 2)])
        tree = random_trees(len(slots), nodes, generator)
        target = torch.randint(0, VOCAB, tree.tokens.shape, generator=generator)
        follow = torch.rand(target.shape, generator=generator) < 0.7
        target.scatter_(1, tree.parents, torch.where(follow, tree.tokens, VOCAB - 1))
        target[torch.rand(target.shape, generator=generator) < 0.1] = -1  # no token there
        own = torch.randperm(target.numel(), generator=generator).view_as(target) + 50
        yield table, Step(slots, tree, target, own)


def run(form: str, table: RequestTable, step: Step, max_depth: int) -> Truncated:
    """A step on the table's device, which it changes."""
    backend = backend_of(form)
    accepted = backend.accept_tokens(table, step.slots, step.tree, step.target, max_depth)
    backend.commit_tokens(table, step.slots, step.own, accepted)
    return accepted


def assert_step(before: RequestTable, after: RequestTable, step: Step, found: Truncated) -> None:
    """Each request of the step is as naive.py has it; the others are unchanged."""
    for r, slot in enumerate(step.slots.tolist()):
        request = naive.Request(
            before.kv_slots[slot, : before.processed[slot]].tolist(),
            int(before.last_token[slot]),
            int(before.remaining[slot]),
        )
        tokens, parents, target = (
            part[r].tolist() for part in (step.tree.tokens, step.tree.parents, step.target)
        )
        stops = before.stop_tokens[slot].tolist()
        accepted = naive.accept(tokens, parents, target, stops, request.remaining)
        count = int(found.count[r])
        assert count == len(accepted.nodes)
        assert found.nodes[r, :count].tolist() == accepted.nodes
        assert found.tokens[r, :count].tolist() == accepted.tokens
        assert bool(found.finished[r]) == accepted.finished

        naive.commit(request, step.own[r].tolist(), accepted)
        end = len(request.kv_slots)
        assert int(after.processed[slot]) == end
        assert after.kv_slots[slot, :end].tolist() == request.kv_slots
        assert int(after.last_token[slot]) == request.last_token
        assert int(after.remaining[slot]) == request.remaining
    others = [slot for slot in range(REQUESTS) if slot not in step.slots]
    for name in TABLES:
        assert torch.equal(getattr(after, name)[others], getattr(before, name)[others]), name


@every_form
@pytest.mark.parametrize("nodes", [1, 2, 8, 40], ids="nodes{}".format)
def test_a_step_is_accepted_and_committed(form: str, nodes: int) -> None:
    """With requests that have ended, requests that pad the batch, siblings that share tokens, and
    nodes at which no token could be sampled."""
    endings = set()
    for table, step in cases(nodes):
        device = device_of(form)
        after = copied(table, device)
        found = run(form, after, step.to(device), int(step.tree.depths.max()))
        assert [part.dtype for part in found] == [torch.int64] * 3 + [torch.bool]
        found = Truncated(*(part.cpu() for part in found))
        assert found.tokens.min() >= 0, "even after the last one that counts"
        assert_step(table, copied(after, torch.device("cpu")), step, found)
        endings |= set(zip(found.count.tolist(), found.finished.tolist()))
    assert {(0, True), (0, False), (1, False), (1, True)} <= endings, "the cases are all alike"
    assert nodes < 8 or max(endings) > (3, False), "the cases are all short"


@runs_kernels
@pytest.mark.parametrize("nodes", [1, 4, 12], ids="nodes{}".format)
def test_a_forced_path_is_that_of_torch(nodes: int) -> None:
    """Of chains, trees of two and three children, and nodes at which no token could be sampled."""
    generator, index = torch.Generator().manual_seed(nodes), torch.arange(nodes)
    parents = torch.stack([(index - 1).clamp(min=0) // children for children in (1, 2, 3)])
    depths = ancestor_matrix(parents, nodes).sum(2) - 1
    tokens, target = torch.randint(0, VOCAB, (2, 3, nodes), generator=generator)
    target[torch.rand(target.shape, generator=generator) < 0.3] = -1
    tree = Tree(tokens, parents, depths, ancestor_matrix(parents, nodes), torch.zeros(3, nodes))
    table = random_table(generator, 3)
    slots = torch.randperm(PADDED, generator=generator)[:3]
    for length, number in itertools.product((1.0, 2.5, 2.97, 6.0), range(4)):
        forced = Forced(torch.tensor(length, dtype=torch.float64), torch.tensor(number))
        inputs = (tree, target, nodes - 1, forced)
        wanted = backend_of("torch").accept_forced(table, slots, *inputs)
        ours = (Tree(*(part.to(DEVICE) for part in tree)), target.to(DEVICE), nodes - 1)
        own = Forced(*(part.to(DEVICE) for part in forced))
        given = (copied(table, DEVICE), slots.to(DEVICE), *ours, own)
        found = Truncated(*(part.cpu() for part in backend_of("triton").accept_forced(*given)))
        kept = torch.arange(nodes) < wanted.count[:, None]
        assert torch.equal(found.count, wanted.count)
        assert torch.equal(found.finished, wanted.finished)
        assert torch.equal(found.nodes[kept], wanted.nodes[kept])
        assert torch.equal(found.tokens[kept], wanted.tokens[kept])


def test_a_walk_worked_out_by_hand() -> None:
    """root 5 → 7 → 9, 5 → 8; the target goes 7, then 9, then 1."""
    tokens, parents, target = [5, 8, 7, 9], [0, 0, 0, 2], [7, 4, 9, 1]
    assert naive.walk(tokens, parents, target) == [0, 2, 3]
    assert naive.accept(tokens, parents, target, [], 9) == ([0, 2, 3], [7, 9, 1], False)
    assert naive.accept(tokens, parents, target, [], 3) == ([0, 2, 3], [7, 9, 1], True)
    assert naive.accept(tokens, parents, target, [9], 9) == ([0, 2], [7, 9], True)
    assert naive.accept(tokens, parents, target, [], 1) == ([0], [7], True)
    assert naive.accept(tokens, parents, target, [], 0) == ([], [], True)
    assert naive.accept(tokens, parents, [7, 4, -1, 1], [], 9) == ([0], [7], False)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
def test_a_graph_accepts_other_trees() -> None:
    (table, step), *others = cases(8)
    ours, held, depth = copied(table, DEVICE), step.to(DEVICE), 7  # any of 8 nodes
    ours.stop_tokens = torch.full((REQUESTS, 8), -1, device=DEVICE)
    run("triton", ours, held, depth)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run("triton", ours, held, depth)
    for before, step in others:
        before.stop_tokens = torch.nn.functional.pad(
            before.stop_tokens, (0, 8 - before.stop_tokens.shape[1]), value=-1
        )
        for name in TABLES:
            getattr(ours, name).copy_(getattr(before, name))
        for part, new in zip(
            (held.slots, *held.tree, held.target, held.own),
            (step.slots, *step.tree, step.target, step.own),
        ):
            part.copy_(new)
        graph.replay()
        after = copied(ours, torch.device("cpu"))
        assert_step(before, after, step, Truncated(*(part.cpu() for part in found)))
