"""Products in tile registers: as exact as float32, and the same bits for a row in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mamba_eagle.cpu import span_kernels, threads
from mamba_eagle.cpu.abi import Split
from mamba_eagle.cpu.products import amx as cpu_tiles
from mamba_eagle.cpu.products import naive as linear_naive
from mamba_eagle.cpu.products.packed import PanelProduct, TileProduct, float_product
from mamba_eagle.cpu.programs.embeddings import StoredRows, stored_rows
from mamba_eagle.layers.embedding import Embedding

pytestmark = pytest.mark.skipif(
    not cpu_tiles.permitted(), reason="the processor has no tile registers (AMX)"
)

SIZES = [(64, 32), (70, 96), (130, 1024)]  # outputs, inputs


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(outputs: int, inputs: int) -> Tensor:
    return normal(outputs, inputs, seed=1).bfloat16()


@pytest.mark.parametrize("outputs, inputs", SIZES)
def test_products_are_as_exact_as_those_in_vectors(outputs: int, inputs: int) -> None:
    weight, x = weight_of(outputs, inputs), normal(23, inputs, seed=2)
    exact = x.double() @ weight.double().t()
    tiles, vectors = (kind(weight)(x, None) for kind in (TileProduct, PanelProduct))
    assert (tiles - exact).norm() <= 1.2 * (vectors - exact).norm()
    assert float((tiles - exact).norm() / exact.norm()) < 3e-7


def test_products_are_those_number_by_number() -> None:
    weight, x = weight_of(7, 32), normal(3, 32, seed=2)
    bits = weight.view(torch.int16).to(torch.int32) & 0xFFFF
    found = TileProduct(weight)(x, None).double()
    torch.testing.assert_close(found, linear_naive.few_rows(x, bits), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("outputs, inputs", SIZES)
def test_a_row_does_not_depend_on_the_batch_or_its_place(outputs: int, inputs: int) -> None:
    product = TileProduct(weight_of(outputs, inputs))
    x = normal(33, inputs, seed=2)
    whole = product(x, None)
    for rows in range(1, 33):
        assert torch.equal(product(x[:rows], None), whole[:rows])
        assert torch.equal(product(x[rows:], None), whole[rows:])


def test_a_row_does_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    product, x = TileProduct(weight_of(1000, 96)), normal(13, 96, seed=2)
    alone = product(x, None)
    monkeypatch.setattr(threads, "_threads", 3)
    monkeypatch.setattr(span_kernels, "MIN_PARALLEL", 0)
    assert torch.equal(product(x, None), alone)


def test_three_parts_are_the_input_exactly() -> None:
    """Sizes from 1e-30 to 1e30, of both signs."""
    rows, inputs = 7, 64
    x = normal(rows, inputs, seed=3) * 10.0 ** torch.linspace(-30, 30, inputs)
    parts = torch.zeros(cpu_tiles.parts_bytes(rows, inputs), dtype=torch.uint8)
    cpu_tiles.SPLIT(rows, 0, Split(x.data_ptr(), parts.data_ptr(), inputs))
    tiles = parts.view(torch.bfloat16).view(-1, inputs // 32, 16, 32).double()
    for row in range(rows):
        own = tiles[row // 5, :, 3 * (row % 5) : 3 * (row % 5) + 3]  # [blocks, parts, 32]
        assert torch.equal(own.sum(1).flatten(), x[row].double())


def test_what_is_not_finite_stays_so() -> None:
    product, x = TileProduct(weight_of(16, 32)), normal(4, 32, seed=2)
    whole = product(x, None)
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    found = product(x, None)
    assert not found[1:3].isfinite().any()
    assert torch.equal(found[[0, 3]], whole[[0, 3]])


def test_weights_that_tiles_do_not_hold_are_multiplied_in_vectors() -> None:
    assert isinstance(float_product(weight_of(16, 64).float()), TileProduct)
    for weight in (normal(16, 64), normal(16, 64).half(), weight_of(16, 33)):
        assert isinstance(float_product(weight), PanelProduct)


def test_rows_of_the_weight_are_read_back() -> None:
    weight, ids = weight_of(130, 64), torch.tensor([0, 129, 65, 64, 17])
    product = TileProduct(weight)
    assert torch.equal(product.rows(ids), weight[ids].float())
    embedding = Embedding(130, 64)
    embedding.holder = product
    rows = stored_rows(embedding)
    assert isinstance(rows, StoredRows)
    out = torch.full((len(ids), 80), 7.0)
    call = rows.call(64, 80, 2.0)
    call.block.point(tokens=ids, out=out)
    call.kernel(len(ids), 0, call.block)
    assert torch.equal(out[:, :64], 2.0 * weight[ids].float()) and bool((out[:, 64:] == 7.0).all())
