"""What adapters add to a product, against naive.py; a row has the same bits among any others."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from forms import DEVICE, GPU, in_the_interpreter, runs_kernels
from torch import Tensor

from mamba_eagle.kernels.adapters import naive

test_in_the_interpreter = in_the_interpreter


class Case(NamedTuple):
    inputs: int
    outputs: list[int]  # of matrices that are one product
    ranks: list[list[int]]  # by slot and matrix
    slots: list[int]  # by row
    dtype: torch.dtype = torch.bfloat16


CASES = {
    "one row": Case(48, [80], [[3], [16]], [1]),
    "mixed rows": Case(200, [136], [[5], [0], [16], [64]], [3, -1, 0, 3, 2, 1, -1, 0, 3]),
    "one product of three": Case(96, [130, 16, 4], [[16, 0, 1], [2, 33, 17]], [1, 0, -1, 0]),
    "no row has one": Case(48, [32], [[4]], [-1, -1]),
    "prompts": Case(80, [32], [[4], [9], [2]], [2] * 50 + [-1] * 7 + [0] * 20 + [1] * 9),
    "float32": Case(70, [24], [[3], [20]], [0, 1, 1, -1], torch.float32),
}


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw).to(dtype).to(DEVICE)


def parts_of(case: Case) -> list[list[naive.Part]]:
    """The adapters, by slot."""
    found: list[list[naive.Part]] = []
    for slot, ranks in enumerate(case.ranks):
        first, own = 0, []
        for part, (rank, outputs) in enumerate(zip(ranks, case.outputs)):
            seed = 100 * slot + 10 * part
            down = normal(rank, case.inputs, dtype=case.dtype, seed=seed) / case.inputs**0.5
            up = normal(outputs, rank, dtype=case.dtype, seed=seed + 1)
            own.append(naive.Part(down, up, first))
            first += outputs
        found.append(own)
    return found


def additions_of(case: Case) -> Any:
    from mamba_eagle.backend.triton.adapters import SegmentedAdditions
    from mamba_eagle.layers.adapters import AdapterSize

    rank, first, sizes = max(map(max, case.ranks)), 0, []
    for outputs in case.outputs:
        sizes.append(AdapterSize(len(case.ranks), rank, case.inputs, outputs, first))
        first += outputs
    made = SegmentedAdditions(sizes, case.dtype, torch.device(DEVICE))
    made.adapters.down.fill_(float("nan"))  # what no adapter has filled is not read
    made.adapters.up.fill_(float("nan"))
    for slot, own in enumerate(parts_of(case)):
        for matrix, part in zip(made.parts, own, strict=True):
            matrix.put(slot, part.down, part.up)
    return made


def added(case: Case, y: Tensor, x: Tensor, rows: slice = slice(None), **options: Any) -> Tensor:
    """What is in ``rows`` of y afterwards."""
    from mamba_eagle.kernels.adapters.triton import add_

    found, slots = y[rows].clone(), torch.tensor(case.slots, device=DEVICE)[rows]
    add_(found, x[rows], slots, additions_of(case).adapters, **options)
    return found


@runs_kernels
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_get_what_their_adapters_make_of_them(case: Case) -> None:
    n = len(case.slots)
    y = normal(n, sum(case.outputs), dtype=case.dtype, seed=1)
    x = normal(n, case.inputs + 16, dtype=case.dtype, seed=2)[:, : case.inputs]
    wanted = naive.added(y, x, case.slots, parts_of(case))
    found = added(case, y, x)
    bound = 1e-5 if case.dtype == torch.float32 else 8e-3
    torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound)
    none = torch.tensor(case.slots, device=DEVICE) < 0
    assert torch.equal(found[none], y[none])


def configs() -> list[Any]:
    """Slots one by one, at once, and in the form for many rows."""
    from mamba_eagle.kernels.adapters.triton import Config

    return [
        Config(16, 2, 2, chunk=32, step=16),
        Config(32, 1, 0, chunk=32, step=16, programs=1),
        Config(16, 4, 4, chunk=32, step=32),
    ]


@runs_kernels
def test_how_work_is_divided_changes_nothing() -> None:
    """Nor do a row's neighbours. The interpreter adds up in an order of its own, but nearly so."""
    case = CASES["mixed rows"]._replace(inputs=90, outputs=[80])
    n = len(case.slots)
    y = normal(n, sum(case.outputs), dtype=case.dtype, seed=1)
    x = normal(n, case.inputs, dtype=case.dtype, seed=2)
    bound = 0.0 if GPU else 1e-2
    first, *others = (added(case, y, x, config=config) for config in configs())
    for other in others:
        torch.testing.assert_close(other, first, rtol=bound, atol=bound)
    for row in (0, 1, n - 1):  # the second has none
        alone = added(case, y, x, slice(row, row + 1), config=configs()[0])
        torch.testing.assert_close(alone, first[row : row + 1], rtol=bound, atol=bound)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("n", [8, 64, 128, 700])
def test_large_products(n: int) -> None:
    """Behind a product that still runs, in a graph that was captured with other slots."""
    from mamba_eagle.backend.triton.products import SixteenBitProduct

    case = Case(4480, [5120, 1024, 1040], [[16, 8, 64]] * 8, [i % 9 - 1 for i in range(n)])
    x, weight = normal(n, case.inputs, dtype=case.dtype), normal(7184, 4480, dtype=case.dtype)
    additions, product = additions_of(case), SixteenBitProduct(weight / 4480**0.5)
    slots = torch.full((n,), -1, device=DEVICE)

    def run() -> Tensor:
        y = product(x, None)
        additions(y, x, slots)
        return y

    plain = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [run() for _ in range(3)]
    slots.copy_(torch.tensor(case.slots))
    graph.replay()
    wanted = naive.added(plain, x, case.slots, parts_of(case))
    for each in found:
        torch.testing.assert_close(each.double(), wanted, rtol=8e-3, atol=8e-3)


@runs_kernels
def test_inputs_may_be_float8() -> None:
    from mamba_eagle.kernels.float8.torch import Rounding, rounded, widened

    case = CASES["mixed rows"]
    n = len(case.slots)
    y = normal(n, sum(case.outputs), dtype=case.dtype, seed=1)
    x = rounded(normal(n, case.inputs, dtype=case.dtype, seed=2), Rounding())
    wanted = naive.added(y, widened(x), case.slots, parts_of(case))
    found = added(case, y, x.values, scale=x.scale)
    torch.testing.assert_close(found.double(), wanted, rtol=8e-3, atol=8e-3)
