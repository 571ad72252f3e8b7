"""Which rows a step's nodes take and which stay, by Triton, against naive_rows.py.

A CPU's kernels are in test_tree_verify.py.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from forms import DEVICE, GPU, in_the_interpreter, runs_kernels
from torch import Tensor
from verify_rig import path_to, random_tree

pytest.importorskip("triton")

from mamba_eagle.kernels.tree_verify import naive_rows, triton_rows
from mamba_eagle.kernels.tree_verify.layout import Paths, Room, TreeLayout
from mamba_eagle.kernels.tree_verify.naive_rows import RowKeeper
from mamba_eagle.tree.tree import Tree

REQUESTS, STATE_SLOTS = 6, 9
PADDED = REQUESTS - 1  # the request slot of requests that pad a batch

test_in_the_interpreter = in_the_interpreter


class Step(NamedTuple):
    """What a step is told, and what it accepts."""

    slots: Tensor  # [b]; the last two pad the batch
    tree: Tree
    nodes: Tensor  # [b, accepts]
    count: Tensor  # [b]
    features: Tensor  # [b, T, F]

    def to(self, device: torch.device) -> Step:
        tree = Tree(*(part.to(device) for part in self.tree))
        nodes, count, features = (part.to(device) for part in self[2:])
        return Step(self.slots.to(device), tree, nodes, count, features)


class Tables:
    """What steps change, of all request slots, on a device; and the same in naive_rows.py."""

    def __init__(self, room: Room, features: int, device: torch.device) -> None:
        self.room = room
        order = torch.randperm(STATE_SLOTS, generator=torch.Generator().manual_seed(0))
        path = torch.zeros(REQUESTS, room.history + room.rows + room.accepts, dtype=torch.int64)
        path[:, : room.history] = torch.arange(room.history)
        lengths = torch.zeros(REQUESTS, dtype=torch.int64)
        parts = (order[:REQUESTS], path, lengths)
        self.paths = Paths(*(part.clone().to(device) for part in parts))
        self.feature = torch.zeros(REQUESTS, room.rows, features, device=device)
        self.saved = torch.zeros(STATE_SLOTS, features, device=device)
        self.plain = [
            RowKeeper(room.history, room.rows, room.max_journal, room.accepts, [0.0] * features)
            for _ in range(REQUESTS)
        ]

    def run(self, step: Step) -> TreeLayout:
        """begin_rows and accept_rows; what the first returned."""
        parents, ancestors = step.tree.parents, step.tree.ancestors
        begun = triton_rows.begin_rows(step.slots, parents, ancestors, self.paths, self.room)
        tables = (self.paths, self.room, self.feature, self.saved)
        triton_rows.accept_rows(begun, step.nodes, step.count, *tables, step.features)
        return begun

    def run_plain(self, step: Step) -> list[naive_rows.Begun]:
        begun = []
        for r, slot in enumerate(step.slots.tolist()):
            begun.append(self.plain[slot].begin(step.tree.parents.shape[1]))
            nodes = step.nodes[r, : step.count[r]].tolist()
            self.plain[slot].accept(begun[-1], nodes, step.features[r].tolist())
        return begun

    def assert_same(self) -> None:
        path, lengths, history = self.paths.path, self.paths.journal_len, self.room.history
        feature, saved = self.feature.tolist(), self.saved.tolist()
        for slot, plain in enumerate(self.plain):
            assert int(lengths[slot]) == len(plain.journal)
            assert path[slot, : history + lengths[slot]].tolist() == plain.path
            for row in plain.journal:
                assert feature[slot][row] == plain.features[row]
            assert saved[int(self.paths.state_slot[slot])] == plain.saved_feature


def random_step(
    slots: Tensor, nodes: int, room: Room, features: int, generator: torch.Generator
) -> Step:
    """Each request accepts the path to some node, but for one that may have ended."""
    b = len(slots)
    tree = random_tree(b, nodes, room.accepts - 1, generator)
    deepest = torch.randint(0, nodes, (b,), generator=generator).tolist()
    paths = [path_to(tree, r, node) for r, node in enumerate(deepest)]
    count = torch.tensor([len(path) for path in paths])
    taken = torch.tensor([path + path[-1:] * (room.accepts - len(path)) for path in paths])
    count[0] *= int(torch.randint(0, 2, (), generator=generator))
    count[slots == PADDED] = 0
    made = torch.randn(b, nodes, features + 3, generator=generator)[..., :features]
    return Step(slots, tree, taken, count, made)


def random_slots(generator: torch.Generator) -> Tensor:
    order = torch.randperm(PADDED, generator=generator)[:3]
    return torch.cat([order, torch.tensor([PADDED] * 2)])


ROOMS = {
    "decode": (1, Room(history=3, rows=8, max_journal=4, accepts=1)),
    "short-history": (5, Room(history=1, rows=14, max_journal=6, accepts=4)),
    "long-journals": (8, Room(history=3, rows=40, max_journal=20, accepts=6)),
    "a-fold-in-each-step": (8, Room(history=3, rows=17, max_journal=6, accepts=6)),
}


@runs_kernels
@pytest.mark.parametrize("features", [0, 5, 1100], ids="features{}".format)
@pytest.mark.parametrize("nodes, room", ROOMS.values(), ids=ROOMS)
def test_nodes_take_free_rows_and_accepted_ones_stay(nodes: int, room: Room, features: int) -> None:
    """With ended requests, and others that pad the batch; journals fold and begin again."""
    generator = torch.Generator().manual_seed(nodes)
    tables, folds = Tables(room, features, DEVICE), 0
    for _ in range(16):
        step = random_step(random_slots(generator), nodes, room, features, generator)
        found, wanted = tables.run(step.to(DEVICE)), tables.run_plain(step)
        assert torch.equal(found.slots.cpu(), step.slots)
        assert torch.equal(found.state_slots, tables.paths.state_slot[found.slots])
        assert torch.equal(found.parents.cpu(), step.tree.parents)
        masks = (step.tree.ancestors.long() << torch.arange(nodes)).sum(2)
        assert torch.equal(found.ancestors.cpu(), masks)
        for r, begun in enumerate(wanted):
            assert found.rows[r].tolist() == begun.rows
            assert found.journal[r, : found.journal_len[r]].tolist() == begun.journal
            assert found.tail[r].tolist() == begun.tail
            assert bool(found.fold[r]) == begun.folds
            folds += begun.folds
        tables.assert_same()
    assert folds > 1


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
def test_a_graph_goes_on_from_what_it_left() -> None:
    room, nodes, features = Room(history=3, rows=43, max_journal=16, accepts=6), 8, 4480
    generator = torch.Generator().manual_seed(3)
    tables = Tables(room, features, DEVICE)
    step = random_step(random_slots(generator), nodes, room, features, generator)
    step.count.zero_()
    held = step.to(DEVICE)
    tables.run(held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tables.run(held)
    for _ in range(12):
        step = random_step(random_slots(generator), nodes, room, features, generator)
        for part, new in zip(
            (held.slots, *held.tree, *held[2:]), (step.slots, *step.tree, *step[2:])
        ):
            part.copy_(new)
        graph.replay()
        tables.run_plain(step)
        tables.assert_same()
