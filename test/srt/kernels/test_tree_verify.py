"""tree_verify, fold and snapshot_verify in torch, and a CPU's rows, against naive.py.

A CPU's layers are held to the same recurrence in test_verify_schemes.py, Triton's kernels in
test_triton_verify.py, test_triton_fold.py and test_triton_snapshot.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from tensor_checks import Draw, relative_error
from torch import Tensor

from mamba_eagle.cpu.ops import tree_verify as cpu
from mamba_eagle.kernels.tree_verify import naive
from mamba_eagle.kernels.tree_verify.naive_rows import RowKeeper
from mamba_eagle.kernels.tree_verify.torch import Rows, fold, snapshot_verify, tree_verify

torch.set_num_threads(1)

GARBAGE = 1e15  # in rows that must not be read; its square is finite, so that 0 times it is 0


class Sizes(NamedTuple):
    nodes: int
    rows: int
    heads: int
    groups: int
    head_dim: int
    state_size: int


SIZES = [
    pytest.param(Sizes(1, 8, 2, 1, 8, 4), id="decode"),
    pytest.param(Sizes(5, 12, 4, 4, 12, 8), id="a-group-a-head"),
    pytest.param(Sizes(12, 40, 8, 2, 64, 16), id="default-tree"),
    pytest.param(Sizes(12, 12, 4, 2, 8, 16), id="no-room-for-a-journal"),
    pytest.param(Sizes(9, 20, 6, 3, 5, 7), id="odd-sizes"),
]
# largest dt: the strongest decay of a token is exp(-7.4 · dt)
STEPS = [pytest.param(0.3, id="mild"), pytest.param(60.0, id="decays-that-underflow")]


@dataclass
class Batch:
    """Packed rows of b requests as the kernels take them, and each one's tokens in plain order."""

    rows: Rows
    C: Tensor
    log_decay: Tensor  # of the nodes
    state: Tensor
    mask_bias: Tensor
    in_journal: Tensor
    journal_decay: Tensor
    A: Tensor
    parents: Tensor  # [b, T]
    journals: list[Tensor]  # row ids in sequence order
    node_rows: Tensor  # [b, T]


def make_batch(sizes: Sizes, largest_step: float, seed: int = 0, batch: int = 3) -> Batch:
    draw = Draw(seed)
    T, W, H, G, P, N = sizes
    A = draw.decay_rates(H)
    x, B = draw.normal(batch, W, H, P), draw.normal(batch, W, G, N)
    C = draw.normal(batch, T, G, N)
    dt = draw.steps(batch, W, H, largest=largest_step)
    log_decay = torch.full((batch, W, H), -GARBAGE)  # L_i - L_j = 1e15, were it not masked
    node_decay = torch.zeros(batch, T, H)
    in_journal = torch.zeros(batch, W, dtype=torch.bool)
    journal_decay = torch.zeros(batch, H)
    mask_bias = torch.full((batch, T, W), float("-inf"))
    parents = torch.zeros(batch, T, dtype=torch.int64)
    node_rows = torch.zeros(batch, T, dtype=torch.int64)
    journals = []
    for b in range(batch):
        order = torch.randperm(W, generator=draw.generator)
        length = draw.below(W - T + 1) if b else W - T
        journal, own = order[:length], order[length : length + T]
        unused = order[length + T :]
        x[b, unused], B[b, unused], dt[b, unused] = GARBAGE, -GARBAGE, GARBAGE
        log_decay[b, unused[: len(unused) // 2]] = GARBAGE
        steps = (dt[b] * A).double()
        running = steps[journal].cumsum(0)
        log_decay[b, journal] = running.float()
        end = running[-1] if length else torch.zeros(H).double()
        journal_decay[b] = end.float()
        in_journal[b, journal] = True
        mask_bias[b, :, journal] = 0.0
        decays: list[Tensor] = []
        for node in range(T):
            parent = 0
            if node:
                parent = draw.below(node, begin=max(0, node - 4))
                mask_bias[b, node] = mask_bias[b, parent]
            parents[b, node] = parent
            mask_bias[b, node, own[node]] = 0.0
            decays.append((decays[parent] if node else end) + steps[own[node]])
            log_decay[b, own[node]] = node_decay[b, node] = decays[node].float()
        journals.append(journal)
        node_rows[b] = own
    return Batch(
        rows=Rows(x, B, dt, log_decay),
        C=C,
        log_decay=node_decay,
        state=draw.normal(batch, H, P, N),
        mask_bias=mask_bias,
        in_journal=in_journal,
        journal_decay=journal_decay,
        A=A,
        parents=parents,
        journals=journals,
        node_rows=node_rows,
    )


def rows_of(batch: Batch, b: int, row_ids: Tensor) -> naive.Rows:
    x, B, dt, _ = (part[b, row_ids] for part in batch.rows)
    return naive.Rows(x, dt, B)


def verified(batch: Batch, b: int, journal: Tensor) -> naive.Verified:
    """Request b's nodes in float64, after these journal rows; without the skip."""
    nodes, parents = rows_of(batch, b, batch.node_rows[b]), batch.parents[b].tolist()
    before, no_skip = rows_of(batch, b, journal), torch.zeros_like(batch.A)
    return naive.tree_verify(before, nodes, batch.C[b], parents, batch.A, no_skip, batch.state[b])


def folded_state(batch: Batch, b: int, journal: Tensor) -> Tensor:
    return naive.fold(rows_of(batch, b, journal), batch.A, batch.state[b])


def errors_of_nodes(batch: Batch, y: Tensor) -> list[float]:
    """Relative errors of all nodes' outputs."""
    found = []
    for b, journal in enumerate(batch.journals):
        exact = verified(batch, b, journal).y
        found += [relative_error(y[b, node], exact[node]) for node in range(y.shape[1])]
    return found


@pytest.mark.parametrize("largest_step", STEPS)
@pytest.mark.parametrize("sizes", SIZES)
def test_each_node_equals_a_plain_run_over_its_path(sizes: Sizes, largest_step: float) -> None:
    batch = make_batch(sizes, largest_step)
    y = tree_verify(batch.rows, batch.C, batch.log_decay, batch.state, batch.mask_bias)
    assert y.isfinite().all()
    assert max(errors_of_nodes(batch, y)) < (1e-5 if largest_step < 1 else 1e-4)


def test_packed_order_in_place_of_ancestors_would_be_wrong() -> None:
    """The test above can fail: a causal mask over the packed rows is far off."""
    batch = make_batch(SIZES[2].values[0], 0.3)
    for b in range(3):
        for node in range(12):
            batch.mask_bias[b, node, batch.node_rows[b, :node]] = 0.0
    y = tree_verify(batch.rows, batch.C, batch.log_decay, batch.state, batch.mask_bias)
    assert max(errors_of_nodes(batch, y)) > 0.1


def test_verifying_writes_nothing() -> None:
    batch = make_batch(SIZES[2].values[0], 0.3)
    inputs = (*batch.rows, batch.C, batch.log_decay, batch.state, batch.mask_bias)
    before = [part.clone() for part in inputs]
    tree_verify(batch.rows, batch.C, batch.log_decay, batch.state, batch.mask_bias)
    fold(batch.rows, batch.in_journal, batch.journal_decay, batch.state)
    assert all(torch.equal(part, copy) for part, copy in zip(inputs, before))


@pytest.mark.parametrize("largest_step", STEPS)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_fold_equals_a_plain_run_over_the_journal(sizes: Sizes, largest_step: float) -> None:
    batch = make_batch(sizes, largest_step)
    folded = fold(batch.rows, batch.in_journal, batch.journal_decay, batch.state)
    assert folded.isfinite().all()
    for b, journal in enumerate(batch.journals):
        if len(journal) == 0:
            assert torch.equal(folded[b], batch.state[b]), "nothing to fold: not a bit changes"
            continue
        exact = folded_state(batch, b, journal)
        assert relative_error(folded[b], exact) < (1e-6 if largest_step < 1 else 1e-4)


def test_a_fold_of_a_journals_head_equals_a_plain_run_over_it() -> None:
    batch = make_batch(SIZES[2].values[0], 0.3)
    journal = batch.journals[0]
    one = Rows(*(part[:1] for part in batch.rows))
    for keep in range(1, len(journal) + 1):
        in_journal = torch.zeros_like(batch.in_journal[:1])
        in_journal[0, journal[:keep]] = True
        end = batch.rows.log_decay[:1, journal[keep - 1]]
        folded = fold(one, in_journal, end, batch.state[:1])
        assert relative_error(folded[0], folded_state(batch, 0, journal[:keep])) < 1e-6


@pytest.mark.parametrize("largest_step", STEPS)
@pytest.mark.parametrize("sizes", SIZES)
def test_snapshots_equal_plain_runs_over_each_path(sizes: Sizes, largest_step: float) -> None:
    """There is no journal: trees start from the saved states."""
    batch = make_batch(sizes, largest_step)
    index = batch.node_rows
    each = torch.arange(index.shape[0])[:, None]
    x, B, dt = (part[each, index] for part in batch.rows[:3])
    y, states = snapshot_verify(x, dt, batch.A, B, batch.C, batch.state, batch.parents)
    for b in range(index.shape[0]):
        exact = verified(batch, b, batch.journals[b][:0])
        for node in range(index.shape[1]):
            assert relative_error(y[b, node], exact.y[node]) < 1e-5
            assert relative_error(states[b, node], exact.states[node]) < 1e-6


# ── rows on a CPU ──


def test_rows_on_a_cpu_are_those_of_naive() -> None:
    """Journals grow until a tree finds no room, and are folded up to any of their tokens."""
    draw, requests, history, W, T, D, F = Draw(0), 3, 3, 17, 5, 4, 6
    path = torch.zeros(requests, history + W + D, dtype=torch.int64)
    path[:, :history] = torch.arange(history)
    journal_len = torch.zeros(requests, dtype=torch.int64)
    feature, state_slot = torch.zeros(requests, W, F), torch.tensor([7, 2, 5])
    conv_in = draw.normal(2, requests, history + W, 4)  # of two layers
    plain = [RowKeeper(history, W, W, D, None) for _ in range(requests)]
    folds = 0
    for _ in range(30):
        slots = torch.randperm(requests, generator=draw.generator)[:2]
        for slot in slots.tolist():
            length = len(plain[slot].journal)
            if length <= W - T:
                continue
            keep, folds = draw.below(length + 1), folds + 1
            wanted = conv_in[:, slot, plain[slot].path[keep : keep + history]]
            one = (torch.tensor([slot]), torch.tensor([keep]), path)
            cpu.move_history(*(part.numpy() for part in one), history, conv_in.numpy())
            assert torch.equal(conv_in[:, slot, :history], wanted)
            journal_len[slot] = 0
            plain[slot].path = list(range(history))
        at, length, rows, journal, tail = (
            torch.empty(2, *shape, dtype=torch.int64) for shape in ((), (), (T,), (W,), (history,))
        )
        tables = (slots, state_slot, path, journal_len)
        cpu.begin(*(part.numpy() for part in (*tables, at, journal, length, rows, tail)))
        assert torch.equal(at, state_slot[slots])
        hidden, count = draw.normal(2 * T, F), torch.tensor([draw.below(D + 1) for _ in slots])
        nodes = torch.stack([torch.randperm(T, generator=draw.generator)[:D] for _ in slots])
        step = (slots, rows, nodes, count, hidden)
        tables = (part.numpy() for part in (path, journal_len, feature))
        cpu.extend_journals(*(part.numpy() for part in step), history, *tables)
        for r, slot in enumerate(slots.tolist()):
            begun = plain[slot].begin(T)
            assert not begun.folds
            assert rows[r].tolist() == begun.rows
            assert journal[r, : length[r]].tolist() == begun.journal
            assert tail[r].tolist() == begun.tail
            own = hidden.view(2, T, F)[r].tolist()
            plain[slot].accept(begun, nodes[r, : count[r]].tolist(), own)
            kept = plain[slot].journal
            assert path[slot, : history + journal_len[slot]].tolist() == plain[slot].path
            assert feature[slot, kept].tolist() == [plain[slot].features[row] for row in kept]
    assert folds > 3
