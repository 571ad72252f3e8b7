"""The Triton snapshot_verify and what accepting copies, against the recurrence in float64.

On a GPU, or in Triton's interpreter (see triton_rig.py).
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from triton_rig import (
    BFLOAT16_ERROR,
    DEVICE,
    needs_interpreter,
    random_rates,
    run_in_the_interpreter,
    runs_kernels,
    to_device,
)
from verify_rig import chain_tree, path_to, random_tree, relative_error

pytest.importorskip("triton")

from mamba_eagle.kernels.causal_conv.triton import move_history
from mamba_eagle.kernels.ssd.naive import recurrence_oracle
from mamba_eagle.kernels.tree_verify.layout import RowBuffers, Sizes, TreeLayout, pack_ancestors
from mamba_eagle.kernels.tree_verify.triton_snapshot import (
    SnapshotConfig,
    commit_snapshots,
    snapshot_verify,
)


@needs_interpreter
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


class Case(NamedTuple):
    sizes: Sizes
    nodes: int
    batch: int
    chain: bool = False  # all nodes in one path
    config: SnapshotConfig | None = None
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32


SMALL, NANO = Sizes(4, 20, 2, 16), Sizes(128, 80, 8, 128)
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
    generator = torch.Generator().manual_seed(0)
    (H, P, G, N), b, T = case.sizes, case.batch, case.nodes
    R, W, S = b + 1, T + 2, b + 2

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tree = chain_tree(b, T) if case.chain else random_tree(b, T, T, generator)
    rows = torch.stack([torch.randperm(W, generator=generator)[:T] for _ in range(b)])
    empty = torch.zeros(b, 0, dtype=torch.int64)
    step = TreeLayout(
        slots=torch.randperm(R, generator=generator)[:b],
        state_slots=torch.randperm(S, generator=generator)[:b],
        journal=empty,
        journal_len=torch.zeros(b, dtype=torch.int64),
        rows=rows,
        parents=tree.parents,
        ancestors=pack_ancestors(tree.ancestors)[..., 0],
        tail=empty,
    )
    step, C = to_device(step), normal(b, T, G * N).to(case.dtype).to(DEVICE)
    dt = torch.rand(R, W, H, generator=generator) * 0.3
    xB = normal(R, W, H * P + G * N).to(case.dtype)
    buffers = to_device(RowBuffers(xB, dt, torch.zeros_like(dt)))
    A, D = random_rates(H, generator).to(DEVICE), normal(H).to(DEVICE)
    state = normal(S, H, P, N).to(case.state_dtype).to(DEVICE)
    before = state.clone()
    node_states = torch.full((R, W, H, P, N), 77.0, device=DEVICE)
    wanted_states = node_states.double()

    outputs = []
    for i, slot in enumerate(step.slots):
        for node in range(T):
            path = step.rows[i, path_to(tree, i, node)]
            x, B = buffers.xB[slot, path].split([H * P, G * N], dim=1)
            y, states = recurrence_oracle(
                x.unflatten(1, (H, P)),
                buffers.dt[slot, path],
                A,
                B.unflatten(1, (G, N)),
                C[i, node].view(1, G, N).expand(len(path), -1, -1),
                D,
                state[step.state_slots[i]],
            )
            outputs.append(y[-1].flatten())
            wanted_states[slot, path[-1]] = states[-1]

    y = snapshot_verify(buffers, C, A, D, state, node_states, step, case.sizes, case.config)
    y_error = relative_error(y, torch.stack(outputs))
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
    conv_dim: int
    dtype: torch.dtype = torch.float32


@runs_kernels
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(CopyCase(2, (2, 5, 4), 16, 20), id="blocks-that-do-not-fill"),
        pytest.param(CopyCase(2, (2, 5, 4), 64, 20, torch.bfloat16), id="bfloat16-state"),
        pytest.param(CopyCase(3, (128, 80, 128), 4096, 12288), id="nano", marks=pytest.mark.gpu),
    ],
)
def test_accepting_copies_states_and_moves_histories(case: CopyCase) -> None:
    """Of requests that accept something; the others keep all they had."""
    generator = torch.Generator().manual_seed(0)
    R, W, S, K = 4, 3, 5, 4
    node_states = torch.randn(case.layers, R, W, *case.shape, generator=generator).to(DEVICE)
    state = torch.randn(case.layers, S, *case.shape, generator=generator)
    state = state.to(case.dtype).to(DEVICE)
    conv_in = torch.randn(case.layers, R, K - 1 + W, case.conv_dim, generator=generator).to(DEVICE)
    slots, state_slots = torch.tensor([2, 0, 3]).to(DEVICE), torch.tensor([4, 1, 0]).to(DEVICE)
    rows, count = torch.tensor([1, 2, 0]).to(DEVICE), torch.tensor([3, 0, 1]).to(DEVICE)
    # the last K-1 of the history 0, 1, 2 and the accepted rows, which stand behind it
    places = torch.tensor([[3, 5, 4], [3, 4, 5], [1, 2, 3]]).to(DEVICE)
    wanted_state, wanted_in = state.clone(), conv_in.clone()
    for i in (0, 2):
        accepted = node_states[:, slots[i], rows[i]]
        wanted_state[:, state_slots[i]] = accepted.to(case.dtype)
        wanted_in[:, slots[i], : K - 1] = conv_in[:, slots[i], places[i]]

    commit_snapshots(node_states, state, slots, state_slots, rows, count, case.block)
    move_history(conv_in, slots, places, count > 0, block=16)
    # in the interpreter, numbers are cut
    torch.testing.assert_close(state, wanted_state, rtol=2**-7, atol=0)
    assert case.dtype != torch.float32 or torch.equal(state, wanted_state)
    assert torch.equal(conv_in, wanted_in)
