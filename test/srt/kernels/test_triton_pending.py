"""The Triton kernels of a drafter's pending entries, against the torch backend's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton_rig import DEVICE, GPU, needs_interpreter, run_in_the_interpreter, runs_kernels

from mamba_eagle.backend.pending import UNTRACKED, PendingEntries, PendingSize, Taken
from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.backend.triton.pending import TritonPendingEntries
from mamba_eagle.tree.accept import Truncated

REQUESTS, WIDTH, CONTEXT, BIN, DEEP = 6, 14, 90, 9999, 5
UNTRACKED_SLOT = 4  # a slot for which nothing waits, ever
PADDED = REQUESTS - 1  # the slot of rows that pad a batch: it has ended


@needs_interpreter
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def entries(kind: type[PendingEntries], features: int, device: torch.device) -> PendingEntries:
    table = RequestTable(REQUESTS, CONTEXT, device)
    table.remaining[:] = torch.tensor([5, 0, 7, 1, 3, 0])
    table.kv_slots[:] = torch.arange(REQUESTS * (CONTEXT + 64)).view(REQUESTS, -1)
    made = kind(table, PendingSize(WIDTH, features, torch.float32, BIN))
    made.pending[UNTRACKED_SLOT] = UNTRACKED
    made.processed[:-1] = torch.arange(REQUESTS - 1, device=device) * 3
    return made


def known(taken: Taken) -> tuple[Tensor, ...]:
    """All that means something: not what was behind the entries that wait."""
    nodes, tokens, count, finished = taken.accepted
    is_entry = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
    return (nodes, tokens * is_entry, count, finished, *taken[1:])


def assert_same(found: Taken, wanted: Taken) -> None:
    ours, expected = (known(taken) for taken in (found, wanted))
    for part, other in zip(ours, expected, strict=True):
        assert part.dtype == other.dtype
        assert torch.equal(part.cpu(), other)


def assert_same_tables(ours: PendingEntries, plain: PendingEntries) -> None:
    assert torch.equal(ours.processed.cpu(), plain.processed)
    assert torch.equal(ours.pending.cpu(), plain.pending)
    waits = torch.arange(WIDTH) < plain.pending[:, None]
    assert torch.equal(ours.tokens.cpu() * waits, plain.tokens * waits)
    assert torch.equal(ours.features.cpu() * waits[..., None], plain.features * waits[..., None])


def random_step(features: int, generator: torch.Generator) -> tuple[Tensor, Truncated, Tensor]:
    order = torch.randperm(PADDED, generator=generator)[:3]
    slots = torch.cat([order, torch.tensor([PADDED] * 2)])
    tokens = torch.randint(0, 99, (5, DEEP), generator=generator)
    count = torch.randint(0, DEEP + 1, (5,), generator=generator)
    count[(slots == 1) | (slots == PADDED)] = 0  # have ended
    made = torch.randn(5, DEEP, features, generator=generator)
    return slots, Truncated(tokens, tokens, count, count == 0), made


@runs_kernels
@pytest.mark.parametrize("features", [0, 7, 2500])
def test_entries_wait_and_are_taken_as_in_torch(features: int) -> None:
    """All that wait, or some; with requests that have ended, and rows that pad the batch."""
    generator = torch.Generator().manual_seed(features)
    plain = entries(PendingEntries, features, torch.device("cpu"))
    ours = entries(TritonPendingEntries, features, DEVICE)
    for step in range(12):
        slots, accepted, made = random_step(features, generator)
        held = slots.to(DEVICE)
        plain._append(slots, accepted, made)
        ours._append(held, Truncated(*(part.to(DEVICE) for part in accepted)), made.to(DEVICE))
        assert_same_tables(ours, plain)
        if step % 3:
            assert_same(ours.take(held, None, WIDTH - DEEP), plain.take(slots, None, WIDTH - DEEP))
        else:  # as if a request left
            some = plain.pending[slots].clamp(0, 2)
            found = ours.take(held, some.to(DEVICE), 3)
            assert_same(found, plain.take(slots, some, 3))
            for each in (plain, ours):
                each.pending.clamp_(max=0)
        assert_same_tables(ours, plain)
    assert plain.pending[UNTRACKED_SLOT] == UNTRACKED
    assert int(plain.processed.max()) > 15, "entries were run"


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
def test_a_graph_takes_what_has_come_to_wait() -> None:
    generator, features = torch.Generator().manual_seed(1), 4480
    plain = entries(PendingEntries, features, torch.device("cpu"))
    ours = entries(TritonPendingEntries, features, DEVICE)
    slots = torch.tensor([PADDED] * 5, device=DEVICE)
    tokens = torch.zeros(5, DEEP, dtype=torch.int64, device=DEVICE)
    count, made = tokens[:, 0].clone(), torch.zeros(5, DEEP, features, device=DEVICE)

    def step() -> Taken:
        ours.append(slots, Truncated(tokens, tokens, count, count == 0), made)
        return ours.take(slots, None, DEEP)

    step()  # nothing is accepted
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(6):
        new_slots, accepted, new_made = random_step(features, generator)
        for part, new in ((slots, new_slots), (tokens, accepted.tokens), (made, new_made)):
            part.copy_(new)
        count.copy_(accepted.count)
        graph.replay()
        plain.append(new_slots, accepted, new_made)
        assert_same(found, plain.take(new_slots, None, DEEP))
        assert_same_tables(ours, plain)
