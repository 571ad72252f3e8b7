"""Products of --exact: a row has the same bits among any others, also by a library."""

from __future__ import annotations

import pytest
import torch
from forms import GPU
from torch import Tensor

pytest.importorskip("triton")

from mamba_eagle.backend.triton.exact_products import ExactOps, ExactProduct
from mamba_eagle.kernels.experts.torch import Routes
from mamba_eagle.kernels.float8.torch import Rounding
from mamba_eagle.quantization.matrix import Float8Matrix, quantized

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="no CUDA device")]

COUNTS = (1, 2, 3, 8, 16, 17, 33, 64, 65, 100, 256, 257, 700, 1100, 2050, 4100)
MOST = 4100
SIZES = {"narrow": (128, 2688), "30B out": (2688, 4096), "9B down": (4480, 15680)}


@pytest.fixture(scope="module")
def ops() -> ExactOps:
    return ExactOps()


def normal(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=draw, device="cuda").bfloat16()


def assert_rows_alone(compute, x: Tensor) -> None:
    """compute: of [n, in] some rows of x."""
    wanted = compute(x)
    assert wanted.isfinite().all()
    for n in COUNTS:
        first = (len(x) - n) // 3
        some = slice(first, first + n)
        assert torch.equal(compute(x[some]), wanted[some]), n


@pytest.mark.parametrize("rows, columns", SIZES.values(), ids=SIZES)
def test_sixteen_bits(ops: ExactOps, rows: int, columns: int) -> None:
    product = ops.pack_linear(normal(rows, columns, seed=1) / columns**0.5)
    assert isinstance(product, ExactProduct) and product.has_library
    assert_rows_alone(lambda x: product(x, None), normal(MOST, columns))
    bias = normal(rows, seed=2)
    assert_rows_alone(lambda x: product(x, bias), normal(MOST, columns))


@pytest.mark.parametrize("block", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize("rows, columns", SIZES.values(), ids=SIZES)
def test_float8(ops: ExactOps, rows: int, columns: int, block: bool) -> None:
    matrix = quantized(normal(rows, columns, seed=1) / columns**0.5)
    if block:
        scale = matrix.scale[::128, :1].repeat(1, -(-columns // 128)).contiguous()
        matrix = Float8Matrix(matrix.values, scale, (128, 128), Rounding(None, 128))
    product = ops.pack_matrix(matrix, torch.bfloat16)
    assert_rows_alone(lambda x: product(x, None), normal(MOST, columns))


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("act", ["relu_squared", "silu_gate"])
def test_experts(ops: ExactOps, act: str, bits: int) -> None:
    E, k, size, inner = 32, 4, 512, 384
    up = normal(E, inner * (1 + (act == "silu_gate")), size, seed=1) / size**0.5
    down = normal(E, size, inner, seed=2) / inner**0.5
    given = [quantized(up), quantized(down)] if bits == 8 else [up, down]
    layer = ops.fuse_experts(given[0], given[1], act, torch.bfloat16)
    assert layer is not None
    x, draw = normal(MOST, size), torch.Generator("cuda").manual_seed(3)
    scores = torch.rand(MOST, E, generator=draw, device="cuda")
    weights, experts = scores.topk(k)
    both = torch.cat([x.float(), weights, experts.float()], dim=1)

    def compute(rows: Tensor) -> Tensor:
        own, share, ids = rows.split([size, k, k], dim=1)
        return layer(own.bfloat16(), Routes(ids.int().contiguous(), share.contiguous()))

    assert_rows_alone(compute, both)
