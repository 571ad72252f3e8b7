"""The Triton tree convolution, step sizes and gated norm against what they replace.

On a GPU, or in Triton's interpreter (see triton_rig.py).
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from triton_rig import (
    DEVICE,
    needs_interpreter,
    random_rates,
    run_in_the_interpreter,
    runs_kernels,
    to_device,
)
from verify_rig import path_to, random_tree

pytest.importorskip("triton")

from mamba_eagle.kernels.causal_conv.torch import causal_conv_windows
from mamba_eagle.kernels.causal_conv.triton import ConvWeights, tree_conv
from mamba_eagle.kernels.gated_norm.triton import gated_norm
from mamba_eagle.kernels.tree_verify.layout import RowBuffers, Sizes, TreeLayout, pack_ancestors

STALE = 77.0  # where nothing may be written


@needs_interpreter
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


class Case(NamedTuple):
    sizes: Sizes
    nodes: int
    journal_lens: tuple[int, ...]
    fold: tuple[bool, ...] | None = None
    conv_kernel: int = 4
    bias: bool = True
    step_limit: tuple[float, float] = (0.0, float("inf"))
    dtype: torch.dtype = torch.float32


SMALL, NANO = Sizes(4, 24, 2, 16), Sizes(128, 80, 8, 128)
CASES = [
    pytest.param(Case(SMALL, 7, (5, 0, 1)), id="tree"),
    pytest.param(Case(SMALL, 1, (5, 0)), id="decode"),
    pytest.param(Case(SMALL, 5, (5, 3, 0), (True, False, True)), id="fold"),
    pytest.param(Case(SMALL, 20, (2, 4), None, 2, False, (0.1, 0.5)), id="two-taps-no-bias-clamp"),
]
GPU_CASES = [
    pytest.param(Case(NANO, 16, (16, 0, 3), dtype=torch.bfloat16), id="nano-tree"),
    pytest.param(Case(NANO, 1, (16, 0, 3) * 4, dtype=torch.bfloat16), id="nano-decode"),
    pytest.param(
        Case(NANO, 64, (8, 0, 3), (True, True, False), dtype=torch.bfloat16), id="nano-64-fold"
    ),
]


def check(case: Case) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    H, P, G, N = case.sizes
    b, T, M, K = len(case.journal_lens), case.nodes, max(case.journal_lens), case.conv_kernel
    R, W, row_size = b + 1, M + T, H * P + G * N
    conv_dim = row_size + G * N
    A = random_rates(H, generator)
    weights = ConvWeights(
        torch.randn(K, conv_dim).to(case.dtype),
        torch.randn(conv_dim).to(case.dtype) if case.bias else None,
        torch.rand(H) * 12 - 11,
        A,
        case.step_limit,
    )
    projected = torch.randn(b * T, 64 + conv_dim + H).to(case.dtype)
    xbc, dt_raw = projected[:, 64 : 64 + conv_dim], projected[:, 64 + conv_dim :]
    dt_raw[0, 0] = 40.0  # past softplus's threshold
    slots = torch.randperm(R)[:b]
    conv_in = torch.randn(R, K - 1 + W, conv_dim).to(case.dtype)
    xB = torch.full((R, W, row_size), STALE).to(case.dtype)
    dt, log_decay = torch.full((R, W, H), STALE), -torch.rand(R, W, H)
    orders = [torch.randperm(W) for _ in range(b)]
    journal = torch.stack([order[:M] for order in orders]) if M else torch.zeros(b, 1).long()
    rows = torch.stack([order[M : M + T] for order in orders])
    tail = []
    for i, length in enumerate(case.journal_lens):
        path = torch.cat([torch.arange(K - 1), journal[i, :length] + K - 1])
        tail.append(path[len(path) - (K - 1) :])
    tree = random_tree(b, T, T, generator)

    # what must come out, request by request
    wanted_in, wanted_xB = conv_in.clone(), xB.clone()
    wanted_dt, wanted_L = dt.double(), log_decay.double()
    wanted_C = []
    step_size = F.softplus(dt_raw.double() + weights.dt_bias.double()).clamp(*case.step_limit)
    for i, (slot, length) in enumerate(zip(slots, case.journal_lens)):
        windows = []
        for node in range(T):
            path = torch.tensor(path_to(tree, i, node))
            past = conv_in[slot, tail[i]]
            windows.append(torch.cat([past, xbc[i * T + path]])[-K:])
        out = causal_conv_windows(torch.stack(windows), weights.conv_weight, weights.conv_bias)
        wanted_xB[slot, rows[i]], C = out[:, :row_size], out[:, row_size:]
        wanted_C.append(C)
        wanted_in[slot, rows[i] + K - 1] = xbc.view(b, T, -1)[i]
        steps = step_size.view(b, T, H)[i]
        wanted_dt[slot, rows[i]] = steps
        L = tree.ancestors[i].double() @ (steps * A)
        if length and not (case.fold and case.fold[i]):
            L += log_decay[slot, journal[i, length - 1]]
        wanted_L[slot, rows[i]] = L

    step = TreeLayout(
        slots=slots,
        state_slots=slots,
        journal=journal,
        journal_len=torch.tensor(case.journal_lens),
        rows=rows,
        parents=tree.parents,
        ancestors=pack_ancestors(tree.ancestors)[..., 0],
        tail=torch.stack(tail),
        fold=None if case.fold is None else torch.tensor(case.fold),
    )
    step, weights = to_device(step), to_device(weights)
    buffers = to_device(RowBuffers(xB, dt, log_decay))
    conv_in, projected = conv_in.to(DEVICE), projected.to(DEVICE)
    xbc, dt_raw = projected[:, 64 : 64 + conv_dim], projected[:, 64 + conv_dim :]
    C = tree_conv(xbc, dt_raw, weights, conv_in, buffers, step, case.sizes)

    close = {"rtol": 2e-6, "atol": 2e-6}
    rounded = close if case.dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-5}
    assert torch.equal(conv_in.cpu(), wanted_in)
    torch.testing.assert_close(buffers.xB.cpu(), wanted_xB, **rounded)
    torch.testing.assert_close(C.cpu(), torch.stack(wanted_C), **rounded)
    torch.testing.assert_close(buffers.dt.cpu().double(), wanted_dt, rtol=3e-6, atol=1e-9)
    torch.testing.assert_close(buffers.log_decay.cpu().double(), wanted_L, **close)


@runs_kernels
@pytest.mark.parametrize("case", CASES)
def test_rows_equal_naive(case: Case) -> None:
    check(case)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("case", GPU_CASES)
def test_rows_equal_naive_at_real_sizes(case: Case) -> None:
    check(case)


@runs_kernels
@pytest.mark.parametrize(
    "rows,size,groups,dtype",
    [
        pytest.param(3, 96, 4, torch.float32, id="groups-of-24"),
        pytest.param(2, 64, 1, torch.float32, id="one-group"),
        pytest.param(40, 10240, 8, torch.bfloat16, id="nano", marks=pytest.mark.gpu),
    ],
)
def test_gated_norm_equals_the_formula(
    rows: int, size: int, groups: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(size, device=DEVICE).to(dtype)
    projected = torch.randn(rows, size + 16, device=DEVICE).to(dtype)
    y, gate = torch.randn(rows, size, device=DEVICE).to(dtype), projected[:, :size]
    found = gated_norm(y, gate, weight, groups, 1e-5)
    gated = y.double() * F.silu(gate.double())
    groups_of = gated.unflatten(-1, (groups, -1))
    scale = (groups_of.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    wanted = (groups_of * scale).flatten(1) * weight.double()
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
