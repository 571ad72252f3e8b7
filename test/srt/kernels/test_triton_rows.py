"""The Triton kernels that choose rows and keep accepted ones, against torch_rows.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton_rig import DEVICE, GPU, needs_interpreter, run_in_the_interpreter, runs_kernels
from verify_rig import random_tree

from mamba_eagle.kernels.tree_verify import torch_rows, triton_rows
from mamba_eagle.kernels.tree_verify.layout import Paths, Room

REQUESTS, STATE_SLOTS = 6, 9
PADDED = REQUESTS - 1  # the slot of rows that pad a batch


@needs_interpreter
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


class State:
    """What steps change, of all request slots."""

    def __init__(self, room: Room, features: int, device: torch.device) -> None:
        self.room, self.device = room, device
        order = torch.randperm(STATE_SLOTS, generator=torch.Generator().manual_seed(0))
        path = torch.zeros(REQUESTS, room.history + room.rows + room.accepts, dtype=torch.int64)
        path[:, : room.history] = torch.arange(room.history)
        lengths = torch.zeros(REQUESTS, dtype=torch.int64)
        parts = (order[:REQUESTS], path, lengths)
        self.paths = Paths(*(part.clone().to(device) for part in parts))
        self.feature = torch.zeros(REQUESTS, room.rows, features, device=device)
        self.saved = torch.zeros(STATE_SLOTS, features, device=device)

    def accept(self, form, step, nodes: Tensor, count: Tensor, features: Tensor) -> None:
        inputs = (part.to(self.device) for part in (nodes, count))
        tables = (self.paths, self.room, self.feature, self.saved)
        form.accept_rows(step, *inputs, *tables, features.to(self.device))

    def known(self) -> list[Tensor]:
        """All that means something."""
        path, length = self.paths.path.cpu(), self.paths.journal_len.cpu()
        h = self.room.history
        columns = torch.arange(path.shape[1]) < (h + length)[:, None]
        rows = (path - h).clamp(min=0)
        slots = torch.arange(REQUESTS)[:, None]
        kept = self.feature.cpu()[slots, rows] * (columns & (path >= h))[..., None]
        kept[:, :h] = 0  # the history's features are in state slots
        return [torch.where(columns, path, -1), length, kept, self.saved.cpu()]


@runs_kernels
@pytest.mark.parametrize("features", [0, 5, 1100])
@pytest.mark.parametrize(
    "nodes, room",
    [
        (1, Room(history=3, rows=8, max_journal=4, accepts=1)),
        (5, Room(history=1, rows=14, max_journal=6, accepts=4)),
        (8, Room(history=3, rows=40, max_journal=20, accepts=6)),
        (8, Room(history=3, rows=17, max_journal=6, accepts=6)),
    ],
)
def test_steps_leave_what_torch_leaves(nodes: int, room: Room, features: int) -> None:
    """With requests that have ended, and rows that pad the batch; journals fold and begin anew."""
    generator = torch.Generator().manual_seed(nodes)
    plain, ours = State(room, features, torch.device("cpu")), State(room, features, DEVICE)
    folds = 0
    for _ in range(16):
        order = torch.randperm(PADDED, generator=generator)[:3]
        slots = torch.cat([order, torch.tensor([PADDED] * 2)])
        tree = random_tree(len(slots), nodes, room.accepts - 1, generator)
        expected = torch_rows.begin_rows(
            slots, tree.parents, tree.ancestors, plain.paths, plain.room
        )
        on_device = (part.to(DEVICE) for part in (slots, tree.parents, tree.ancestors))
        step = triton_rows.begin_rows(*on_device, ours.paths, ours.room)
        for name, wanted in expected._asdict().items():
            found = getattr(step, name).cpu()
            if name == "journal":
                in_journal = torch.arange(room.max_journal) < expected.journal_len[:, None]
                wanted, found = (torch.where(in_journal, part, -1) for part in (wanted, found))
            assert found.dtype == wanted.dtype, name
            assert torch.equal(found, wanted), name
        folds += int(expected.fold.sum())

        deepest = torch.randint(0, nodes, (len(slots),), generator=generator)
        paths = [tree.ancestors[i, node].nonzero()[:, 0] for i, node in enumerate(deepest)]
        count = torch.tensor([len(path) for path in paths])
        taken = torch.tensor([[*path, *[path[-1]] * (room.accepts - len(path))] for path in paths])
        count[0] *= int(torch.randint(0, 2, (), generator=generator))  # may have ended
        count[-2:] = 0
        made = torch.randn(len(slots), nodes, features + 3, generator=generator)[..., :features]
        plain.accept(torch_rows, expected, taken, count, made)
        ours.accept(triton_rows, step, taken, count, made)
        for found, wanted in zip(ours.known(), plain.known()):
            assert torch.equal(found, wanted)
    assert folds > 1


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
def test_a_graph_goes_on_from_what_it_left() -> None:
    room, nodes, b = Room(history=3, rows=43, max_journal=16, accepts=6), 8, 5
    generator = torch.Generator().manual_seed(3)
    plain, ours = State(room, 4480, torch.device("cpu")), State(room, 4480, DEVICE)
    slots, count = torch.tensor([3, 0, 4, PADDED, PADDED]), torch.zeros(b, dtype=torch.int64)
    tree = random_tree(b, nodes, room.accepts - 1, generator)
    taken, made = torch.zeros(b, room.accepts, dtype=torch.int64), torch.randn(b, nodes, 4480)
    given = (slots, tree.parents, tree.ancestors, taken, count, made)
    held = [part.to(DEVICE) for part in given]

    def step() -> None:
        begun = triton_rows.begin_rows(*held[:3], ours.paths, ours.room)
        ours.accept(triton_rows, begun, *held[3:])

    step()  # nothing is accepted
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(12):
        tree = random_tree(b, nodes, room.accepts - 1, generator)
        count = torch.randint(0, room.accepts, (b,), generator=generator)
        count[-2:] = 0
        taken = torch.arange(room.accepts).expand(b, -1)  # any nodes, none of them twice
        given = (slots, tree.parents, tree.ancestors, taken, count, torch.randn(b, nodes, 4480))
        for part, new in zip(held, given):
            part.copy_(new)
        graph.replay()
        begun = torch_rows.begin_rows(*given[:3], plain.paths, plain.room)
        plain.accept(torch_rows, begun, *given[3:])
        for found, wanted in zip(ours.known(), plain.known()):
            assert torch.equal(found, wanted)
