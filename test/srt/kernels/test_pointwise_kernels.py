"""RMSNorm, the gated norm, relu squared and rotary encoding, in each form against naive.py.

How layers choose is in test_pointwise.py.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from forms import (
    DEVICE,
    TORCH,
    TRITON,
    device_of,
    every_form,
    in_the_interpreter,
    runs_kernels,
)
from torch import Tensor

from mamba_eagle.cpu.ops import gated_norm as gated_cpu
from mamba_eagle.cpu.ops import rms_norm as rms_cpu
from mamba_eagle.kernels.gated_norm import naive as gated_naive
from mamba_eagle.kernels.gated_norm import torch as gated_torch
from mamba_eagle.kernels.relu_squared import naive as relu_naive
from mamba_eagle.kernels.rms_norm import naive as rms_naive
from mamba_eagle.kernels.rotary import naive as rotary_naive
from mamba_eagle.kernels.rotary.torch import rotate
from mamba_eagle.layers.ops import HeadNorms, LayerOps

test_in_the_interpreter = in_the_interpreter

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
torch_or_triton = pytest.mark.parametrize("form", [TORCH, TRITON])


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(found: Tensor, exact: Tensor, roundings: int = 1) -> None:
    """Within so many roundings of the exact numbers; float32 sums lose a little, too."""
    last_bit = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}[found.dtype]
    within = last_bit * roundings + 2e-6
    torch.testing.assert_close(found.cpu().double(), exact, rtol=within, atol=2e-6)


# ── norms ──


class NormCase(NamedTuple):
    rows: int
    size: int
    group: int
    dtype: torch.dtype = torch.float32
    gate: float = 1.0  # how far gates reach


NORMS = {
    "groups-of-24": NormCase(3, 96, 24),
    "one-group": NormCase(2, 64, 64),
    "one-row": NormCase(1, 256, 128),
    "odd-size": NormCase(5, 30, 15),
    "a-group-a-channel": NormCase(4, 7, 1),
    "blocks-of-128": NormCase(3, 660, 330),
    "gates-that-saturate": NormCase(3, 96, 24, gate=60.0),
}


def rms_norm(form: str, x: Tensor, weight: Tensor) -> Tensor:
    if form == "torch":
        return LayerOps().rms_norm(x, weight, EPS)
    if form == "cpu":
        found = torch.empty_like(x)
        rms_cpu.rms_norm(x.contiguous().numpy(), weight.numpy(), EPS, found.numpy())
        return found
    from mamba_eagle.kernels.rms_norm import triton

    device = device_of(form)
    return triton.rms_norm(x.to(device), weight.to(device), EPS).cpu()


@every_form
@pytest.mark.parametrize("case", NORMS.values(), ids=NORMS)
def test_rms_norm(form: str, case: NormCase) -> None:
    x, weight = 3 * normal(case.rows, case.size), normal(case.size, seed=1)
    x[0] = 0.0
    found = rms_norm(form, x, weight)
    assert_rounded(found, rms_naive.rms_norm(x, weight, EPS))
    assert not found[0].any(), "a row of zeros stays one"


@torch_or_triton
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("size", [24, 1500])
def test_rms_norm_of_16_bits(form: str, dtype: torch.dtype, size: int) -> None:
    """Of rows of a wider tensor; many short ones, which share programs, or long ones."""
    x, weight = normal(90, size + 8, dtype=dtype)[:, 8:], normal(size, dtype=dtype, seed=1)
    found = rms_norm(form, x, weight)
    assert found.dtype == dtype and found.is_contiguous()
    assert_rounded(found, rms_naive.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("form", [TRITON])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_and_its_norm(form: str, dtype: torch.dtype) -> None:
    """In the place of an input; the norm is that of the sum as it is rounded."""
    from mamba_eagle.kernels.rms_norm.triton import add_rms_norm_

    stream, added = normal(7, 88, dtype=dtype), normal(7, 88, dtype=dtype, seed=1)
    weight, total = normal(88, dtype=dtype, seed=2), stream.double() + added.double()
    found = [part.to(device_of(form)) for part in (stream, added, weight)]
    add_rms_norm_(*found, EPS)
    assert_rounded(found[0], total)
    assert_rounded(found[1], rms_naive.rms_norm(found[0].cpu().double(), weight, EPS))


def gated_norm(form: str, y: Tensor, gate: Tensor, weight: Tensor, group: int) -> Tensor:
    if form == "torch":
        return gated_torch.gated_group_rms_norm(y, gate, weight, group, EPS)
    if form == "cpu":
        out = torch.empty_like(y)
        arrays = (part.contiguous().numpy() for part in (y, gate, weight))
        gated_cpu.gated_group_rms_norm(*arrays, group, EPS, out.numpy())
        return out
    from mamba_eagle.kernels.gated_norm import triton

    device = device_of(form)
    on_device = (part.to(device) for part in (y, gate, weight))
    return triton.gated_norm(*on_device, y.shape[1] // group, EPS).cpu()


def check_gated_norm(form: str, case: NormCase) -> None:
    """The gate is a view of wider rows, as in_proj leaves it."""
    y = normal(case.rows, case.size, dtype=case.dtype)
    gate = case.gate * normal(case.rows, case.size + 16, seed=1)
    gate, weight = gate.to(case.dtype)[:, 8:-8], normal(case.size, dtype=case.dtype, seed=2)
    y[0] = 0.0
    found = gated_norm(form, y, gate, weight, case.group)
    assert found.dtype == case.dtype
    exact = gated_naive.gated_group_rms_norm(y, gate, weight, case.group, EPS)
    assert_rounded(found, exact, roundings=2)  # before the weight, and after it
    assert not found[0].any(), "a row of zeros stays one"


@every_form
@pytest.mark.parametrize("case", NORMS.values(), ids=NORMS)
def test_gated_norm(form: str, case: NormCase) -> None:
    check_gated_norm(form, case)


@torch_or_triton
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_gated_norm_of_16_bits(form: str, dtype: torch.dtype) -> None:
    check_gated_norm(form, NormCase(3, 96, 24, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("form", [TRITON])
def test_gated_norm_at_real_sizes(form: str) -> None:
    check_gated_norm(form, NormCase(40, 10240, 1280, torch.bfloat16))


# ── gates ──


@torch_or_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2048, 5000])
def test_relu_squared(form: str, size: int, dtype: torch.dtype) -> None:
    """Rounded once; neither a negative number nor a negative zero leaves its sign behind."""
    x = 3 * normal(size, dtype=dtype, seed=size)
    if size > 1:
        x[:4] = torch.tensor([0.0, -0.0, -1e4, 200.0])
    exact = relu_naive.relu_squared(x)
    if form == "torch":
        found = LayerOps().relu_squared(x)
    else:
        from mamba_eagle.kernels.relu_squared import triton

        found = triton.relu_squared_(x.to(device_of(form)))
    assert found.dtype == dtype and found.shape == x.shape
    assert_rounded(found, exact)
    assert not found.signbit().any()


@pytest.mark.parametrize("form", [TRITON])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 1500])
def test_silu_and_mul(form: str, dtype: torch.dtype, size: int) -> None:
    from mamba_eagle.kernels.silu_gate import naive
    from mamba_eagle.kernels.silu_gate.triton import silu_and_mul

    both = 4 * normal(3, 2 * size + 8, dtype=dtype)[:, 8:]
    found = silu_and_mul(both.to(device_of(form)))
    assert found.dtype == dtype
    assert_rounded(found, naive.silu_and_mul(both))


@pytest.mark.parametrize("form", [TRITON])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_by_sigmoid(form: str, dtype: torch.dtype) -> None:
    """A gate for each number, of heads that lie apart, as what is gated may; or one for a row."""
    from mamba_eagle.kernels.sigmoid_gate import naive
    from mamba_eagle.kernels.sigmoid_gate.triton import gate_by_sigmoid

    packed = 6 * normal(3, 4, 24, dtype=dtype)
    y, one = normal(3, 2, 24, dtype=dtype, seed=1), normal(3, 1, dtype=dtype, seed=2)
    device = device_of(form)
    apart = y.transpose(0, 1).contiguous().transpose(0, 1)
    for value, gate in ((y, packed[:, 1::2]), (apart, packed[:, 1::2]), (y.flatten(1), one)):
        on_device = packed.to(device)[:, 1::2] if gate.dim() == 3 else gate.to(device)
        found = gate_by_sigmoid(value.to(device), on_device)
        assert found.dtype == dtype and found.shape == value.flatten(1).shape
        assert_rounded(found, naive.gate_by_sigmoid(value, gate).flatten(1))


@pytest.mark.parametrize("form", [TRITON])
@pytest.mark.parametrize("size", [256, 96])
def test_a_gated_head_becomes_float8_as_its_numbers_would(form: str, size: int) -> None:
    """In one launch where groups divide a head, in another one elsewhere."""
    from mamba_eagle.kernels.float8.torch import Rounding
    from mamba_eagle.kernels.float8.triton import rounded
    from mamba_eagle.kernels.sigmoid_gate.triton import gate_by_sigmoid

    y, gate = (normal(3, 4, size, seed=i).to(device_of(form)).bfloat16() for i in range(2))
    wanted = rounded(gate_by_sigmoid(y, gate), Rounding(group=128))
    found = gate_by_sigmoid(y, gate, Rounding(group=128))
    assert torch.equal(found.scale, wanted.scale) and found.group == 128
    assert torch.equal(found.values.float(), wanted.values.float())


@torch_or_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [24, 330])
def test_head_norm_then_gate(form: str, dtype: torch.dtype, size: int) -> None:
    y, gate = normal(3, 4 * size, dtype=dtype), normal(3, 4 * size + 16, dtype=dtype, seed=1)
    gate, weight = 4 * gate[:, 8:-8], normal(size, dtype=dtype, seed=2)
    exact = gated_naive.head_norm_then_gate(y, gate, weight, EPS)
    if form == "torch":
        found = gated_torch.head_norm_then_gate(y, gate, weight, EPS)
    else:
        from mamba_eagle.kernels.gated_norm import triton

        on_device = (part.to(device_of(form)) for part in (y, gate, weight))
        found = triton.gated_norm(*on_device, 4, EPS, norm_first=True)
    assert found.dtype == dtype
    assert_rounded(found, exact)


# ── rotary encoding ──


@torch_or_triton
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("heads, dim, turned", [(1, 16, 16), (3, 24, 16), (5, 8, 6)])
def test_rotate(form: str, heads: int, dim: int, turned: int, dtype: torch.dtype) -> None:
    """Heads that are part of wider rows, whose other heads stay; channels past ``turned``, too."""
    packed = normal(7, heads + 2, dim, dtype=dtype, seed=heads)
    angles = 100 * torch.rand(7, 1, turned // 2, generator=torch.Generator().manual_seed(1))
    cos, sin = angles.cos(), angles.sin()
    before, device = packed.clone(), device_of(form)
    exact = rotary_naive.rotate(before[:, 1:-1], cos, sin)
    if form == "torch":
        found = rotate(packed[:, 1:-1], cos, sin)
    else:
        from mamba_eagle.kernels.rotary import triton

        on_device = packed.to(device)
        found = triton.rotate_(on_device[:, 1:-1], cos.to(device), sin.to(device)).cpu()
        packed = on_device.cpu()
    assert found.dtype == dtype
    assert_rounded(found, exact)
    assert torch.equal(found[..., turned:], before[:, 1:-1, turned:])
    assert torch.equal(packed[:, 0], before[:, 0]) and torch.equal(packed[:, -1], before[:, -1])


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("turned", [16, 10], ids="turned-{}".format)
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
def test_queries_and_keys_are_turned_in_one_launch(
    normed: bool, turned: int, dtype: torch.dtype
) -> None:
    """As torch does one operation after the other, rounding each; values between them stay."""
    from mamba_eagle.kernels.rotary import triton

    packed = normal(5, 3 + 2 + 2, 16, dtype=dtype).to(DEVICE)
    angles = 100 * torch.rand(5, 1, turned // 2, generator=torch.Generator().manual_seed(1))
    rotation = (angles.cos().to(DEVICE), angles.sin().to(DEVICE))
    weights = normal(2, 16, dtype=dtype, seed=2).to(DEVICE)
    norms = HeadNorms(*weights, 1e-5) if normed else None
    parts = packed.clone().split([3, 2, 2], dim=1)
    q, k = LayerOps().place_heads(*parts[:2], *rotation, norms)
    triton.rotate_(packed[:, :3], *rotation, packed[:, 3:5], norms)
    within = 1e-6 if dtype == torch.float32 else 2**-6  # the interpreter cuts instead of rounding
    for found, wanted in ((packed[:, :3], q), (packed[:, 3:5], k)):
        assert found.dtype == wanted.dtype == dtype
        assert (found - wanted).double().norm() < within * wanted.double().norm()
    assert torch.equal(packed[:, 5:], parts[2])


def test_a_quarter_turn_swaps_the_halves() -> None:
    x = torch.tensor([[[3.0, 5.0, 4.0, 7.0, 9.0]]])
    quarter, none = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]])
    assert rotary_naive.rotate(x, quarter, none).tolist() == [[[-4.0, 5.0, 3.0, 7.0, 9.0]]]
