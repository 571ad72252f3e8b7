"""The Triton tree_verify, its folds among it, against naive.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from forms import DEVICE, in_the_interpreter, runs_kernels
from tensor_checks import Draw, relative_error
from torch import Tensor
from triton_rig import BFLOAT16_ERROR, NANO, assert_mostly_equal, to_device, tree_layout
from verify_rig import random_tree

from mamba_eagle.kernels.state_rounding.torch import round_states, token_keys
from mamba_eagle.kernels.tree_verify import gluon, naive
from mamba_eagle.kernels.tree_verify.layout import RowBuffers, Sizes, TreeLayout
from mamba_eagle.kernels.tree_verify.triton import Config, tree_verify
from mamba_eagle.tree.tree import Tree, single_node_tree

GARBAGE = 1e15  # in rows that must not be read


test_in_the_interpreter = in_the_interpreter


class Case(NamedTuple):
    sizes: Sizes
    nodes: int
    max_journal: int
    journal_lens: tuple[int, ...]  # one per request
    fold: tuple[bool, ...] | None = None
    config: Config | None = None
    dtype: torch.dtype = torch.float32
    largest_step: float = 0.3
    state_dtype: torch.dtype = torch.float32
    tiles: int = 0  # per program of gluon.py; 0: triton.py


SMALL = Sizes(8, 20, 2, 16)  # 4 heads are 5 tiles of 16, three of which lie in two heads
CASES = [
    pytest.param(Case(SMALL, 5, 12, (12, 0, 7)), id="tiles-in-two-heads"),
    pytest.param(Case(SMALL, 5, 12, (12, 0, 7), (True, True, False)), id="fold"),
    pytest.param(Case(SMALL, 1, 9, (9, 0, 4)), id="decode"),
    pytest.param(Case(SMALL, 1, 9, (9, 0, 4), (True, True, False)), id="decode-fold"),
    pytest.param(Case(SMALL, 5, 12, (12, 7), (True, False), Config(16)), id="state-read-late"),
    pytest.param(
        Case(Sizes(2, 64, 1, 32), 17, 3, (2, 3), (True, False)), id="a-tile-is-a-head-fold"
    ),
    pytest.param(Case(SMALL, 9, 7, (7,), (True,), None, torch.float32, 60.0), id="underflow"),
    pytest.param(Case(Sizes(2, 16, 2, 16), 64, 2, (2, 1)), id="64-nodes"),
    pytest.param(
        Case(SMALL, 5, 12, (12, 0, 7), (True, True, False), dtype=torch.bfloat16),
        id="bfloat16-rows-fold",
    ),
]


def gpu_cases() -> list[object]:
    cases = {
        "nano-tree": Case(NANO, 16, 16, (16, 0, 5)),
        "nano-fold": Case(NANO, 16, 16, (16, 0, 5), (True, True, False)),
        "nano-decode": Case(NANO, 1, 16, (16, 0, 5)),
        "nano-batch-of-8": Case(NANO, 16, 16, (16, 0, 5, 16, 9, 1, 2, 3)),
        "nano-batch-of-4-fold": Case(NANO, 16, 16, (16, 0, 5, 9), (True, False, True, False)),
        "nano-decode-fold": Case(NANO, 1, 16, (16, 0, 5), (False, True, True)),
        "nano-64-nodes-64-rows": Case(NANO, 64, 64, (64, 33), (True, False)),
        "nano-underflow": Case(NANO, 16, 16, (16, 9), (True, True), largest_step=60.0),
        "p64-n128-g1": Case(Sizes(8, 64, 1, 128), 12, 20, (20, 3), (True, False)),
        "p128-n256": Case(Sizes(8, 128, 2, 256), 8, 8, (8, 3), (True, False)),
        "p128-n256-64-nodes": Case(Sizes(8, 128, 2, 256), 64, 64, (64, 3), (True, False)),
        "p64-n16-g4": Case(Sizes(8, 64, 4, 16), 31, 33, (33, 3), (True, False)),
        "bf16-state": Case(NANO, 16, 16, (16, 5), (True, False), state_dtype=torch.bfloat16),
    }
    found = []
    for name, case in cases.items():
        found.append(pytest.param(case._replace(dtype=torch.bfloat16), id=name))
        if name in ("nano-fold", "p64-n128-g1"):
            found.append(pytest.param(case, id=name + "-float32-rows"))
    for config in (Config(64), Config(64, early=True), Config(32)):
        case = cases["nano-fold"]._replace(config=config, dtype=torch.bfloat16)
        found.append(pytest.param(case, id=f"nano-fold-{config}"))
    for name, case in registers_cases().items():
        found.append(pytest.param(case, id=f"registers-{name}"))
    return found


def registers_cases() -> dict[str, Case]:
    """Of gluon.py, which only runs on a GPU."""
    fold, half = (True, True, False), torch.float16
    tree = Case(NANO, 8, 14, (14, 0, 5), fold, None, torch.bfloat16, tiles=5)
    wide = Case(Sizes(8, 128, 2, 256), 8, 8, (8, 3), (True, False), None, torch.bfloat16, tiles=4)
    return {
        "no-fold": tree._replace(fold=None),
        "tree": tree,
        "tile-a-program": tree._replace(tiles=1),
        "16-nodes": tree._replace(nodes=16),
        "decode": tree._replace(nodes=1, fold=None),
        "decode-fold": tree._replace(nodes=1, tiles=1),
        "64-rows": tree._replace(nodes=16, max_journal=48, journal_lens=(48, 0, 31)),
        "underflow": tree._replace(largest_step=60.0),
        "float16-rows": tree._replace(dtype=half),
        "bfloat16-state": tree._replace(state_dtype=torch.bfloat16),
        "float16-all": tree._replace(dtype=half, state_dtype=half),
        "p128-n256": wide,
        "p128-n256-tile-a-program": wide._replace(tiles=1),
        "p64-n64": Case(
            Sizes(8, 64, 1, 64), 12, 20, (20, 3), (True, False), None, torch.bfloat16, tiles=2
        ),
        "p16-n32": Case(
            Sizes(8, 16, 4, 32), 7, 9, (9, 3), (True, False), None, torch.bfloat16, tiles=1
        ),
    }


@dataclass
class Batch:
    case: Case
    buffers: RowBuffers
    C: Tensor
    A: Tensor
    D: Tensor
    state: Tensor
    step: TreeLayout
    tree: Tree

    def verify(self) -> Tensor:
        case = self.case
        inputs = (self.buffers, self.C, self.D, self.state, self.step, case.sizes)
        if case.tiles:
            assert gluon.supports(self.buffers, self.step, case.sizes)
            return gluon.tree_verify(*inputs, tiles=case.tiles)
        return tree_verify(*inputs, case.config)


def make_batch(case: Case, seed: int = 0) -> Batch:
    draw = Draw(seed)
    generator = draw.generator
    H, P, G, N = case.sizes
    b, T, M = len(case.journal_lens), case.nodes, case.max_journal
    R, W, S = b + 1, M + T, b + 2

    A = draw.decay_rates(H)
    slots = torch.randperm(R, generator=generator)[:b]
    state_slots = torch.randperm(S, generator=generator)[:b]
    xB = torch.full((R, W, H * P + G * N), GARBAGE)
    dt = torch.full((R, W, H), GARBAGE)
    log_decay = torch.full((R, W, H), -GARBAGE)
    journal = torch.full((b, M), -7)
    rows = torch.zeros(b, T, dtype=torch.int64)
    tree = random_tree(b, T, T, generator)
    for i, (slot, length) in enumerate(zip(slots, case.journal_lens)):
        order = torch.randperm(W, generator=generator)
        journal[i, :length], rows[i] = order[:length], order[length : length + T]
        used = order[: length + T]
        xB[slot, used] = draw.normal(length + T, H * P + G * N)
        dt[slot, used] = draw.steps(length + T, H, largest=case.largest_step)
        decay = dt[slot, used].double() * A
        journal_L = decay[:length].cumsum(0)
        tree_L = tree.ancestors[i].double() @ decay[length:]
        if length and not (case.fold and case.fold[i]):
            tree_L += journal_L[-1]
        log_decay[slot, used] = torch.cat([journal_L, tree_L]).float()
    return Batch(
        case,
        to_device(RowBuffers(xB.to(case.dtype), dt, log_decay)),
        draw.normal(b, T, G * N).to(case.dtype).to(DEVICE),
        A.to(DEVICE),
        draw.normal(H).to(DEVICE),
        draw.normal(S, H, P, N).to(case.state_dtype).to(DEVICE),
        tree_layout(tree, slots, state_slots, rows, journal, case.journal_lens, fold=case.fold),
        tree,
    )


def expected(batch: Batch) -> tuple[Tensor, Tensor]:
    """Outputs [b*T, H*P] and the pool after the step, in float64."""
    H, P, G, N = batch.case.sizes
    step, pool = batch.step, batch.state.double()
    outputs = []
    for i, length in enumerate(batch.case.journal_lens):
        slot, state_slot = step.slots[i], step.state_slots[i]

        def fed(rows: Tensor, slot: Tensor = slot) -> naive.Rows:
            xB = batch.buffers.xB[slot, rows]
            x, B = xB[:, : H * P].unflatten(1, (H, P)), xB[:, H * P :].unflatten(1, (G, N))
            return naive.Rows(x, batch.buffers.dt[slot, rows], B)

        journal, nodes = fed(step.journal[i, :length]), fed(step.rows[i])
        C, parents = batch.C[i].unflatten(1, (G, N)), batch.tree.parents[i].tolist()
        state = batch.state[state_slot]
        verified = naive.tree_verify(journal, nodes, C, parents, batch.A, batch.D, state)
        outputs.append(verified.y.flatten(1))
        if batch.case.fold and batch.case.fold[i]:
            pool[state_slot] = naive.fold(journal, batch.A, state)
    return torch.cat(outputs), pool


def check(case: Case) -> None:
    batch = make_batch(case)
    before = batch.state.clone()
    y_wanted, pool_wanted = expected(batch)
    y = batch.verify()
    y_error, state_error = relative_error(y, y_wanted), 0.0
    folded = [c for c, f in zip(batch.step.state_slots, case.fold or []) if f]
    for state_slot in folded:
        state_error = max(
            state_error, relative_error(batch.state[state_slot], pool_wanted[state_slot])
        )
        before[state_slot] = batch.state[state_slot]
    print(f"relative error: outputs {y_error:.1e}, folded states {state_error:.1e}")
    exact_rows = case.dtype == torch.float32
    assert y_error < (3e-6 if exact_rows else BFLOAT16_ERROR)
    if case.state_dtype == torch.float32:
        assert state_error < (3e-6 if exact_rows else 1e-5)
    else:
        assert state_error < 4e-3
    assert torch.equal(batch.state, before), "a state that was not folded has changed"


@runs_kernels
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_folds_equal_the_recurrence(case: Case) -> None:
    check(case)


@runs_kernels
@pytest.mark.parametrize("sizes", [SMALL, SMALL._replace(head_dim=16, state_size=32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_folded_state_is_rounded_with_its_requests_noise(
    dtype: torch.dtype, sizes: Sizes
) -> None:
    case = Case(sizes, 5, 12, (12, 7, 4), (True, True, False), None, torch.bfloat16)
    batch = make_batch(case._replace(state_dtype=dtype))
    exact = batch.state.float()
    keys = token_keys(torch.arange(3), torch.arange(3) + 70).to(DEVICE)
    rounding = batch.step._replace(round_keys=keys)
    inputs = (batch.buffers, batch.C, batch.D)
    gluon.tree_verify(*inputs, batch.state, rounding, sizes, layer=4)
    gluon.tree_verify(*inputs, exact, batch.step, sizes)
    slots = batch.step.state_slots[:2]
    wanted = round_states(exact[slots], keys[:2], 4, dtype)
    assert_mostly_equal(batch.state[slots], wanted)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("case", gpu_cases())
def test_real_sizes_equal_the_recurrence(case: Case) -> None:
    check(case)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_stays_true_over_many_folds(dtype: torch.dtype) -> None:
    """10,000 tokens, folded 16 at a time; the oracle reads the rows as they were stored."""
    H, P, G, N = sizes = Sizes(8, 80, 2, 128)
    torch.manual_seed(0)
    M, folds = 16, 625
    A = -torch.exp(torch.rand(H, device=DEVICE) * 4 - 4)
    state = torch.zeros(1, H, P, N, device=DEVICE)
    exact = torch.zeros(H, P, N, dtype=torch.float64, device=DEVICE)
    zero, journal = torch.zeros(1, dtype=torch.int64), torch.arange(M)[None]
    tree = single_node_tree(zero)
    step = tree_layout(tree, zero, zero, zero[None] + M, journal, (M,), fold=(True,))
    D = torch.ones(H, device=DEVICE)
    for _ in range(folds):
        xB = torch.randn(1, M + 1, H * P + G * N, device=DEVICE).to(dtype)
        dt = torch.rand(1, M + 1, H, device=DEVICE) * 0.1
        log_decay = (dt.double() * A).cumsum(1).float()
        log_decay[:, M] = dt[:, M] * A
        C = torch.randn(1, 1, G * N, device=DEVICE).to(dtype)
        gluon.tree_verify(RowBuffers(xB, dt, log_decay), C, D, state, step, sizes)
        x, B = xB[0, :M].split([H * P, G * N], dim=1)
        rows = naive.Rows(x.unflatten(1, (H, P)), dt[0, :M], B.unflatten(1, (G, N)))
        exact = naive.fold(rows, A, exact)
    found = relative_error(state[0], exact)
    print(f"relative error of the state: {found:.1e}")
    assert found < 1e-5


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("tiles", [0, 5])
def test_a_graph_replays_with_other_lengths(tiles: int) -> None:
    case = Case(NANO, 16, 16, (16, 0, 5), (True, False, True), dtype=torch.bfloat16, tiles=tiles)
    batch = make_batch(case)
    first = batch.state.clone()
    wanted = batch.verify().clone()  # compiles, too
    folded = batch.state.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = batch.verify()
    batch.state.copy_(first)
    graph.replay()
    assert torch.equal(y, wanted)
    assert torch.equal(batch.state, folded)
