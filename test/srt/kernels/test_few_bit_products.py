"""Layers with matrices of few bits on a GPU's operations: each product that may be chosen, against
the dequantized weight; and float8 that a norm or an activation hands to the next product.

In the interpreter: test_float8.py."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from forms import DEVICE, GPU, runs_kernels
from torch import Tensor

pytest.importorskip("triton")

from mamba_eagle.backend.triton import products
from mamba_eagle.backend.triton.layer_ops import TritonOps
from mamba_eagle.kernels.float8.torch import E4M3, Rounded, Rounding, rounded, to_e4m3, widened
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.mlp import ReluSquaredMLP
from mamba_eagle.layers.moe import Experts, Routes
from mamba_eagle.layers.norm import GatedGroupRMSNorm, RMSNorm
from mamba_eagle.layers.weights import weights_come_late
from mamba_eagle.quantization.four_bit import FourBitMatrix
from mamba_eagle.quantization.matrix import Float8Matrix, Matrix, quantized

pytestmark = runs_kernels

DTYPE = torch.bfloat16
ERROR = 1e-2  # of bfloat16 outputs whose inputs may fall to either side of a tie


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU torch multiplies float8 on the CPU, as a Hopper GPU would."""
    if not GPU:
        monkeypatch.setattr(products, "capability", lambda device: (9, 0))


def normal(*shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE)


def float8(rows: int, columns: int, kind: str) -> Float8Matrix:
    weight = normal(rows, columns, seed=7)
    static = Rounding(torch.full((1, 1), 0.02, device=DEVICE))
    if kind == "block":
        scale = torch.full((-(-rows // 128), columns // 128), 0.01, device=DEVICE)
        scale = scale * (1 + torch.arange(scale.shape[1], device=DEVICE))
        whole = scale.repeat_interleave(128, 1).repeat_interleave(128, 0)[:rows]
        return Float8Matrix(to_e4m3(weight / whole), scale, (128, 128), Rounding(group=128))
    if kind == "tensor":
        scale = torch.full((1, 1), 0.01, device=DEVICE)
        return Float8Matrix(to_e4m3(weight / scale), scale, None, static)
    matrix = quantized(weight)
    return matrix if kind == "channel" else Float8Matrix(matrix.values, matrix.scale, None, static)


def four_bit(rows: int, columns: int, kind: str) -> FourBitMatrix:
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scale = torch.rand(rows, columns // 16, generator=generator) + 0.5
    zero = None
    if kind == "int4":
        zero = torch.randint(0, 16, scale.shape, generator=generator, dtype=torch.uint8)
    scale = scale.half() if kind == "int4" else scale.to(E4M3)
    return FourBitMatrix(codes, scale, zero, torch.full((1, 1), 0.1)).to(DEVICE)


def linear_of(matrix: Matrix, bias: bool = False) -> Linear:
    rows, columns = matrix.shape
    layer = Linear(columns, rows, bias).to(DEVICE, DTYPE)
    if layer.bias is not None:
        layer.bias.data.copy_(normal(rows, seed=9))
    layer.hold("weight", matrix)
    layer.prepare(TritonOps())
    return layer


def seen(x: Tensor, matrix: Matrix) -> Tensor:
    """What the product sees of its inputs."""
    rounding = matrix.rounding if isinstance(matrix, Float8Matrix) else None
    return x.float() if rounding is None else widened(rounded(x, rounding))


class Case(NamedTuple):
    make: object
    kind: str
    rows: int = 48
    columns: int = 96
    bias: bool = False


CASES = {
    "tensor": Case(float8, "tensor"),
    "tensor-ragged-with-bias": Case(float8, "tensor", rows=41, bias=True),
    "channel": Case(float8, "channel"),
    "channel-ragged-with-bias": Case(float8, "channel", rows=41, bias=True),
    "channel-and-static": Case(float8, "channel-static"),
    "block": Case(float8, "block", 130, 256),
    "nvfp4": Case(four_bit, "nvfp4", bias=True),
    "int4": Case(four_bit, "int4"),
}


@pytest.mark.parametrize("tokens", [1, 70, 200])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_product_is_that_of_the_dequantized_weight(case: Case, tokens: int) -> None:
    matrix = case.make(case.rows, case.columns, case.kind)  # type: ignore[operator]
    layer = linear_of(matrix, case.bias)
    x = normal(tokens, case.columns + 8).to(DTYPE)[:, :-8]
    exact = seen(x, matrix) @ matrix.dequantize().t()
    if layer.bias is not None:
        exact += layer.bias.float()
    found = layer(x)
    assert found.dtype == DTYPE and found.is_contiguous()
    assert (found.float() - exact).norm() / exact.norm() < ERROR


def test_a_device_without_float8_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(5, 96).to(DTYPE)
    for kind in ("tensor", "channel"):
        found = linear_of(float8(48, 96, kind))(x)
        monkeypatch.setattr(products, "capability", lambda device: (8, 0))
        assert not TritonOps().keeps(float8(48, 96, kind), DEVICE)
        reference = linear_of(float8(48, 96, kind))(x)
        monkeypatch.undo()
        assert (found.float() - reference.float()).norm() / reference.float().norm() < ERROR
        if not GPU:
            monkeypatch.setattr(products, "capability", lambda device: (9, 0))


def fused_parts() -> list[Linear]:
    parts = []
    for i, rows in enumerate((32, 16, 16)):
        part = Linear(96, rows).to(DEVICE, DTYPE)
        scale = torch.full((1, 1), 0.01 + 0.01 * i, device=DEVICE)
        values = to_e4m3(normal(rows, 96, seed=i) / scale)
        static = Rounding(torch.full((1, 1), 0.02, device=DEVICE))
        part.hold("weight", Float8Matrix(values, scale, None, static))
        parts.append(part)
    return parts


def test_fused_products_keep_each_parts_scale() -> None:
    parts, x = fused_parts(), normal(3, 96).to(DTYPE)
    matrices = [part.matrix for part in parts]
    whole = Linear.fused(parts)
    assert whole is not None
    whole.prepare(TritonOps())
    wide = torch.cat([matrix.dequantize() for matrix in matrices if matrix is not None])
    exact = seen(x, matrices[0]) @ wide.t()  # type: ignore[arg-type]
    assert (whole(x).float() - exact).norm() / exact.norm() < ERROR
    own = sum(part.matrix.nbytes for part in parts if part.matrix is not None)
    assert own <= whole.matrix.nbytes + 64, "parts are views"  # type: ignore[union-attr]


def test_a_copied_product_has_the_dtype_of_its_parts() -> None:
    parts, x = fused_parts(), normal(3, 96).to(DTYPE)
    whole = Linear.copied(parts)
    for each in (whole, *parts):
        each.prepare(TritonOps())
    torch.testing.assert_close(whole(x), torch.cat([part(x) for part in parts], -1))


def test_parts_that_round_inputs_in_other_ways_stay_apart() -> None:
    parts = fused_parts()
    matrix = parts[1].matrix
    assert isinstance(matrix, Float8Matrix)
    parts[1].hold("weight", Float8Matrix(matrix.values, matrix.scale, None, Rounding()))
    assert Linear.fused(parts) is None
    assert not any(part.is_part for part in parts)


# ── float8 handed on ──


@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
def test_norms_and_activations_hand_float8_to_the_next_product(kind: str) -> None:
    ops = TritonOps()
    columns = 128 if kind == "block" else 96
    layer = linear_of(float8(128, columns, kind))
    norm = RMSNorm(columns, 1e-5).to(DEVICE, DTYPE)
    gated = GatedGroupRMSNorm(columns, 2, 1e-5).to(DEVICE, DTYPE)
    x, gate = normal(3, columns).to(DTYPE), normal(3, columns, seed=1).to(DTYPE)
    for made, given in ((norm, (x,)), (gated, (x, gate))):
        made.prepare(ops)
        plain = layer(made(*given))
        made.rounding = layer.rounding
        handed = made(*given)
        assert isinstance(handed, Rounded)
        assert (layer(handed) - plain).float().norm() / plain.float().norm() < 0.05
    stream, added = x.clone(), gate.clone()
    normed, total = norm.after(stream, added)
    assert isinstance(normed, Rounded)
    torch.testing.assert_close(total, x + gate)


def test_an_mlp_connects_its_products() -> None:
    mlp = ReluSquaredMLP(96, 128).to(DEVICE, DTYPE)
    mlp.up_proj.hold("weight", float8(128, 96, "channel"))
    mlp.down_proj.hold("weight", float8(96, 128, "channel"))
    for part in (mlp, mlp.up_proj, mlp.down_proj):
        part.prepare(TritonOps())
    x = normal(3, 96).to(DTYPE)
    handed = rounded(x, mlp.input_rounding or Rounding())
    down = mlp.down_proj.matrix
    assert down is not None
    above = mlp.up_proj(handed).float().relu().square()
    exact = widened(rounded(above, Rounding())) @ down.dequantize().t()
    assert (mlp(handed, None).float() - exact).norm() / exact.norm() < ERROR


def test_slices_of_unlike_forms_become_one_parameter() -> None:
    """An expert that a checkpoint leaves in 16 bits, before or after others of few bits."""
    for order in ((0, 1), (1, 0)):
        with weights_come_late():
            layer = Experts(2, 32, 48, "relu_squared")
        matrix, dense = quantized(normal(48, 32)), normal(48, 32, seed=1)
        for index in order:
            if index:
                layer.hold("up_proj", matrix, index)
            else:
                layer.allocate("up_proj", DEVICE)
                layer.up_proj.data[index] = dense
        layer.assemble()
        assert not layer.matrices
        torch.testing.assert_close(layer.up_proj.data, torch.stack([dense, matrix.dequantize()]))


@torch.inference_mode()
def test_experts_are_multiplied_as_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, by the form without grouped float8 products, which torch lacks."""
    if not GPU:
        monkeypatch.setattr(products, "capability", lambda device: (8, 0))
    experts, size, width = 4, 32, 48
    with weights_come_late():
        layer = Experts(experts, size, width, "relu_squared").to(DTYPE)
    exact = Experts(experts, size, width, "relu_squared").to(DEVICE)
    for name, (rows, columns) in (("up_proj", (width, size)), ("down_proj", (size, width))):
        for i in range(experts):
            matrix = quantized(normal(rows, columns, seed=10 + i))
            layer.hold(name, matrix, i)
            getattr(exact, name).data[i] = matrix.dequantize()
    layer.assemble()
    layer.prepare(TritonOps())
    assert set(layer.matrices) == {"up_proj", "down_proj"}
    x = normal(6, size).to(DTYPE)
    chosen = torch.tensor([[0, 1], [1, 0], [3, 1], [0, 3], [3, 0], [1, 3]], device=DEVICE)
    routes = Routes(chosen, torch.full((6, 2), 0.5, device=DEVICE))
    wanted = exact(x.float(), routes)
    found = layer(x, routes)
    assert (found.float() - wanted).norm() / wanted.norm() < 0.08, "two roundings to float8"


@pytest.mark.gpu
def test_products_replay_in_graphs() -> None:
    for kind in ("tensor", "channel", "block"):
        layer = linear_of(float8(256, 256, kind))
        x = normal(8, 256).to(DTYPE)
        wanted = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layer(x)
        graph.replay()
        torch.testing.assert_close(found, wanted)
