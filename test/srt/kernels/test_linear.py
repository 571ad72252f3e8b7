"""Products with weights of 16 bits, against naive.py; rows have the same bits among any others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from forms import DEVICE, GPU, all_in_the_interpreter, runs_kernels
from torch import Tensor

from mamba_eagle.kernels.linear import naive

test_in_the_interpreter = all_in_the_interpreter("test_step_sums.py")

SHAPES = {"narrow": (5, 48, 80), "ragged": (19, 100, 336), "wide": (64, 130, 256)}


def normal(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw).bfloat16().to(DEVICE)


@runs_kernels
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("n, rows, columns", SHAPES.values(), ids=SHAPES)
def test_products_are_right(n: int, rows: int, columns: int, has_bias: bool) -> None:
    """Inputs may be a view of wider rows, and results may have a place."""
    from mamba_eagle.kernels.linear.triton import linear

    check_product(linear, n, rows, columns, has_bias)


@runs_kernels
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("n, rows, columns", [(1, 1, 16), (4, 96, 336), (7, 5, 80)], ids=str)
def test_products_of_few_rows_are_right(n: int, rows: int, columns: int, has_bias: bool) -> None:
    from mamba_eagle.kernels.linear.triton_rows import linear

    check_product(linear, n, rows, columns, has_bias)


def check_product(
    linear: Callable[..., Tensor], n: int, rows: int, columns: int, has_bias: bool
) -> None:
    """And that a row's bits are the same among any others."""
    x, weight = normal(n, columns + 16)[:, :columns], normal(rows, columns, seed=1)
    bias = normal(rows, seed=2) if has_bias else None
    wanted = naive.linear(x, weight, bias)
    found = linear(x, weight, bias)
    assert (found.double() - wanted).norm() < 5e-3 * wanted.norm()  # the interpreter truncates
    place = torch.full_like(found, float("nan"))
    assert linear(x, weight, bias, place) is place and torch.equal(place, found)
    assert torch.equal(linear(x[-1:], weight, bias), found[-1:])


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("rows, columns", [(4480, 15680), (22656, 4480), (100, 336)], ids=str)
def test_a_row_has_the_same_bits_among_any_others(rows: int, columns: int) -> None:
    from mamba_eagle.kernels.linear.triton import Config, linear

    x, weight = normal(64, columns), normal(rows, columns, seed=1)
    wanted = linear(x, weight, None)
    for n in (1, 2, 3, 8, 15, 16, 17, 32, 33, 48):
        assert torch.equal(linear(x[-n:], weight, None), wanted[-n:]), n
    for config in (Config(16, 16, 256, 4, 3), Config(128, 64, 64, 8, 3)):
        assert torch.equal(linear(x, weight, None, config=config), wanted), config
