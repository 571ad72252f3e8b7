"""Float8 rounding and products in each form against naive.py."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from forms import GPU, TORCH, TRITON, all_in_the_interpreter, device_of
from gluon_rig import interpreted
from torch import Tensor

from mamba_eagle.kernels.float8 import naive
from mamba_eagle.kernels.float8.torch import (
    E4M3,
    Rounded,
    Rounding,
    rounded,
    row_scale,
    to_e4m3,
    widened,
)
from mamba_eagle.kernels.gated_norm.naive import gated_group_rms_norm, head_norm_then_gate
from mamba_eagle.kernels.relu_squared.naive import relu_squared
from mamba_eagle.kernels.rms_norm.naive import rms_norm
from mamba_eagle.kernels.silu_gate.naive import silu_and_mul
from mamba_eagle.quantization.matrix import Float8Matrix

test_in_the_interpreter = all_in_the_interpreter(
    "test_four_bit.py", "test_few_bit_products.py", "test_one_shot_sum.py", "test_peer_copy.py"
)
EPS = 1e-5

torch_or_triton = pytest.mark.parametrize("form", [TORCH, TRITON])


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def moved(x: Rounded, device: torch.device) -> Rounded:
    return Rounded(x.values.to(device), x.scale.to(device), x.group)


# ── rounding ──


def test_every_e4m3_number_is_its_own_nearest_and_ties_go_to_the_even_one() -> None:
    numbers = torch.arange(127, dtype=torch.uint8).view(E4M3).double()  # 0 to 448
    assert numbers[-1] == 448.0
    between = (numbers[1:] + numbers[:-1]) / 2
    even = torch.stack([numbers[:-1], numbers[1:]])[torch.arange(126) % 2, torch.arange(126)]
    for x, nearest in ((numbers, numbers), (-numbers, -numbers), (between, even)):
        assert [naive.nearest(one) for one in x.tolist()] == nearest.tolist()
        assert torch.equal(to_e4m3(x.float()).double(), nearest)
    assert naive.nearest(1e9) == 448.0 and naive.nearest(-449.0) == -448.0


ROUNDINGS = {"static": (0.037, 0), "token": (None, 0), "group": (None, 16)}


def round_in(form: str, x: Tensor, rounding: Rounding) -> Rounded:
    if form == "torch":
        return rounded(x, rounding)
    from mamba_eagle.kernels.float8 import triton

    device, scale = device_of(form), rounding.scale
    if scale is not None:
        rounding = rounding._replace(scale=scale.to(device))
    return moved(triton.rounded(x.to(device), rounding), torch.device("cpu"))


@torch_or_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale, group", ROUNDINGS.values(), ids=ROUNDINGS)
def test_rounding(form: str, scale: float | None, group: int, dtype: torch.dtype) -> None:
    """A static scale cuts what is larger than 448 times itself; a row of zeros stays one."""
    x = 8 * normal(5, 40, dtype=dtype)
    x[0] = 0.0
    given = None if scale is None else torch.full((1, 1), scale)
    found = round_in(form, x, Rounding(given, group))
    values, scales = naive.rounded(x, scale, group)
    assert found.values.dtype == E4M3 and found.scale.dtype == torch.float32
    torch.testing.assert_close(found.scale.double().expand_as(scales), scales, rtol=1e-6, atol=0)
    # a quotient next to a tie may fall to either side
    off = (found.values.double() - values).abs()
    assert (off <= 0.126 * values.abs().clamp(min=2**-6)).all() and (off > 0).sum() <= 2
    assert not found.values[0].float().any()


# ── rounding at the end of norms and activations ──


def check_rounded(found: Rounded, exact: Tensor, static: float | None, group: int = 0) -> None:
    """``exact`` [n, size] float64, rounded; a number next to a tie may fall to either side."""
    values, scales = naive.rounded(exact, static, group)
    torch.testing.assert_close(
        found.scale.cpu().double(), scales[: len(found.scale)], rtol=1e-5, atol=0
    )
    off = (found.values.cpu().double() - values).abs()
    assert (off <= 0.126 * values.abs().clamp(min=2**-6)).all()
    assert (off > 0).sum() <= 2 + values.numel() // 100


def make_rounding(form: str, static: float | None) -> Rounding:
    given = None if static is None else torch.full((1, 1), static, device=device_of(form))
    return Rounding(given)


static_or_own = pytest.mark.parametrize("static", [0.01, None], ids=["static", "token"])
only_triton = pytest.mark.parametrize("form", [TRITON])


@only_triton
@pytest.mark.parametrize(
    "size, static, group",
    [(330, 0.01, 0), (330, None, 0), (1344, None, 64), (40, None, 128)],
    ids=["static", "token", "groups", "wider-groups"],
)
@pytest.mark.parametrize("has_added", [False, True], ids=["norm", "sum-and-norm"])
def test_rounded_rms_norm(
    form: str, has_added: bool, size: int, static: float | None, group: int
) -> None:
    from mamba_eagle.backend.triton.layer_ops import TritonOps

    x, added, weight = normal(3, size), normal(3, size, seed=1), normal(size, seed=2)
    exact = rms_norm(x + added if has_added else x, weight, EPS)
    device, ops = device_of(form), TritonOps()
    (stream, beside), own = (t.to(device, copy=True) for t in (x, added)), weight.to(device)
    rounding = make_rounding(form, static)._replace(group=group)
    if has_added:
        found, stream = ops.add_rms_norm(stream, beside, own, EPS, rounding)
    else:
        found = ops.rms_norm(stream, own, EPS, rounding)
    assert isinstance(found, Rounded)
    check_rounded(found, exact, static, group)
    torch.testing.assert_close(stream.cpu(), x + added if has_added else x)


@only_triton
@pytest.mark.parametrize("size", [330, 1344, 40])
@pytest.mark.parametrize("has_added", [False, True], ids=["norm", "sum-and-norm"])
def test_a_norm_beside_its_rounding_has_the_bits_of_both(
    form: str, has_added: bool, size: int
) -> None:
    from mamba_eagle.backend.triton.layer_ops import TritonOps

    device, ops = device_of(form), TritonOps()
    given = [normal(3, size, seed=i).to(device, torch.bfloat16) for i in range(2)]
    weight = normal(size, seed=2).to(device)
    for rounding in (Rounding(), Rounding(None, 64), make_rounding(form, 0.01)):

        def norm(rounding: Rounding | None) -> Any:
            if has_added:
                return ops.add_rms_norm(*map(Tensor.clone, given), weight, EPS, rounding).normed
            return ops.rms_norm(given[0], weight, EPS, rounding)

        found, wanted = norm(rounding._replace(kept=True)), norm(None)
        assert torch.equal(found.exact, wanted)
        separate = ops.round(wanted, rounding)
        assert torch.equal(found.values.float(), separate.values.float())
        assert torch.equal(found.scale, separate.scale)


@only_triton
@static_or_own
def test_rounded_relu_squared(form: str, static: float | None) -> None:
    from mamba_eagle.kernels.relu_squared.triton import rounded_relu_squared

    x = normal(3, 72)
    found = rounded_relu_squared(x.to(device_of(form)), make_rounding(form, static))
    check_rounded(found, relu_squared(x), static)


@only_triton
@static_or_own
@pytest.mark.parametrize("groups", [1, 3, 8])
def test_rounded_gated_norm(form: str, groups: int, static: float | None) -> None:
    """The gate is a view of wider rows, as in_proj leaves it."""
    from mamba_eagle.kernels.gated_norm.triton import gated_norm

    y, wide, weight = normal(3, 360), normal(3, 368, seed=1), normal(360, seed=2)
    device = device_of(form)
    exact = gated_group_rms_norm(y, wide[:, 4:-4], weight, 360 // groups, EPS)
    given = (y.to(device), wide.to(device)[:, 4:-4], weight.to(device))
    found = gated_norm(*given, groups, EPS, make_rounding(form, static))
    check_rounded(found, exact, static)


@only_triton
@pytest.mark.parametrize("norm_first", [False, True], ids=["gate-first", "norm-first"])
def test_rounded_gated_norm_in_groups(form: str, norm_first: bool) -> None:
    """Each group of a norm has a scale of its own."""
    from mamba_eagle.kernels.gated_norm.triton import gated_norm

    y, wide = normal(9, 384), normal(9, 392, seed=1)
    weight = normal(128 if norm_first else 384, seed=2)
    if norm_first:
        exact = head_norm_then_gate(y, wide[:, 4:-4], weight, EPS)
    else:
        exact = gated_group_rms_norm(y, wide[:, 4:-4], weight, 128, EPS)
    device = device_of(form)
    given = (y.to(device), wide.to(device)[:, 4:-4], weight.to(device))
    found = gated_norm(*given, 3, EPS, Rounding(None, 128), norm_first)
    check_rounded(found, exact, None, 128)


@only_triton
@pytest.mark.parametrize("size, group", [(128, 128), (1408, 128), (192, 64)])
def test_rounded_silu_and_mul(form: str, size: int, group: int) -> None:
    """Groups of other sizes are rounded by a launch of their own."""
    from mamba_eagle.backend.triton.layer_ops import TritonOps

    both = 4 * normal(3, 2 * size + 8)[:, 8:]
    found = TritonOps().silu_and_mul(both.to(device_of(form)), Rounding(None, group))
    check_rounded(found, silu_and_mul(both), None, group)


# ── products ──


class ProductCase(NamedTuple):
    tokens: int
    rows: int
    columns: int
    inputs: str = "token"  # as in ROUNDINGS
    weight: str = "channel"  # or tensor, block
    bias: bool = False


PRODUCTS = {
    "one-token": ProductCase(1, 80, 96),
    "several-tokens": ProductCase(5, 64, 64, bias=True),
    "two-programs-of-tokens": ProductCase(20, 33, 64),
    "two-iterations": ProductCase(3, 48, 160, bias=True),
    "static": ProductCase(3, 48, 64, "static"),
    "one-scale-each": ProductCase(3, 48, 64, "static", "tensor"),
    "blocks-and-groups": ProductCase(20, 72, 176, "group", "block", bias=True),
    "blocks-and-tokens": ProductCase(3, 72, 176, "token", "block"),
}
BLOCK = (128 if GPU else 32, 128)  # the smaller, the fewer numbers are interpreted


def draw(case: ProductCase) -> tuple[Rounded, Tensor, Tensor, Tensor | None]:
    """Inputs, the weight's numbers and scales, and the bias."""
    scale, group = ROUNDINGS[case.inputs]
    given = None if scale is None else torch.full((1, 1), scale)
    x = rounded(normal(case.tokens, case.columns), Rounding(given, BLOCK[1] if group else 0))
    weight = normal(case.rows, case.columns, seed=1)
    if case.weight == "block":
        shape = (-(-case.rows // BLOCK[0]), -(-case.columns // BLOCK[1]))
        scales = torch.rand(shape, generator=torch.Generator().manual_seed(2)) * 0.01 + 0.01
    else:
        scales = row_scale(weight) if case.weight == "channel" else torch.full((1, 1), 0.01)
    bias = normal(case.rows, seed=3) if case.bias else None
    values = to_e4m3(weight / whole(scales, case.rows, case.columns))
    return x, values, scales, bias


def whole(scales: Tensor, rows: int, columns: int) -> Tensor:
    """As large as what they scale."""
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(BLOCK[0], 0)[:rows]
        return scales.repeat_interleave(BLOCK[1], 1)[:, :columns]
    return scales.expand(rows, columns)


def defined(x: Rounded, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The product by its definition, float64."""
    x_scale = widened(x._replace(values=torch.ones(x.values.shape).to(E4M3)))
    exact = naive.product(x.values, x_scale, weight, whole(scale, *weight.shape))
    return exact if bias is None else exact + bias.double()


@pytest.mark.parametrize("form", [TRITON])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS)
def test_products(form: str, case: ProductCase, dtype: torch.dtype) -> None:
    from mamba_eagle.kernels.float8 import triton

    x, weight, scale, bias = draw(case)
    exact = defined(x, weight, scale, bias)
    block = BLOCK if case.weight == "block" else None
    device = device_of(form)
    given = (weight.to(device), scale.to(device), None if bias is None else bias.to(device))
    configs = [triton.Config(32, 16, 4, 2), triton.Config(32, 64, 4, 2)]
    if block is not None:  # 64 tokens first: the widest instruction, whose sums have fewer bits
        configs += [triton.Config(16, 64, 4, 2, 0, True, blocks) for blocks in (1, 2, 4)]
    for config in configs:
        found = triton.product(moved(x, device), *given, dtype, block, config)
        assert found.dtype == dtype
        within = 8e-3 if dtype != torch.float32 else 5e-4 if GPU and config.tokens_first else 2e-6
        error = (found.cpu().double() - exact).norm() / exact.norm()
        assert error < within, config


@pytest.mark.parametrize("form", [TRITON])
@pytest.mark.parametrize(
    "case",
    ["several-tokens", "two-programs-of-tokens", "one-scale-each", "blocks-and-groups"]
    + ["blocks-and-tokens"],
)
def test_prompts_have_the_bits_of_few_tokens(form: str, case: str) -> None:
    """In tiles of any size on a GPU; a CPU's matrix products have bits of their own for each."""
    from mamba_eagle.kernels.float8 import triton, triton_prompts

    device = device_of(form)
    block = BLOCK if PRODUCTS[case].weight == "block" else None
    rows = (113, 5120, 20000)  # whose programs have a multiprocessor of their own, or have not
    shapes = product(triton_prompts.SIZES, rows)
    tiles = [triton_prompts.choose_tiles(*shape, block is not None) for shape in shapes]
    shapes = product((5, 64), rows)
    columns = (0, triton.LONG)  # fewer or more iterations in flight
    configs = [triton.choose_config(*s, block is not None, c) for s in shapes for c in columns]
    if not GPU:
        tiles = [triton_prompts.Tiles(32, 16, 4, 2), triton_prompts.Tiles(32, 16, 4, 2, 2)]
        configs = [triton.Config(32, 16, 4, 2)]
    sizes = {"tokens": 40 * len(tiles), "rows": 113 * len(tiles), "columns": 304}
    x, weight, scale, bias = draw(PRODUCTS[case]._replace(**sizes))
    given = (weight.to(device), scale.to(device), None if bias is None else bias.to(device))
    wanted = triton.product(moved(x, device), *given, torch.float32, block, configs[0])
    for each in tiles:
        found = triton_prompts.product(moved(x, device), *given, torch.float32, block, each)
        assert torch.equal(found, wanted), each
    for config in configs[1:]:
        found = triton.product(moved(x, device), *given, torch.float32, block, config)
        assert torch.equal(found, wanted), config


@pytest.mark.parametrize("form", [TRITON])
@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_programs_share_columns(form: str, tokens_first: bool, splits: int) -> None:
    """Twice, since programs count each other with numbers that stay; of five blocks of columns."""
    from mamba_eagle.kernels.float8 import triton

    case = ProductCase(20, 72, 592, "group", "block", bias=True)
    x, weight, scale, bias = draw(case)
    exact, device = defined(x, weight, scale, bias), device_of(form)
    assert bias is not None
    given = (weight.to(device), scale.to(device), bias.to(device))
    sizes = (64 if GPU else 16, 64 if tokens_first else 32, 4, 2, 0, tokens_first)
    for blocks in (1, 2):
        shared = triton.Config(*sizes, blocks, splits)
        operands = moved(x, device), *given, torch.float32, BLOCK, shared
        found = triton.product(*operands, triton.arrivals(device)).cpu()
        assert (found.double() - exact).norm() / exact.norm() < (5e-4 if GPU else 2e-6)


@pytest.mark.parametrize("shape", [(16, 2, 2), (32, 4, 1), (16, 8, 4)], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_products_in_registers(tokens: int, shape: tuple[int, int, int]) -> None:
    """Five blocks of columns; rows that do not fill the last program."""
    if GPU:
        from mamba_eagle.kernels.float8 import gluon
    else:
        [gluon] = interpreted("float8.gluon")
    x, weight, scale, bias = draw(ProductCase(tokens, 72, 640, "group", "block", bias=True))
    exact = defined(x, weight, scale, bias)
    assert bias is not None
    device = "cuda" if GPU else "cpu"
    given = (weight.to(device), scale.to(device), bias.to(device), torch.float32, BLOCK)
    none, config = torch.empty(0), gluon.Config(*shape)
    found = gluon.product(moved(x, torch.device(device)), *given, none, config).cpu()
    assert (found - exact).norm() / exact.norm() < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("form", [TRITON])
@pytest.mark.parametrize("tokens", [1, 8, 32, 64, 200])
@pytest.mark.parametrize("block", [None, (128, 128)], ids=["rows", "blocks"])
def test_products_at_real_sizes(form: str, tokens: int, block: tuple[int, int] | None) -> None:
    """Every configuration that is chosen, for a wide and a long weight."""
    from mamba_eagle.kernels.float8 import gluon, triton

    device = device_of(form)
    for rows, columns in ((22656, 4480), (4480, 15680)):
        x = rounded(normal(tokens, columns).to(device), Rounding(group=block[1] if block else 0))
        weight = normal(rows, columns, seed=1).to(device)
        scale = row_scale(weight)
        if block:
            scale = torch.full((-(-rows // 128), -(-columns // 128)), 0.01, device=device)
        values = to_e4m3(weight / (scale if block is None else 0.01))
        wide = values.float() * (scale if block is None else 0.01)
        exact = widened(x).double() @ wide.double().t()
        given = (x, values, scale, None, torch.bfloat16)
        found = [triton.product(*given, block)]
        found += [gluon.product(*given, block, triton.arrivals(device))] if block else []
        for each in found:
            assert (each.double() - exact).norm() / exact.norm() < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_a_library_multiplies_many_tokens_with_blocks(bias: bool) -> None:
    """Odd numbers of them, too."""
    from mamba_eagle.backend.triton.products import FEW_TOKENS, Float8Product

    values = to_e4m3(normal(384, 640, seed=1) * 40).cuda()
    scale = torch.linspace(0.01, 0.02, 15, device="cuda").view(3, 5)
    made = Float8Product(
        Float8Matrix(values, scale, (128, 128), Rounding(group=128)), torch.bfloat16
    )
    added = normal(384, seed=3).to("cuda", torch.bfloat16) if bias else None
    if torch.cuda.get_device_capability() == (9, 0):
        assert made.block_scale is not None
    wide = values.double() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    for tokens in (FEW_TOKENS, FEW_TOKENS + 1, 127, 1001):
        x = normal(tokens, 640).to("cuda", torch.bfloat16)
        exact = widened(rounded(x, made.rounding)).double() @ wide.t()
        exact = exact if added is None else exact + added
        assert (made(x, added) - exact).norm() / exact.norm() < 4e-3, tokens
