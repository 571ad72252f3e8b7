"""The Triton snapshot_verify against naive.py, and what accepting copies."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from forms import DEVICE, in_the_interpreter, runs_kernels
from tensor_checks import Draw, relative_error
from triton_rig import BFLOAT16_ERROR, NANO, to_device, tree_layout
from verify_rig import chain_tree, random_tree

from mamba_eagle.kernels.state_rounding.torch import round_states, token_keys
from mamba_eagle.kernels.tree_verify import naive
from mamba_eagle.kernels.tree_verify.layout import RowBuffers, Sizes
from mamba_eagle.kernels.tree_verify.triton_snapshot import (
    SnapshotConfig,
    commit_snapshots,
    snapshot_verify,
)

test_in_the_interpreter = in_the_interpreter


class Case(NamedTuple):
    sizes: Sizes
    nodes: int
    batch: int
    chain: bool = False  # all nodes in one path
    config: SnapshotConfig | None = None
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32


SMALL = Sizes(4, 20, 2, 16)
CASES = [
    pytest.param(Case(SMALL, 7, 2), id="tree"),
    pytest.param(Case(SMALL, 4, 1, chain=True), id="chain"),
    pytest.param(Case(SMALL, 1, 2), id="one-node"),
    pytest.param(Case(SMALL, 9, 1, config=SnapshotConfig(4, 4)), id="small-tiles"),
    pytest.param(Case(SMALL, 5, 2, dtype=torch.bfloat16), id="bfloat16-rows"),
    pytest.param(Case(SMALL, 5, 2, state_dtype=torch.bfloat16), id="bfloat16-state"),
]
GPU_CASES = [
    pytest.param(Case(NANO, 8, 3, dtype=torch.bfloat16), id="nano-8"),
    pytest.param(Case(NANO, 16, 3, True, dtype=torch.bfloat16), id="nano-16-chain"),
    pytest.param(Case(NANO, 64, 2, dtype=torch.bfloat16), id="nano-64"),
    pytest.param(
        Case(NANO, 16, 2, config=SnapshotConfig(16, 1), dtype=torch.bfloat16), id="nano-tiles-of-16"
    ),
    pytest.param(Case(Sizes(8, 128, 2, 256), 8, 2, dtype=torch.bfloat16), id="p128-n256"),
    pytest.param(Case(Sizes(8, 64, 4, 16), 8, 2, dtype=torch.bfloat16), id="p64-n16"),
]


def check(case: Case) -> None:
    draw = Draw(0)
    (H, P, G, N), b, T = case.sizes, case.batch, case.nodes
    R, W, S = b + 1, T + 2, b + 2

    tree = chain_tree(b, T) if case.chain else random_tree(b, T, T, draw.generator)
    rows = torch.stack([torch.randperm(W, generator=draw.generator)[:T] for _ in range(b)])
    slots = torch.randperm(R, generator=draw.generator)[:b]
    step = tree_layout(tree, slots, torch.randperm(S, generator=draw.generator)[:b], rows)
    C = draw.normal(b, T, G * N).to(case.dtype).to(DEVICE)
    dt = draw.steps(R, W, H, largest=0.3)
    xB = draw.normal(R, W, H * P + G * N).to(case.dtype)
    buffers = to_device(RowBuffers(xB, dt, torch.zeros_like(dt)))
    A, D = draw.decay_rates(H).to(DEVICE), draw.normal(H).to(DEVICE)
    state = draw.normal(S, H, P, N).to(case.state_dtype).to(DEVICE)
    before = state.clone()
    node_states = torch.full((R, W, H, P, N), 77.0, device=DEVICE)
    wanted_states = node_states.double()

    outputs = []
    for i, slot in enumerate(step.slots):
        x, B = buffers.xB[slot, step.rows[i]].split([H * P, G * N], dim=1)
        dt_nodes = buffers.dt[slot, step.rows[i]]
        nodes = naive.Rows(x.unflatten(1, (H, P)), dt_nodes, B.unflatten(1, (G, N)))
        nothing = naive.Rows(*(part[:0] for part in nodes))
        exact = naive.tree_verify(
            nothing,
            nodes,
            C[i].unflatten(1, (G, N)),
            tree.parents[i].tolist(),
            A,
            D,
            state[step.state_slots[i]],
        )
        outputs.append(exact.y.flatten(1))
        wanted_states[slot, step.rows[i]] = exact.states

    y = snapshot_verify(buffers, C, A, D, state, node_states, step, case.sizes, case.config)
    y_error = relative_error(y, torch.cat(outputs))
    used = wanted_states[:, :, 0, 0, 0] != 77.0
    state_error = relative_error(node_states[used], wanted_states[used])
    print(f"relative error: outputs {y_error:.1e}, states {state_error:.1e}")
    assert y_error < (2e-6 if case.dtype == torch.float32 else BFLOAT16_ERROR)
    assert state_error < 1e-6
    assert (node_states[~used] == 77.0).all(), "another place was written to"
    assert torch.equal(state, before), "verifying only reads state slots"


@runs_kernels
@pytest.mark.parametrize("case", CASES)
def test_nodes_equal_the_recurrence_over_their_paths(case: Case) -> None:
    check(case)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("case", GPU_CASES)
def test_nodes_equal_the_recurrence_over_their_paths_at_real_sizes(case: Case) -> None:
    check(case)


class CopyCase(NamedTuple):
    layers: int
    shape: tuple[int, int, int]  # of a state
    block: int
    dtype: torch.dtype = torch.float32


@runs_kernels
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(CopyCase(2, (2, 5, 4), 16), id="blocks-that-do-not-fill"),
        pytest.param(CopyCase(2, (2, 5, 4), 64, torch.bfloat16), id="bfloat16-state"),
        pytest.param(CopyCase(3, (128, 80, 128), 4096), id="nano", marks=pytest.mark.gpu),
    ],
)
def test_accepting_copies_states(case: CopyCase) -> None:
    """Of requests that accept something; the others keep all they had."""
    generator = torch.Generator().manual_seed(0)
    R, W, S = 4, 3, 5
    node_states = torch.randn(case.layers, R, W, *case.shape, generator=generator).to(DEVICE)
    state = torch.randn(case.layers, S, *case.shape, generator=generator)
    state = state.to(case.dtype).to(DEVICE)
    slots, state_slots = torch.tensor([2, 0, 3]).to(DEVICE), torch.tensor([4, 1, 0]).to(DEVICE)
    rows, count = torch.tensor([1, 2, 0]).to(DEVICE), torch.tensor([3, 0, 1]).to(DEVICE)
    wanted_state = state.clone()
    for i in (0, 2):
        accepted = node_states[:, slots[i], rows[i]]
        wanted_state[:, state_slots[i]] = accepted.to(case.dtype)

    commit_snapshots(node_states, state, slots, state_slots, rows, count, case.block)
    # in the interpreter, numbers are cut
    torch.testing.assert_close(state, wanted_state, rtol=2**-7, atol=0)
    assert case.dtype != torch.float32 or torch.equal(state, wanted_state)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_an_accepted_state_is_rounded_with_its_requests_noise(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    node_states = torch.randn(3, 4, 3, 2, 5, 4, generator=generator).to(DEVICE)
    state = torch.zeros(3, 5, 2, 5, 4, dtype=dtype, device=DEVICE)
    slots, state_slots, rows, count = (
        torch.tensor(part).to(DEVICE) for part in ([2, 0, 3], [4, 1, 0], [1, 2, 0], [3, 0, 1])
    )
    keys = token_keys(torch.arange(3), torch.arange(3) + 70).to(DEVICE)
    indices = (slots, state_slots, rows, count)
    commit_snapshots(node_states, state, *indices, block=16, round_keys=keys)
    for layer in range(3):
        wanted = round_states(node_states[layer, slots, rows], keys, layer, dtype)
        wanted[1] = 0  # accepts nothing
        assert torch.equal(state[layer, state_slots], wanted)
