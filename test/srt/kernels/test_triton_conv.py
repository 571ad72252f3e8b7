"""The Triton tree convolution and step sizes against naive.py."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from forms import DEVICE, in_the_interpreter, runs_kernels
from tensor_checks import Draw
from torch import Tensor
from triton_rig import NANO, to_device, tree_layout
from verify_rig import random_tree

from mamba_eagle.kernels.causal_conv import naive
from mamba_eagle.kernels.causal_conv.triton import Config, ConvWeights, tree_conv
from mamba_eagle.kernels.tree_verify.layout import RowBuffers, Sizes, TreeLayout
from mamba_eagle.tree.tree import Tree

STALE = 77.0  # where nothing may be written


test_in_the_interpreter = in_the_interpreter


class Case(NamedTuple):
    sizes: Sizes
    nodes: int
    journal_lens: tuple[int, ...]
    fold: tuple[bool, ...] | None = None
    conv_kernel: int = 4
    bias: bool = True
    step_limit: tuple[float, float] = (0.0, float("inf"))
    dtype: torch.dtype = torch.float32
    config: Config | None = None


SMALL = Sizes(4, 24, 2, 16)
CASES = [
    pytest.param(Case(SMALL, 7, (5, 0, 1)), id="tree"),
    pytest.param(Case(SMALL, 1, (5, 0)), id="decode"),
    pytest.param(Case(SMALL, 7, (0, 2), config=Config(4, 32, 1)), id="tree-in-blocks"),
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


class Filled(NamedTuple):
    """What the rows must hold after a step; float64 but for the raw inputs."""

    conv_in: Tensor  # [R, K-1 + W, conv_dim]
    buffers: RowBuffers
    C: Tensor  # [b, T, G*N]


def filled(
    case: Case,
    layout: TreeLayout,
    tree: Tree,
    inputs: tuple[Tensor, Tensor],
    weights: ConvWeights,
    conv_in: Tensor,
    buffers: RowBuffers,
) -> Filled:
    """Request by request. inputs: xbc [b*T, conv_dim] and dt_raw [b*T, H]."""
    (xbc, dt_raw), T, history = inputs, case.nodes, case.conv_kernel - 1
    row_size, C = buffers.xB.shape[2], []
    wanted = RowBuffers(*(part.double() for part in buffers))
    wanted_in = conv_in.clone()
    for i, (slot, length) in enumerate(zip(layout.slots, case.journal_lens)):
        nodes, rows = slice(i * T, i * T + T), layout.rows[i]
        before = conv_in[slot, layout.tail[i]]
        out = naive.tree_conv(xbc[nodes], tree.parents[i].tolist(), *weights[:2], before)
        wanted.xB[slot, rows] = out[:, :row_size]
        C.append(out[:, row_size:])
        wanted_in[slot, rows + history] = xbc[nodes]
        wanted.dt[slot, rows] = naive.step_sizes(dt_raw[nodes], weights.dt_bias, case.step_limit)
        L = tree.ancestors[i].double() @ (wanted.dt[slot, rows] * weights.A)
        if length and not (case.fold and case.fold[i]):
            L += buffers.log_decay[slot, layout.journal[i, length - 1]]
        wanted.log_decay[slot, rows] = L
    return Filled(wanted_in, wanted, torch.stack(C))


def check(case: Case) -> None:
    torch.manual_seed(0)
    draw = Draw(0)
    H, P, G, N = case.sizes
    b, T, M, K = len(case.journal_lens), case.nodes, max(case.journal_lens), case.conv_kernel
    R, W, row_size = b + 1, M + T, H * P + G * N
    conv_dim = row_size + G * N
    weights = ConvWeights(
        torch.randn(K, conv_dim).to(case.dtype),
        torch.randn(conv_dim).to(case.dtype) if case.bias else None,
        torch.rand(H) * 12 - 11,
        draw.decay_rates(H),
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
    tree = random_tree(b, T, T, draw.generator)

    tail = torch.stack(tail)
    layout = tree_layout(tree, slots, slots, rows, journal, case.journal_lens, tail, case.fold)
    on_host = TreeLayout(*(None if part is None else part.cpu() for part in layout))
    buffers = RowBuffers(xB, dt, log_decay)
    wanted = filled(case, on_host, tree, (xbc, dt_raw), weights, conv_in, buffers)

    weights, buffers = to_device(weights), to_device(buffers)
    conv_in, projected = conv_in.to(DEVICE), projected.to(DEVICE)
    xbc, dt_raw = projected[:, 64 : 64 + conv_dim], projected[:, 64 + conv_dim :]
    C = tree_conv(xbc, dt_raw, weights, conv_in, buffers, layout, case.sizes, case.config)

    close = {"rtol": 2e-6, "atol": 2e-6}
    rounded = close if case.dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-5}
    assert torch.equal(conv_in.cpu(), wanted.conv_in)
    assert C.dtype == buffers.xB.dtype == case.dtype
    xB, dt, log_decay = (part.cpu().double() for part in buffers)
    exact = wanted.buffers
    torch.testing.assert_close(xB, exact.xB, **rounded)
    torch.testing.assert_close(C.cpu().double(), wanted.C, **rounded)
    torch.testing.assert_close(dt, exact.dt, rtol=3e-6, atol=1e-9)
    torch.testing.assert_close(log_decay, exact.log_decay, **close)


@runs_kernels
@pytest.mark.parametrize("case", CASES)
def test_rows_equal_naive(case: Case) -> None:
    check(case)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("case", GPU_CASES)
def test_rows_equal_naive_at_real_sizes(case: Case) -> None:
    check(case)
