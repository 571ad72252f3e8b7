"""Products with weights of four bits, in each form against naive.py. (In the interpreter:
test_float8.py.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import ptx_rig
import pytest
import torch
from forms import TORCH, TRITON, device_of
from torch import Tensor

from mamba_eagle.kernels.four_bit import naive
from mamba_eagle.kernels.four_bit import torch as four_bit

torch_or_triton = pytest.mark.parametrize("form", [TORCH, TRITON])


class Case(NamedTuple):
    tokens: int
    rows: int
    columns: int
    group: int = 16
    floats: bool = True  # NVFP4; else integers with zero points
    factors: int = 1  # one, or one per row
    slices: int = 4
    splits: int = 1
    bias: bool = False


CASES = {
    "nvfp4": Case(3, 40, 160),
    "nvfp4-split": Case(1, 64, 288, slices=1, splits=2, bias=True, factors=64),
    "nvfp4-many-tokens": Case(21, 20, 64, slices=1),
    "int4": Case(3, 40, 160, 32, floats=False),
    "int4-of-wide-groups": Case(2, 24, 512, 256, floats=False, slices=1, splits=2, bias=True),
}


class Weight(NamedTuple):
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    factor: Tensor


def draw(case: Case) -> Weight:
    generator = torch.Generator().manual_seed(case.columns)
    shape, groups = (case.rows, case.columns // 2), case.columns // case.group
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    scale = torch.rand(case.rows, groups, generator=generator) + 0.5
    factor = torch.rand(case.factors, 1, generator=generator) + 0.5
    if case.floats:
        return Weight(codes, scale.to(torch.float8_e4m3fn), None, factor)
    zero = torch.randint(0, 17, scale.shape, generator=generator, dtype=torch.uint8)
    return Weight(codes, scale.half(), zero, factor)


def on(device: torch.device, weight: Weight) -> Weight:
    return Weight(*(None if part is None else part.to(device) for part in weight))


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """x, a view of wider rows, as lm_head's inputs may be; the bias."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(case.tokens, case.columns + 8, generator=generator).to(device, dtype)
    bias = torch.randn(case.rows, generator=generator).to(device, dtype) if case.bias else None
    return wide[:, :-8], bias


def check(found: Tensor, x: Tensor, weight: Weight, bias: Tensor | None) -> None:
    assert found.dtype == x.dtype
    exact = naive.product(x.cpu(), *weight) + (0.0 if bias is None else bias.cpu().double())
    error = (found.cpu().double() - exact).norm() / exact.norm()
    assert error < (1e-3 if x.dtype == torch.float16 else 6e-3)


SHAPES = ((22656, 4480), (4480, 15616), (15680, 4480), (4480, 10240))  # of a 9B


def at_real_sizes(tokens: int, floats: bool, device: torch.device) -> Iterator[tuple[Any, ...]]:
    """x [tokens, in] bfloat16, a weight as kernels read it, their product in float64."""
    from mamba_eagle.kernels.four_bit import triton

    for rows, columns in SHAPES:
        weight = on(device, draw(Case(tokens, rows, columns, 16 if floats else 128, floats)))
        x = torch.randn(tokens, columns, device=device).bfloat16()
        exact = x.double() @ four_bit.dequantize(*weight).double().t()
        yield x, triton.weight_of(*weight, x.dtype), exact


def test_the_floats_of_all_codes() -> None:
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert [naive.float_of(code) for code in range(16)] == values + [-x for x in values]


def run_ptx(code: str, dtype: torch.dtype, *given: int) -> list[Tensor]:
    """Two 16-bit floats of each of $0 to $3, as float64. given: $4 and on."""
    found = ptx_rig.run(code, 4, [torch.tensor(register) for register in given])
    return [torch.stack(ptx_rig.floats(register, dtype)) for register in found]


def twice(number: float, dtype: torch.dtype) -> int:
    return int(ptx_rig.pair(2 * [torch.tensor(number).to(dtype)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_machine_instructions_decode_every_code_and_scale(dtype: torch.dtype) -> None:
    """What the interpreter does not run."""
    triton = pytest.importorskip("mamba_eagle.kernels.four_bit.triton")
    if dtype == torch.bfloat16:
        e2m1, integers = triton.FLOATS_BF16.value, triton.INTEGERS_BF16.value
        power, rest, one = 2.0**118, 256.0, 128.0
    else:
        e2m1, integers = triton.FLOATS_F16.value, triton.INTEGERS_F16.value
        power, rest, one = 2.0**7, 2.0**7, 1024.0
    generator = torch.Generator().manual_seed(3)
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for scale in scales.tolist():
        codes = torch.randint(0, 16, (2, 4), generator=generator)  # of two units
        packed = sum(int(codes[h, i]) << 16 * h + 4 * i for h in range(2) for i in range(4))
        units = torch.tensor([packed & 0xFFFF, packed >> 16]).to(torch.int16)
        placed = triton._placed(units, triton.PLACES[dtype])
        low, high = (int(unit) & 0xFFFF for unit in placed)
        found = run_ptx(e2m1, dtype, low | high << 16, twice(scale * power, dtype))
        wanted = [[naive.float_of(c) * scale for c in column] for column in codes.t().tolist()]
        assert [(x * rest).tolist() for x in found] == wanted
        zero, step = int(codes.sum()) % 17, 0.01 + scale / 1000
        below = twice(-one - zero, dtype)
        found = run_ptx(integers, dtype, packed, twice(step, dtype), below)
        numbers = (codes.t() - zero) * torch.tensor(step).to(dtype).double()
        assert torch.equal(torch.stack(found), numbers.to(dtype).double())


@torch_or_triton
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_dequantized(form: str, case: Case) -> None:
    weight = draw(case)
    if form == "torch":
        found = four_bit.dequantize(*weight)
    else:
        from mamba_eagle.kernels.four_bit import triton

        whole = triton.weight_of(*on(device_of(form), weight), torch.bfloat16)
        found = triton.dequantize(whole).cpu()
        some = torch.tensor([case.rows - 1, 0], device=device_of(form))
        assert torch.equal(triton.dequantize(whole.rows(some)).cpu(), found[some.cpu()])
    exact = naive.weight(*weight)
    within = 1e-6 if form == TORCH else 1.2e-2
    torch.testing.assert_close(found.double(), exact, rtol=within, atol=0)


@torch_or_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_products(form: str, case: Case, dtype: torch.dtype) -> None:
    weight, device = draw(case), device_of(form)
    x, bias = inputs(case, dtype, device)
    if form == "torch":
        found = x @ four_bit.dequantize(*weight).to(x.dtype).t()
        found = found if bias is None else found + bias
    else:
        from mamba_eagle.kernels.four_bit import triton

        config = triton.Config(32, 16, 32, case.slices, case.splits, 4, 2)
        ready = triton.weight_of(*on(device, weight), dtype)
        found = triton.product(x, ready, bias, config)
    check(found, x, weight, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [TRITON])
@pytest.mark.parametrize("tokens", [1, 8, 13, 32, 64, 200])
@pytest.mark.parametrize("floats", [True, False], ids=["nvfp4", "int4"])
def test_products_at_real_sizes(form: str, tokens: int, floats: bool) -> None:
    from mamba_eagle.kernels.four_bit import gluon, triton

    few = [gluon.product] if tokens <= gluon.MAX_TOKENS else []
    for x, weight, exact in at_real_sizes(tokens, floats, device_of(form)):
        for product in (triton.product, *few):
            found = product(x, weight, None)
            assert (found.double() - exact).norm() / exact.norm() < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("form", [TRITON])
@pytest.mark.parametrize("shape", [(1, 4, 16), (2, 2, 16), (2, 4, 32), (1, 8, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_products_in_registers(
    form: str, case: Case, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    from mamba_eagle.kernels.four_bit import gluon, triton

    device = device_of(form)
    weight, few = draw(case), min(case.tokens, gluon.MAX_TOKENS)
    x, bias = inputs(case._replace(tokens=few), dtype, device)
    ready = triton.weight_of(*on(device, weight), dtype)
    check(gluon.product(x, ready, bias, gluon.Config(*shape)), x, weight, bias)
