"""tree_verify, fold and snapshot_verify against the float64 recurrence over each root path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from tensor_checks import Draw, relative_error
from torch import Tensor

from mamba_eagle.kernels.ssd.naive import recurrence_oracle
from mamba_eagle.kernels.tree_verify.torch import Rows, fold, snapshot_verify, tree_verify

torch.set_num_threads(1)

GARBAGE = 1e15  # in rows that nobody may look at; its square is finite, so 0 · it is 0


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
    pytest.param(Sizes(12, 12, 4, 2, 8, 16), id="no-room-for-a-chain"),
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


def root_path(batch: Batch, b: int, node: int) -> list[int]:
    path = [node]
    while path[0]:
        path.insert(0, int(batch.parents[b, path[0]]))
    return path


def plain_run(batch: Batch, b: int, row_ids: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over these rows from S0: y [l, H, P] without the skip, states."""
    x, B, dt, _ = (part[b, row_ids] for part in batch.rows)
    return recurrence_oracle(x, dt, batch.A, B, C, torch.zeros_like(batch.A), batch.state[b])


def errors_of_nodes(batch: Batch, y: Tensor) -> list[float]:
    """Each node's output beside the last one of a plain run over journal and root path."""
    found = []
    for b, journal in enumerate(batch.journals):
        for node in range(y.shape[1]):
            ids = torch.cat([journal, batch.node_rows[b, root_path(batch, b, node)]])
            C = batch.C[b, node].expand(len(ids), -1, -1)
            expected, _ = plain_run(batch, b, ids, C)
            found.append(relative_error(y[b, node], expected[-1]))
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
def test_a_fold_equals_a_plain_run_over_the_chain(sizes: Sizes, largest_step: float) -> None:
    batch = make_batch(sizes, largest_step)
    folded = fold(batch.rows, batch.in_journal, batch.journal_decay, batch.state)
    assert folded.isfinite().all()
    for b, journal in enumerate(batch.journals):
        if len(journal) == 0:
            assert torch.equal(folded[b], batch.state[b]), "nothing to fold: not a bit changes"
            continue
        _, states = plain_run(batch, b, journal, torch.zeros(len(journal), *batch.C.shape[2:]))
        assert relative_error(folded[b], states[-1]) < (1e-6 if largest_step < 1 else 1e-4)


def test_a_fold_of_a_chains_head_equals_a_plain_run_over_it() -> None:
    batch = make_batch(SIZES[2].values[0], 0.3)
    journal = batch.journals[0]
    _, states = plain_run(batch, 0, journal, torch.zeros(len(journal), *batch.C.shape[2:]))
    one = Rows(*(part[:1] for part in batch.rows))
    for keep in range(1, len(journal) + 1):
        in_journal = torch.zeros_like(batch.in_journal[:1])
        in_journal[0, journal[:keep]] = True
        end = batch.rows.log_decay[:1, journal[keep - 1]]
        folded = fold(one, in_journal, end, batch.state[:1])
        assert relative_error(folded[0], states[keep - 1]) < 1e-6


@pytest.mark.parametrize("largest_step", STEPS)
@pytest.mark.parametrize("sizes", SIZES)
def test_snapshots_equal_plain_runs_over_each_path(sizes: Sizes, largest_step: float) -> None:
    """Where a request's state is the state after its journal."""
    batch = make_batch(sizes, largest_step)
    index = batch.node_rows
    each = torch.arange(index.shape[0])[:, None]
    x, B, dt = (part[each, index] for part in batch.rows[:3])
    y, states = snapshot_verify(x, dt, batch.A, B, batch.C, batch.state, batch.parents)
    for b in range(index.shape[0]):
        for node in range(index.shape[1]):
            ids = index[b, root_path(batch, b, node)]
            C = batch.C[b, node].expand(len(ids), -1, -1)
            expected, expected_states = plain_run(batch, b, ids, C)
            assert relative_error(y[b, node], expected[-1]) < 1e-5
            assert relative_error(states[b, node], expected_states[-1]) < 1e-6
