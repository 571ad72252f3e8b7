"""A drafter's pending entries, in each form against naive.py."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from forms import DEVICE, GPU, backend_of, device_of, every_form, in_the_interpreter
from torch import Tensor

from mamba_eagle.backend.pending import UNTRACKED, PendingEntries, PendingSize, Taken
from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.kernels.accept import naive
from mamba_eagle.tree.accept import Truncated

REQUESTS, WIDTH, POSITIONS, PADDING, DEEP, NODES = 6, 14, 90, 9999, 5, 7
ENDED_SLOT = 1
UNTRACKED_SLOT = 4
PADDED = REQUESTS - 1  # the request slot of requests that pad a batch: it has ended

test_in_the_interpreter = in_the_interpreter


def empty_entries(form: str, features: int, device: torch.device) -> PendingEntries:
    table = RequestTable(REQUESTS, POSITIONS, device)
    table.remaining[:] = torch.tensor([5, 0, 7, 1, 3, 0])
    table.kv_slots[:] = torch.arange(table.kv_slots.numel()).view(REQUESTS, -1)
    size = PendingSize(WIDTH, features, torch.float32, PADDING)
    made = backend_of(form).pending_entries(table, size)
    made.pending[UNTRACKED_SLOT] = UNTRACKED
    made.processed[:PADDED] = torch.arange(PADDED, device=device) * 3
    return made


def kept_as_they_are(features: Tensor) -> Tensor:
    return features


def naive_entries() -> dict[int, naive.DraftEntries]:
    slots = {slot: naive.DraftEntries(3 * slot, []) for slot in range(PADDED)}
    slots[UNTRACKED_SLOT].waiting = None
    slots[PADDED] = naive.DraftEntries(0, [])
    return slots


class Step(NamedTuple):
    slots: Tensor  # [5]; the last two pad the batch
    accepted: Truncated
    features: Tensor  # [5, NODES, F]

    def to(self, device: torch.device) -> Step:
        accepted = Truncated(*(part.to(device) for part in self.accepted))
        return Step(self.slots.to(device), accepted, self.features.to(device))

    def entries(self, r: int) -> list[tuple[int, list[float]]]:
        """What a request accepts, each token with its feature."""
        count = int(self.accepted.count[r])
        tokens, nodes = self.accepted.tokens[r, :count], self.accepted.nodes[r, :count]
        features = self.features[r, nodes]
        return list(zip(tokens.tolist(), features.tolist()))


def random_step(features: int, generator: torch.Generator) -> Step:
    order = torch.randperm(PADDED, generator=generator)[:3]
    slots = torch.cat([order, torch.tensor([PADDED] * 2)])
    tokens = torch.randint(0, 99, (5, DEEP), generator=generator)
    count = torch.randint(0, DEEP + 1, (5,), generator=generator)
    count[(slots == ENDED_SLOT) | (slots == PADDED)] = 0
    nodes = torch.randint(0, NODES, (5, DEEP), generator=generator)
    made = torch.randn(5, NODES, features, generator=generator)
    return Step(slots, Truncated(nodes, tokens, count, count == 0), made)


def assert_waiting(found: PendingEntries, wanted: dict[int, naive.DraftEntries]) -> None:
    """All request slots."""
    processed, pending, tokens, features = (
        part.tolist() for part in (found.processed, found.pending, found.tokens, found.features)
    )
    for slot, entries in wanted.items():
        assert processed[slot] == entries.processed
        if entries.waiting is None:
            assert pending[slot] == UNTRACKED
        else:
            waiting = list(zip(tokens[slot], features[slot]))[: pending[slot]]
            assert waiting == entries.waiting


def assert_taken(
    found: Taken, table: RequestTable, slot: int, r: int, before: int, entries: list
) -> None:
    """Request r of the batch is about to run ``entries``, ``before`` others were run before."""
    count, longest = len(entries), found.positions.shape[1]
    nodes, tokens, counts, finished = (part[r].tolist() for part in found.accepted)
    assert (counts, finished) == (count, count == 0)
    assert tokens[:count] == [token for token, _ in entries]
    assert nodes == [min(entry, max(count - 1, 0)) for entry in range(longest)]
    assert int(found.prefix[r]) == before
    assert found.positions[r].tolist() == list(range(before, before + longest))
    own = table.kv_slots[slot, before : before + count].tolist()
    assert found.kv_slots[r].tolist() == own + [PADDING] * (longest - count)


@every_form
@pytest.mark.parametrize("features", [0, 7, 2500], ids="features{}".format)
def test_entries_wait_and_are_taken(form: str, features: int) -> None:
    """All that wait, or some; with requests that have ended, one that is untracked, and rows that
    pad the batch."""
    generator = torch.Generator().manual_seed(features)
    device = device_of(form)
    found, wanted = empty_entries(form, features, device), naive_entries()
    remaining = found.table.remaining.tolist()
    for number in range(12):
        step = random_step(features, generator)
        held, slots = step.to(device), step.slots.tolist()
        found.append(*held, kept_as_they_are)
        for r, slot in enumerate(slots):
            wanted[slot].append(step.entries(r))
        assert_waiting(found, wanted)

        before = [wanted[slot].processed for slot in slots]
        leave = number % 3 == 0
        if leave:  # requests leave: their first entries are run, the others are dropped
            counts = found.pending[held.slots].clamp(0, 2)
            taken = found.take(held.slots, counts, 3)
            found.pending[held.slots] = found.pending[held.slots].clamp(max=0)
        else:
            taken = found.take(held.slots, None, WIDTH - DEEP)
        for r, slot in enumerate(slots):
            mine = wanted[slot]
            if not leave:
                entries = mine.take(has_ended=remaining[slot] <= 0)
            else:
                entries = mine.leave(min(len(mine.waiting), 2)) if mine.waiting else []
            assert_taken(taken, found.table, slot, r, before[r], entries)
        assert_waiting(found, wanted)
    assert max(entries.processed for entries in wanted.values()) > 15, "entries were run"


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
def test_a_graph_takes_what_has_come_to_wait() -> None:
    generator, features = torch.Generator().manual_seed(1), 4480
    found, wanted = empty_entries("triton", features, DEVICE), naive_entries()
    remaining = found.table.remaining.tolist()
    held = random_step(features, generator)
    held.accepted.count.zero_()
    held.slots.fill_(PADDED)
    held = held.to(DEVICE)

    def run() -> Taken:
        found.append(*held, kept_as_they_are)
        return found.take(held.slots, None, DEEP)

    run()  # nothing is accepted
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        taken = run()
    for _ in range(6):
        step = random_step(features, generator)
        for part, new in zip(
            (held.slots, *held.accepted, held.features),
            (step.slots, *step.accepted, step.features),
        ):
            part.copy_(new)
        graph.replay()
        for r, slot in enumerate(step.slots.tolist()):
            mine, before = wanted[slot], wanted[slot].processed
            mine.append(step.entries(r))
            entries = mine.take(has_ended=remaining[slot] <= 0)
            assert_taken(taken, found.table, slot, r, before, entries)
        assert_waiting(found, wanted)
