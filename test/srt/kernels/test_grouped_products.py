"""Products on a CPU: with int8 and int4 groups, and with panels of 16 and 32 bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mamba_eagle.cpu import span_kernels, threads
from mamba_eagle.cpu.products import grouped as cpu
from mamba_eagle.cpu.products import naive
from mamba_eagle.cpu.products import panels as linear
from mamba_eagle.cpu.products.packed import GroupedProduct, PanelProduct, multiplies
from mamba_eagle.cpu.programs.embeddings import GroupedRows, stored_rows
from mamba_eagle.cpu.span_kernels import SpanKernel
from mamba_eagle.cpu.vectors.code import has, vector_code
from mamba_eagle.layers.embedding import Embedding
from mamba_eagle.layers.products import PackedProduct
from mamba_eagle.quantization.grouped import GroupedMatrix, int4_groups, int8_groups


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def symmetric(weight: Tensor) -> GroupedMatrix:
    """Four bits without a minimum, like Q4_0."""
    made = int4_groups(weight)
    return GroupedMatrix(made.codes, made.scale)


FORMS: dict[str, Callable[[Tensor], GroupedMatrix]] = {
    "int8": int8_groups,
    "int8, float32 scales": lambda weight: int8_groups(weight).times(0.7),
    "int8, groups of 96": lambda weight: int8_groups(weight, 96),
    "int4": symmetric,
    "int4, float32 scales": lambda weight: symmetric(weight).times(0.7),
    "int4 with minimum": int4_groups,
    "int4 with minimum, float32 scales": lambda weight: int4_groups(weight).times(0.7),
}


def exact_product(x: Tensor, matrix: GroupedMatrix) -> Tensor:
    numbers, repeat = matrix.codes, matrix.group // naive.GROUP
    if matrix.bits == 4:
        numbers = torch.stack([matrix.codes & 15, matrix.codes >> 4], dim=-1).flatten(-2)
        numbers = numbers.int() - (8 if matrix.minimum is None else 0)
    scale, minimum = (
        part if part is None else part.repeat_interleave(repeat, 1)
        for part in (matrix.scale, matrix.minimum)
    )
    return naive.product(x, numbers, scale, minimum)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("outputs, inputs", [(33, 96), (48, 192)])
def test_a_product_is_that_of_the_codes_and_rounded_inputs(
    form: str, outputs: int, inputs: int
) -> None:
    matrix = FORMS[form](normal(outputs, inputs, seed=1))
    product = GroupedProduct(matrix)
    x, bias = normal(11, inputs, seed=2), normal(outputs, seed=3)
    x[4, :32] = 0.0
    exact = exact_product(x, matrix) + bias
    torch.testing.assert_close(product(x, bias).double(), exact, rtol=1e-5, atol=1e-5)
    near = x @ matrix.dequantize().t() + bias
    assert float((product(x, bias) - near).norm() / near.norm()) < 0.01


@pytest.mark.parametrize("form", FORMS)
def test_a_product_holds_its_weight(form: str) -> None:
    matrix = FORMS[form](normal(33, 96, seed=1))
    product = GroupedProduct(matrix)
    ids = torch.tensor([32, 0, 17])
    assert torch.equal(product.rows(ids), matrix.dequantize()[ids])
    assert torch.equal(product.matrix.narrow(-2, 5, 9).dequantize(), matrix.dequantize()[5:14])
    repeated = matrix.group // naive.GROUP  # scales are stored for groups of 32
    assert product.nbytes <= matrix.nbytes * 48 / 33 + repeated * 48 * 3 * 4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_programs_read_the_same_rows(form: str, factor: float) -> None:
    """Bit by bit; into the beginning of longer rows."""
    weight = normal(33, 96, seed=1)
    weight[5, :32] *= 1e-7  # scales below the normal ones of float16
    product = GroupedProduct(FORMS[form](weight))
    ids, out = torch.tensor([32, 0, 5, 17]), torch.zeros(4, 100)
    call = GroupedRows(product.weight).call(96, 100, factor)
    call.block.point(tokens=ids, out=out)
    call.kernel(4, 0, call.block)
    rows = product.rows(ids)
    assert torch.equal(out[:, :96], rows * factor if factor != 1.0 else rows)
    assert not out[:, 96:].any()


def products() -> dict[str, PackedProduct]:
    weight = normal(130, 1100, seed=1)
    return {
        "int8": GroupedProduct(int8_groups(weight[:, :1024])),
        "int4": GroupedProduct(int4_groups(weight[:, :1024])),
        "bfloat16": PanelProduct(weight.bfloat16()),
        "float16": PanelProduct(weight.half()),
        "float32": PanelProduct(weight),
    }


@pytest.mark.parametrize("name", ["int8", "int4", "bfloat16", "float16", "float32"])
def test_a_row_does_not_depend_on_the_batch_it_is_in(name: str) -> None:
    """So texts with speculation, alone and in a batch are the same bit by bit."""
    product = products()[name]
    x = normal(23, product.inputs, seed=2)
    whole = product(x, None)
    for rows in range(1, 23):
        assert torch.equal(product(x[:rows], None), whole[:rows])
    assert torch.equal(product(x[9:10], None), whole[9:10])


@pytest.mark.parametrize("name", ["int8", "bfloat16"])
def test_a_row_does_not_depend_on_the_number_of_threads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = products()[name]
    x = normal(9, product.inputs, seed=2)
    alone = product(x, None)
    monkeypatch.setattr(threads, "_threads", 3)
    monkeypatch.setattr(span_kernels, "MIN_PARALLEL", 0)
    assert torch.equal(product(x, None), alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_panels_are_multiplied_as_they_are(dtype: torch.dtype) -> None:
    weight = normal(70, 1030, seed=1).to(dtype)
    x = normal(13, 1030, seed=2)
    found = PanelProduct(weight)(x, None)
    exact = x.double() @ weight.double().t()
    assert float((found - exact).norm() / exact.norm()) < 1e-6
    ids = torch.tensor([69, 3])
    assert torch.equal(linear.rows_of(linear.panels(weight), ids), weight[ids])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("outputs, inputs", [(70, 48), (32, 33)])
def test_blocks_are_transposed(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """In vectors where inputs are a multiple of 16."""
    weight = normal(outputs, inputs).to(dtype)
    made = linear.panels(weight)
    rows = linear.rows_of(made, torch.arange(made.shape[0] * linear.PANEL))
    assert torch.equal(rows[:outputs], weight) and not rows[outputs:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_programs_read_the_rows_of_panels(dtype: torch.dtype) -> None:
    weight, ids = normal(130, 64).to(dtype), torch.tensor([0, 129, 65, 64, 40, 15, 8, 31])
    embedding = Embedding(130, 64)
    embedding.holder = PanelProduct(weight)
    rows = stored_rows(embedding)
    assert rows is not None
    out = torch.empty(len(ids), 64)
    call = rows.call(64, 64, 1.0)
    call.block.point(tokens=ids, out=out)
    call.kernel(len(ids), 0, call.block)
    assert torch.equal(out, weight[ids].float())


def test_what_is_not_finite_stays_so() -> None:
    product = GroupedProduct(int8_groups(normal(16, 64)))
    x = normal(4, 64, seed=1)
    x[1, 3], x[2, 40] = float("nan"), float("inf")
    finite = product(x, None).isfinite()
    assert finite[[0, 3]].all() and not finite[[1, 2]].any()


def test_matrices_without_a_product_are_named() -> None:
    assert not multiplies(int8_groups(normal(4, 48), 16))
    eight = int8_groups(normal(4, 64))
    assert not multiplies(GroupedMatrix(eight.codes, eight.scale, eight.scale))


EIGHT, FOUR = (cpu.Form(bits, wide=False, minimum=bits == 4) for bits in (8, 4))
FOR_BYTES, FOR_PAIRS, FOR_HALVES = (
    vector_code(cpu.grouped_product(form, dots))
    for form, dots in ((EIGHT, cpu.byte_dots), (EIGHT, cpu.PairDots), (FOUR, cpu.PairDots))
)


def by_bytes(arguments, first, last):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
    FOR_BYTES(arguments, first, last)


def by_pairs(arguments, first, last):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
    FOR_PAIRS(arguments, first, last)


def by_halves(arguments, first, last):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
    FOR_HALVES(arguments, first, last)


@pytest.mark.parametrize("function", [by_bytes, by_pairs, by_halves])
def test_other_processors_compute_the_same_bits(
    function: Callable[[int, int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those without the integer products of AVX-512, and those that are not x86."""
    if function is not by_bytes and not has("avx2"):
        pytest.skip("needs AVX2")
    groups = int4_groups if function is by_halves else int8_groups
    product = GroupedProduct(groups(normal(40, 96, seed=1)))
    x = 5 * normal(7, 96, seed=2)
    here = product(x, None)
    monkeypatch.setattr(product, "kernel", kernel := SpanKernel(function))
    kernel.prepare()
    assert torch.equal(product(x, None), here)
