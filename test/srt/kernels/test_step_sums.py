"""How Hopper's tensor cores add: a bfloat16 product, accumulated in float32 in ordered steps of 16,
has the same bits whatever tile or instruction computes it. The numbers have wide exponents."""

from __future__ import annotations

import pytest
import torch
from forms import GPU, runs_kernels
from torch import Tensor

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

DEVICE = "cuda" if GPU else "cpu"
STEP = 16
TILES = [(16, 16, 16), (16, 64, 64), (32, 32, 32), (64, 16, 128), (64, 64, 64), (128, 128, 64)]


@triton.jit
def _product_kernel(a, b, y, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, k, K):
        i = start + tl.arange(0, K)
        mask = (row[:, None] < m) & (i[None, :] < k)
        left = tl.load(a + row[:, None] * k + i[None, :], mask=mask, other=0.0)
        mask = (column[None, :] < n) & (i[:, None] < k)
        right = tl.load(b + column[None, :] * k + i[:, None], mask=mask, other=0.0)
        total = tl.dot(left, right, total)
    at = y + row[:, None] * n + column[None, :]
    tl.store(at, total, mask=(row[:, None] < m) & (column[None, :] < n))


def product(a: Tensor, b: Tensor, tile: tuple[int, int, int] = (16, 16, 16)) -> Tensor:
    """a [m, k] times b [n, k] transposed, float32; K is never split."""
    (m, k), n = a.shape, len(b)
    y = torch.empty(m, n, device=a.device)
    grid = (triton.cdiv(m, tile[0]), triton.cdiv(n, tile[1]))
    _product_kernel[grid](a.contiguous(), b.contiguous(), y, m, n, k, *tile)
    return y


def wide(rows: int, columns: int = 512) -> Tensor:
    """Of exponents -12 to 12, both signs."""
    scale = torch.randint(-12, 13, (rows, columns)).float().exp2()
    return (torch.randn(rows, columns) * scale).bfloat16().to(DEVICE)


@runs_kernels
def test_products_are_right() -> None:
    a, b = wide(20, 48), wide(24, 48)
    exact = a.double() @ b.double().t()
    if not GPU:  # the interpreter takes bfloat16's bits for integers
        a, b = a.float(), b.float()
    assert (product(a, b).double() - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_and_instructions_leave_the_bits(tile: tuple[int, int, int]) -> None:
    a, b = wide(256), wide(256)
    assert torch.equal(product(a, b, tile), product(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_swapped_operands_leave_the_bits(tile: tuple[int, int, int]) -> None:
    a, b = wide(256), wide(256)
    assert torch.equal(product(b, a, tile).t(), product(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_other_rows_leave_the_bits(tile: tuple[int, int, int]) -> None:
    a, b = wide(256), wide(256)
    assert torch.equal(product(a[37:90], b, tile), product(a, b)[37:90])


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_steps_of_zeros_leave_the_bits(tile: tuple[int, int, int]) -> None:
    a, b = wide(64), wide(64)
    spread = [torch.zeros(64, 1024, device=DEVICE, dtype=a.dtype) for _ in range(2)]
    for given, made in zip((a, b), spread, strict=True):
        made.view(64, -1, 2, STEP)[:, :, 1] = given.view(64, -1, STEP)
    assert torch.equal(product(*spread, tile), product(a, b))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_order_within_a_step_leaves_the_bits(tile: tuple[int, int, int]) -> None:
    a, b, order = wide(64), wide(64), torch.randperm(STEP, device=DEVICE)
    x, w = (each.view(64, -1, STEP)[:, :, order].reshape(64, -1) for each in (a, b))
    assert torch.equal(product(x, w, tile), product(a, b))


@pytest.mark.gpu
def test_a_split_over_k_has_other_bits() -> None:
    """So the comparisons above can see."""
    a, b = wide(64), wide(64)
    halves = product(a[:, :256], b[:, :256]) + product(a[:, 256:], b[:, 256:])
    assert not torch.equal(halves, product(a, b))
