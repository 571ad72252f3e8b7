"""What the fused CPU kernels are made of, and the layers that use them, against float64.

Each other kernel is compared in the test of its operation; those of the verify schemes in
test_verify_schemes.py and test_fused_schemes.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensor_checks import host_backend
from torch import Tensor

from mamba_eagle.cpu import vector_math as numba_math
from mamba_eagle.cpu.layer_ops import CpuOps
from mamba_eagle.cpu.products import naive as linear_naive
from mamba_eagle.cpu.products.packed import PanelProduct, TileProduct
from mamba_eagle.kernels.gated_norm.naive import gated_group_rms_norm
from mamba_eagle.kernels.rms_norm.naive import rms_norm
from mamba_eagle.kernels.silu_gate import naive as naive_gate
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.norm import GatedGroupRMSNorm, RMSNorm

torch.set_num_threads(1)
pytest.importorskip("numba")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ── functions ──


def each(function, values: np.ndarray) -> np.ndarray:
    return np.array([function(value) for value in values], np.float64)


def ulps(found: np.ndarray, exact: np.ndarray) -> float:
    return float((np.abs(found - exact) / np.spacing(np.abs(exact).astype(np.float32))).max())


def test_exp_silu_and_softplus() -> None:
    """To a few units in the last place, over all that neither overflows nor underflows."""
    values = np.linspace(-86.9, 87.9, 4001, dtype=np.float32)
    assert ulps(each(numba_math.exp, values), np.exp(values.astype(np.float64))) <= 2
    assert numba_math.exp(np.float32(0.0)) == 1.0
    values = np.linspace(-30, 30, 2001, dtype=np.float32)
    wide = values.astype(np.float64)
    assert ulps(each(numba_math.silu, values), wide / (1 + np.exp(-wide))) <= 4
    assert ulps(each(numba_math.softplus, values), np.log1p(np.exp(wide))) <= 4
    huge = np.array([-1e4, 1e4], np.float32)
    for function in (numba_math.silu, numba_math.softplus):
        assert each(function, huge).tolist() == [pytest.approx(0.0, abs=1e-30), 1e4]


def test_exp_of_what_underflows_adds_nothing() -> None:
    """Decays of a token that forgets everything."""
    for value in (-88.0, -1e4, -1e30, -np.inf):
        assert 0.0 <= numba_math.exp(np.float32(value)) < 1e-37


# ── products and norms ──


def bfloat16_bits(weight: Tensor) -> Tensor:
    """Of numbers that bfloat16 has: their 16 bits, as integers."""
    short = weight.bfloat16()
    assert torch.equal(short.float(), weight)
    return short.view(torch.int16).to(torch.int32) & 0xFFFF


def test_all_bfloat16_numbers_are_widened() -> None:
    bits = torch.arange(2**16)
    numbers = (bits << 16).to(torch.uint32).view(torch.float32)
    widened = torch.tensor([linear_naive.widen(value) for value in bits.tolist()])
    assert torch.equal(widened.nan_to_num(7.0), numbers.nan_to_num(7.0))
    finite = numbers.isfinite()
    weight = numbers.bfloat16()[finite, None]  # an output each, of the number 1
    found = PanelProduct(weight)(torch.ones(1, 1), None)
    assert torch.equal(found[0], numbers[finite])


@pytest.mark.parametrize("rows", range(1, 14))
@pytest.mark.parametrize("outputs, inputs", [(7, 33), (40, 64), (1, 1)])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_linear_of_few_rows(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    """A layer whose weights are bfloat16 numbers, before and after it is prepared."""
    layer = Linear(inputs, outputs, bias).requires_grad_(False)
    layer.weight.copy_(normal(outputs, inputs, seed=1).bfloat16())
    if layer.bias is not None:
        layer.bias.copy_(normal(outputs, seed=2))
    x = normal(rows, inputs, seed=3)
    exact = linear_naive.few_rows(x, bfloat16_bits(layer.weight))
    if layer.bias is not None:
        exact += layer.bias
    for prepare in (False, True):
        if prepare:
            layer.prepare(host_backend().layer_ops)
            assert isinstance(layer._packed, (PanelProduct, TileProduct))
            assert layer._packed.nbytes == 2 * 64 * inputs, "16 bits each"
            assert layer.weight.is_meta, "its product has the only copy"
        torch.testing.assert_close(layer(x).double(), exact, rtol=1e-5, atol=1e-5)


def test_weights_that_bfloat16_would_round_stay_float32() -> None:
    layer = Linear(32, 20).requires_grad_(False)
    layer.weight.copy_(normal(20, 32))
    x = normal(3, 32, seed=1)
    exact = x.double() @ layer.weight.double().t()
    layer.prepare(host_backend().layer_ops)
    assert layer.packed is not None and layer.packed.nbytes == 64 * 32 * 4  # a panel of 64 outputs
    torch.testing.assert_close(layer(x).double(), exact, rtol=1e-5, atol=1e-5)


def test_gates() -> None:
    both = 9 * normal(3, 14)
    both[0, 0] = -200.0
    exact = naive_gate.silu_and_mul(both)
    found = CpuOps().silu_and_mul(both)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("size, group", [(256, 128), (36, 36), (30, 15), (7, 1)])
def test_norms(rows: int, size: int, group: int) -> None:
    """Layers, before and after they are prepared; rows of zeros stay zeros."""
    x, gate = 3 * normal(rows, size), normal(rows, 2 * size, seed=1)[:, size:]
    x[0] = 0.0
    plain, gated = RMSNorm(size, 1e-5), GatedGroupRMSNorm(size, size // group, 1e-5)
    for layer in (plain, gated):
        layer.requires_grad_(False).weight.copy_(normal(size, seed=2))
    expected = rms_norm(x, plain.weight, 1e-5)
    expected_gated = gated_group_rms_norm(x, gate, gated.weight, group, 1e-5)
    for prepare in (False, True):
        if prepare:
            plain.prepare(host_backend().layer_ops)
            gated.prepare(host_backend().layer_ops)
            assert isinstance(plain._ops, CpuOps) and isinstance(gated._ops, CpuOps)
        torch.testing.assert_close(plain(x).double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gated(x, gate).double(), expected_gated, rtol=1e-5, atol=1e-6)
        assert not plain(x)[0].any()
