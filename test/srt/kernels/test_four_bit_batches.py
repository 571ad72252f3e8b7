"""Products of batches of trees with weights of four bits: on a CPU in the rig, and on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import hopper_rig  # noqa: F401 - for the interpreted module
import pytest
import torch
from gluon_rig import Block, interpreted
from test_four_bit import SHAPES, Case, at_real_sizes, check, draw, inputs, on
from torch import Tensor

pytest.importorskip("triton")

from mamba_eagle.backend.triton import products
from mamba_eagle.kernels.four_bit import gluon, gluon_batches, triton
from mamba_eagle.kernels.four_bit.gluon_shares import choose_cut
from mamba_eagle.quantization.four_bit import FourBitMatrix

# tokens within a tile and beyond; rows and columns that end inside of one; groups of 16 and 128;
# tokens of a tile, and whether three programs share tiles that are left
CASES = {
    "one-tile": (Case(21, 40, 160), 32, False),
    "whole-tiles": (Case(45, 130, 128, factors=130, bias=True), 32, False),
    "shares": (Case(20, 130, 608, factors=130, bias=True), 32, True),
    "shares-after-a-wave": (Case(45, 130, 192), 32, True),
    "integers": (Case(12, 70, 512, 128, floats=False, factors=70), 16, True),
}


def by_machine(dtype: torch.dtype) -> SimpleNamespace:
    """Of triton.py what a kernel calls, as the GPU computes it."""
    power = 2.0**118 if dtype == torch.bfloat16 else 2.0**7
    names = ("FLOATS_BF16", "FLOATS_F16", "INTEGERS_BF16", "INTEGERS_F16")
    return SimpleNamespace(
        **{name: getattr(triton, name).value for name in names},
        whole_scale=lambda s, own: Block((s.value.float() * power).to(dtype)),
        rest=lambda own: 256.0 if dtype == torch.bfloat16 else 128.0,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test below runs the kernel")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case, tokens, shared", CASES.values(), ids=CASES)
def test_products(
    case: Case, tokens: int, shared: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, shares, numbers = interpreted(
        "four_bit.gluon_batches", "four_bit.gluon_shares", "four_bit.gluon"
    )
    for module in (kernels, numbers):
        monkeypatch.setattr(module, "by_compiler", by_machine(dtype))
    for module in (kernels, shares):
        monkeypatch.setattr(module, "PROCESSORS", 3)
    weight = draw(case)
    x, bias = inputs(case, dtype, torch.device("cpu"))
    cut = shares.cut_into(tokens, shared, case.tokens, case.rows, case.columns)
    found = kernels.product(x, triton.weight_of(*weight, dtype), bias, cut)
    check(found, x, weight, bias)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_few_sizes_need_every_kernel(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weights of a 9B, for all numbers of tokens: each is built before a server is ready."""

    def by_triton(x: Tensor, *_: object) -> object:
        config = triton.choose_config(len(x), rows, columns)
        return config._replace(splits=min(config.splits, 2))

    def in_batches(x: Tensor, *_: object) -> object:
        cut = choose_cut(len(x), rows, columns)
        return cut.tokens, cut.places > 0

    monkeypatch.setattr(triton, "product", by_triton)
    monkeypatch.setattr(triton, "dequantize", lambda weight: weight)
    monkeypatch.setattr(gluon, "product", lambda x, *_: len(x) <= 8)
    monkeypatch.setattr(gluon_batches, "product", in_batches)
    monkeypatch.setattr(products.F, "linear", lambda x, weight, bias: "by cuBLAS")
    for module in (gluon, gluon_batches):
        monkeypatch.setattr(module, "capability", lambda device: capability)
    for rows, columns in SHAPES:
        weight = FourBitMatrix(*on(torch.device("meta"), draw(Case(0, rows, columns))))
        product = products.FourBitProduct(weight, torch.bfloat16)
        x = torch.empty(520, columns, device="meta")
        needed = {product(x[:n], None) for n in range(1, 521)}
        found = [product(x[:n], None) for n in product.sizes]
        assert set(found) == needed
        assert capability == (8, 0) or len(found) == len(needed)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65, 128, 256, 300, 512])
@pytest.mark.parametrize("floats", [True, False], ids=["nvfp4", "int4"])
def test_a_gpu_gives_the_product_at_real_sizes(tokens: int, floats: bool) -> None:
    for x, weight, exact in at_real_sizes(tokens, floats, torch.device("cuda")):
        if not gluon_batches.supports(weight):
            pytest.skip("needs a Hopper GPU")
        found = gluon_batches.product(x, weight, None)
        assert (found.double() - exact).norm() / exact.norm() < 5e-3
        assert torch.equal(found, gluon_batches.product(x, weight, None))
