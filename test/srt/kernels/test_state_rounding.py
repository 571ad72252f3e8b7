"""Stochastic rounding of states: every form against naive.py, bit for bit, and its average."""

from __future__ import annotations

import math

import pytest
import torch
from forms import DEVICE, INTERPRETED, TORCH, TRITON, in_the_interpreter
from torch import Tensor

from mamba_eagle.kernels.state_rounding import naive
from mamba_eagle.kernels.state_rounding.torch import random_bits, round_states, token_keys

test_in_the_interpreter = in_the_interpreter
every_form = pytest.mark.parametrize("form", [TORCH, TRITON])

DTYPES = [torch.float16, torch.bfloat16]
SEEDS, POSITIONS, LAYER = [7, 2**62 + 3], [0, 70_001], 5


def rounded(form: str, states: Tensor, tokens: Tensor, layer: int, dtype: torch.dtype) -> Tensor:
    if form == "torch":
        return round_states(states, tokens, layer, dtype)
    return rounded_by_triton(states.to(DEVICE), tokens.to(DEVICE), layer, dtype).cpu()


def rounded_by_triton(states: Tensor, tokens: Tensor, layer: int, dtype: torch.dtype) -> Tensor:
    import triton
    from state_rounding_kernel import round_kernel

    out = torch.empty(states.shape, dtype=dtype, device=states.device)
    size = states[0].numel()
    round_kernel[(len(states), triton.cdiv(size, 64))](states, tokens, out, size, layer, BLOCK=64)
    return out


def drawn_states() -> Tensor:
    """[2, 3, 4, 8]: sizes from 1e-9 to 1e5, and what is special."""
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(2, 96, generator=generator)
    states *= 10.0 ** (14 * torch.rand(2, 96, generator=generator) - 9)
    special = [0.0, 1.0, -(2.0**-14), 2.0**-24, -3.3e-8, 65504.0, 65519.0, -7e4, math.inf, math.nan]
    states[0, : len(special)] = torch.tensor(special)
    return states.view(2, 3, 4, 8)


@every_form
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_are_rounded_as_one_number_at_a_time(form: str, dtype: torch.dtype) -> None:
    states = drawn_states()
    tokens = token_keys(torch.tensor(SEEDS), torch.tensor(POSITIONS))
    found = rounded(form, states, tokens, LAYER, dtype).float()
    one = naive.round_float16 if dtype == torch.float16 else naive.round_bfloat16
    for row, (seed, position) in enumerate(zip(SEEDS, POSITIONS)):
        key = naive.state_key(seed, position, LAYER)
        numbers = zip(states[row].flatten().tolist(), found[row].flatten().tolist())
        for place, (exact, ours) in enumerate(numbers):
            expected = one(exact, naive.random_bits(key, place))
            assert ours == expected or (math.isnan(ours) and math.isnan(exact)), (exact, place)


@pytest.mark.skipif(INTERPRETED, reason="torch's form alone")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_average_is_the_number_itself(dtype: torch.dtype) -> None:
    """Nearest rounding would give the same neighbour each time."""
    count = 4000
    values = torch.tensor([0.7001, -1.3e-6, 3.14159, -1000.1]).expand(count, -1).contiguous()
    tokens = token_keys(torch.full((count,), 11), torch.arange(count))
    found = round_states(values, tokens, 0, dtype).double()
    step = (found.amax(0) - found.amin(0)).clamp(min=1e-12)
    assert bool((found.amax(0) > found.amin(0)).all())
    error = (found.mean(0) - values[0].double()).abs() / step
    assert float(error.max()) < 4 * 0.5 / math.sqrt(count)  # four standard deviations


@pytest.mark.skipif(INTERPRETED, reason="torch's form alone")
@pytest.mark.parametrize("what", ["seed", "position", "layer", "place"])
def test_noise_depends_on_each_part_of_its_key(what: str) -> None:
    """Two that differ in one part agree in a bit half of the time, as independent ones do."""
    part = torch.arange(65)
    zeros = torch.zeros_like(part)
    tokens = token_keys(part if what == "seed" else zeros, zeros if what == "seed" else part)
    if what == "layer":
        rows = [random_bits(naive_key(int(layer)), 512) for layer in part]
        bits = torch.cat(rows)
    else:
        bits = random_bits(tokens, 512)
    if what == "place":
        bits = bits.t()
    for shift in range(16):
        one = (bits >> shift) & 1
        equal = float((one[1:] == one[:-1]).double().mean())
        assert abs(equal - 0.5) < 5 * 0.5 / math.sqrt(one[1:].numel()), shift
        assert abs(float(one.double().mean()) - 0.5) < 0.02


def naive_key(layer: int) -> Tensor:
    key = naive.state_key(0, 0, layer)
    return torch.tensor([key - 2**64 if key >= 2**63 else key])


@pytest.mark.skipif(INTERPRETED, reason="torch's form alone")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_the_dtype_holds_stays(dtype: torch.dtype) -> None:
    """A state that is loaded and saved again is a copy."""
    states = drawn_states().nan_to_num(posinf=1.0).clamp(-6e4, 6e4).to(dtype)
    tokens = token_keys(torch.tensor(SEEDS), torch.tensor(POSITIONS))
    assert torch.equal(round_states(states.float(), tokens, LAYER, dtype), states)


@pytest.mark.skipif(INTERPRETED, reason="torch's form alone")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_no_states_there_are_none(dtype: torch.dtype) -> None:
    """A step all of whose requests had ended accepts nothing, so it writes no state."""
    none = torch.empty(0, 3, 4, 8)
    tokens = token_keys(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    assert round_states(none, tokens, LAYER, dtype).shape == none.shape
