"""The chunked scan and the convolution in torch, against naive.py."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tensor_checks import Draw, relative_error
from torch import Tensor

from mamba_eagle.kernels.causal_conv import naive
from mamba_eagle.kernels.causal_conv.torch import causal_conv, causal_conv_windows
from mamba_eagle.kernels.ssd.naive import recurrence_oracle
from mamba_eagle.kernels.ssd.torch import ssd_chunked

torch.set_num_threads(1)


class Sizes(NamedTuple):
    length: int
    chunk: int
    heads: int
    groups: int
    head_dim: int
    state_size: int


SIZES = [
    pytest.param(Sizes(1, 16, 2, 1, 8, 4), id="one-token"),
    pytest.param(Sizes(16, 16, 4, 2, 8, 16), id="one-chunk"),
    pytest.param(Sizes(37, 16, 4, 4, 80, 16), id="two-chunks-and-a-bit"),
    pytest.param(Sizes(64, 16, 8, 2, 64, 32), id="whole-chunks"),
    pytest.param(Sizes(65, 16, 6, 2, 12, 10), id="odd-sizes"),
    pytest.param(Sizes(50, 7, 3, 1, 5, 3), id="chunk-of-7"),
    pytest.param(Sizes(9, 128, 4, 1, 8, 128), id="shorter-than-a-chunk"),
    pytest.param(Sizes(33, 1, 2, 2, 4, 4), id="chunk-of-1"),
]


class Inputs(NamedTuple):
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor


def random_inputs(sizes: Sizes, batch: int, seed: int = 0, largest_step: float = 0.5) -> Inputs:
    draw, s = Draw(seed), sizes
    return Inputs(
        x=draw.normal(batch, s.length, s.heads, s.head_dim),
        dt=draw.steps(batch, s.length, s.heads, largest=largest_step),
        A=draw.decay_rates(s.heads),
        B=draw.normal(batch, s.length, s.groups, s.state_size),
        C=draw.normal(batch, s.length, s.groups, s.state_size),
        D=draw.normal(s.heads),
    )


def oracle(inputs: Inputs, row: int, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C, D = inputs
    start = None if initial_state is None else initial_state[row]
    return recurrence_oracle(x[row], dt[row], A, B[row], C[row], D, start)


def test_the_oracle_is_the_recurrence_worked_out_by_hand() -> None:
    x = torch.tensor([2.0, 3.0])[:, None, None]
    dt = torch.tensor([[1.0], [0.5]])
    A = torch.tensor([-math.log(4.0)])  # decays by 1/4, then by 1/2
    B = torch.tensor([10.0, 1.0])[:, None, None]
    C = torch.tensor([1.0, 2.0])[:, None, None]
    D = torch.tensor([100.0])
    y, states = recurrence_oracle(x, dt, A, B, C, D, torch.tensor([[[8.0]]]))
    # 8/4 + 1·2·10 = 22;  22/2 + 0.5·3·1 = 12.5
    torch.testing.assert_close(states.flatten(), torch.tensor([22.0, 12.5]).double())
    torch.testing.assert_close(y.flatten(), torch.tensor([222.0, 325.0]).double())


def test_a_head_reads_b_and_c_of_its_group() -> None:
    inputs = random_inputs(Sizes(5, 16, 6, 3, 4, 4), batch=1)
    x, dt, A, B, C, D = (part[0] if part.dim() > 1 else part for part in inputs)
    whole, _ = recurrence_oracle(x, dt, A, B, C, D)
    for head in range(6):
        own = slice(head, head + 1)
        group = slice(head // 2, head // 2 + 1)
        alone, _ = recurrence_oracle(
            x[:, own], dt[:, own], A[own], B[:, group], C[:, group], D[own]
        )
        torch.testing.assert_close(alone, whole[:, own])


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("continued", [False, True], ids=["from-zero", "from-a-state"])
def test_the_scan_equals_the_recurrence(sizes: Sizes, continued: bool) -> None:
    batch = 2
    inputs = random_inputs(sizes, batch)
    start = None
    if continued:
        start = torch.randn(batch, sizes.heads, sizes.head_dim, sizes.state_size)
    scan = ssd_chunked(*inputs, sizes.chunk, start)
    chunks = -(-sizes.length // sizes.chunk)
    assert scan.boundary_states.shape[1] == chunks + 1
    for row in range(batch):
        y, states = oracle(inputs, row, start)
        before = torch.zeros_like(states[:1]) if start is None else start[row][None].double()
        states = torch.cat([before, states])
        assert relative_error(scan.y[row], y) < 2e-6
        assert relative_error(scan.final_state[row], states[-1]) < 2e-6
        ends = [min(chunk * sizes.chunk, sizes.length) for chunk in range(chunks + 1)]
        assert relative_error(scan.boundary_states[row], states[ends]) < 2e-6


def test_a_sequence_cut_anywhere_gives_the_same() -> None:
    sizes = Sizes(40, 16, 4, 2, 12, 8)
    inputs = random_inputs(sizes, batch=1)
    x, dt, A, B, C, D = inputs
    y, states = oracle(inputs, 0, None)
    for cut in (1, 3, 15, 16, 17, 39):
        first = ssd_chunked(x[:, :cut], dt[:, :cut], A, B[:, :cut], C[:, :cut], D, 16)
        rest = (x[:, cut:], dt[:, cut:], A, B[:, cut:], C[:, cut:], D, 16)
        second = ssd_chunked(*rest, first.final_state)
        assert relative_error(torch.cat([first.y, second.y], dim=1)[0], y) < 2e-6
        assert relative_error(second.final_state[0], states[-1]) < 2e-6


def test_decays_whose_inverse_overflows_stay_finite_and_right() -> None:
    """exp(L_i - L_j) above the diagonal is far beyond float32 here, and must never be formed."""
    sizes = Sizes(60, 32, 4, 2, 8, 8)
    inputs = random_inputs(sizes, batch=1, largest_step=40.0)
    running = (inputs.dt * inputs.A).cumsum(1)
    assert running.min() < -1000 and torch.exp(-running.min()).isinf()
    scan = ssd_chunked(*inputs, sizes.chunk, torch.randn(1, 4, 8, 8))
    y, states = oracle(inputs, 0, None)
    assert scan.y.isfinite().all() and scan.boundary_states.isfinite().all()
    # the difference of two sums of size L is off by up to eps(L): see docs/design/numbers.md
    assert relative_error(scan.y[0], y) < 1e-4
    assert relative_error(scan.final_state[0], states[-1]) < 1e-4


def test_gradients_equal_those_of_the_recurrence() -> None:
    sizes = Sizes(21, 8, 4, 2, 6, 5)
    inputs = random_inputs(sizes, batch=1)
    weigh = torch.randn(21, 4, 6)

    leaves = [part.clone().requires_grad_() for part in inputs]
    (ssd_chunked(*leaves, sizes.chunk).y[0] * weigh).sum().backward()
    exact = [part.double().requires_grad_() for part in inputs]
    x, dt, A, B, C, D = exact
    y, _ = recurrence_oracle(x[0], dt[0], A, B[0], C[0], D)
    (y * weigh.double()).sum().backward()
    for leaf, expected in zip(leaves, exact):
        assert relative_error(leaf.grad, expected.grad) < 1e-5


# ── the convolution ──


def test_a_convolution_worked_out_by_hand() -> None:
    """Taps 3 and 10, bias 1: 3·5 + 10·0.2 + 1 = 18, 3·0.2 + 10·-0.5 + 1 = -3.4."""
    x, history = torch.tensor([[0.2], [-0.5]]), torch.tensor([[5.0]])
    found = naive.causal_conv(x, torch.tensor([[3.0], [10.0]]), torch.tensor([1.0]), history)
    wanted = [value / (1 + math.exp(-value)) for value in (18.0, -3.4)]
    torch.testing.assert_close(found[:, 0], torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("continued", [False, True], ids=["from-zero", "from-history"])
def test_the_convolution_equals_a_loop(
    width: int, length: int, with_bias: bool, continued: bool
) -> None:
    generator = torch.Generator().manual_seed(width * 10 + length)
    x = torch.randn(2, length, 5, generator=generator)
    weight = torch.randn(5, width, generator=generator)
    bias = torch.randn(5, generator=generator) if with_bias else None
    history = torch.zeros(2, width - 1, 5)
    if continued:
        history = torch.randn(2, width - 1, 5, generator=generator)
    out = causal_conv(x, weight, bias, history if continued else None)
    for row in range(2):
        expected = naive.causal_conv(x[row], weight.t(), bias, history[row])
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [2, 4])
def test_gathered_windows_equal_the_convolution(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(1, 12, 6, generator=generator)
    weight, bias = torch.randn(6, width, generator=generator), torch.randn(6, generator=generator)
    padded = F.pad(x[0], (0, 0, width - 1, 0))
    windows = torch.stack([padded[t : t + width] for t in range(12)])  # [n, K, channels]
    for maybe_bias in (bias, None):
        expected = causal_conv(x, weight, maybe_bias)[0]
        found = causal_conv_windows(windows, weight.t().contiguous(), maybe_bias)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_bfloat16_convolution_is_rounded_once() -> None:
    """Sums in float32; prompts and tree nodes round alike."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 200, 32, generator=generator).bfloat16()
    weight, bias = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((32, 4), (32,))
    )
    exact = naive.causal_conv(x[0], weight.t(), bias, torch.zeros(3, 32))
    windows = F.pad(x[0], (0, 0, 3, 0)).unfold(0, 4, 1).transpose(1, 2)
    for found in (causal_conv(x, weight, bias)[0], causal_conv_windows(windows, weight.t(), bias)):
        assert found.dtype == torch.bfloat16
        # half a unit in the last of 8 bits, and what float32 sums lose where terms cancel
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)
