"""The Triton scan and convolution of prompts against naive.py."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
from forms import DEVICE, in_the_interpreter, runs_kernels
from prefill_rig import PROMPTS, SLOTS, make_batch
from tensor_checks import Draw, relative_error
from triton_rig import BFLOAT16_ERROR, NANO, assert_mostly_equal, to_device

from mamba_eagle.backend.place import Cuda
from mamba_eagle.kernels.causal_conv import naive as conv_naive
from mamba_eagle.kernels.causal_conv.triton import ConvWeights
from mamba_eagle.kernels.causal_conv.triton_prefill import (
    Keys,
    conv_heads,
    conv_prompts,
    prefill_conv,
    prompt_steps,
)
from mamba_eagle.kernels.prefill_plan import Prompt, Room, prefill_plan
from mamba_eagle.kernels.ssd import naive as ssd_naive
from mamba_eagle.kernels.ssd.triton import Config, scan
from mamba_eagle.kernels.state_rounding.torch import round_states, token_keys
from mamba_eagle.kernels.tree_verify.layout import Sizes

test_in_the_interpreter = in_the_interpreter


class Case(NamedTuple):
    sizes: Sizes
    prompts: tuple[Prompt, ...] = PROMPTS
    config: Config | None = None
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    largest_step: float = 0.3


ON_DEVICE = partial(torch.tensor, device=DEVICE)
SMALL = Sizes(8, 20, 2, 16)  # a tile of 16, and one of 16 of which 4 are there
ONE_HEAD = Sizes(2, 32, 1, 16)
CHUNKS_OF_16 = Config(16, 16, 4, 2)
CASES = [
    pytest.param(Case(SMALL), id="a-head-is-a-tile-and-a-bit"),
    pytest.param(Case(SMALL, config=CHUNKS_OF_16), id="several-chunks"),
    pytest.param(Case(SMALL, config=CHUNKS_OF_16, largest_step=60.0), id="underflow"),
    pytest.param(Case(ONE_HEAD), id="a-head-is-a-tile"),
    pytest.param(Case(ONE_HEAD, config=CHUNKS_OF_16), id="a-head-is-two-tiles"),
    pytest.param(Case(SMALL, config=CHUNKS_OF_16, dtype=torch.bfloat16), id="bfloat16"),
    pytest.param(
        Case(ONE_HEAD, dtype=torch.bfloat16, state_dtype=torch.bfloat16), id="bfloat16-state"
    ),
]
# Chunks of 64 are met from below, exactly and from above.
LONG = (
    Prompt(0, 300, 3, ((77, 1), (128, 7), (300, 3))),
    Prompt(300, 64, -1, ((64, 0),)),
    Prompt(364, 1, 5, ((1, 9), (1, 5))),
    Prompt(365, 63, 2, ((0, 6), (63, 2))),
)
GPU_CASES = {
    "nano": Case(NANO),
    "nano-underflow": Case(NANO, largest_step=60.0),
    "nano-chunks-of-128": Case(NANO, config=Config(64, 128, 8, 2)),
    "nano-chunks-of-32": Case(NANO, config=Config(64, 32, 4, 3)),
    "nano-tiles-of-128": Case(NANO, config=Config(128, 64, 8, 2)),
    "nano-tiles-of-16": Case(NANO, config=Config(16, 64, 4, 2)),
    "nano-bfloat16-state": Case(NANO, state_dtype=torch.bfloat16),
    "p64-n128-g1": Case(Sizes(8, 64, 1, 128)),
    "p128-n256": Case(Sizes(8, 128, 2, 256)),
    "p64-n16-g4": Case(Sizes(8, 64, 4, 16)),
    "p64-n64-g2": Case(Sizes(8, 64, 2, 64)),
    "nano-float32": Case(NANO, dtype=torch.float32),
    "p128-n256-float32": Case(Sizes(8, 128, 2, 256), dtype=torch.float32),
}


def check_scan(case: Case) -> None:
    prompts = case.prompts
    batch = make_batch(case.sizes, prompts, case.dtype, case.state_dtype, case.largest_step)
    batch = to_device(batch)
    wanted = ssd_naive.scan_prompts(*batch[1:], prompts)
    untouched = torch.ones(SLOTS, dtype=torch.bool)
    untouched[[slot for prompt in prompts for _, slot in prompt.saves]] = False
    kept = batch.state[untouched].clone()
    y = scan(*batch[1:], prefill_plan(prompts, ON_DEVICE), case.config)

    y_error = relative_error(y, wanted.y.flatten(1))
    state_error = relative_error(batch.state[~untouched], wanted.state[~untouched])
    print(f"relative error: outputs {y_error:.1e}, states {state_error:.1e}")
    exact_rows, strong = case.dtype == torch.float32, case.largest_step > 1
    assert y_error < ((1e-4 if strong else 3e-6) if exact_rows else BFLOAT16_ERROR)
    if case.state_dtype == torch.float32:
        assert state_error < (3e-6 if exact_rows else 1e-5)
    else:
        assert state_error < 2 * BFLOAT16_ERROR
    assert torch.equal(batch.state[untouched], kept), "a state that is not saved to has changed"


@runs_kernels
@pytest.mark.parametrize("case", CASES)
def test_the_scan_equals_the_recurrence(case: Case) -> None:
    check_scan(case)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_saved_states_are_rounded_with_noise_of_their_segment(dtype: torch.dtype) -> None:
    """A state that is saved after 0 tokens is a copy, whatever the noise."""
    batch = to_device(make_batch(SMALL, PROMPTS, torch.bfloat16, dtype, 0.3))
    exact = batch.state.float()
    plan = prefill_plan(PROMPTS, ON_DEVICE)
    slots, ends = (torch.tensor(part) for part in zip(*plan.ends))
    keys = token_keys(slots, ends).to(DEVICE)
    before = batch.state.clone()
    scan(*batch[1:], plan, round_keys=keys, layer=4)
    scan(*batch[1:-1], exact, plan)
    saved = {int(slot): s for s, slot in enumerate(plan.segments[:, 2].tolist()) if slot >= 0}
    for slot, segment in saved.items():
        wanted = round_states(exact[slot][None], keys[segment][None], 4, dtype)[0]
        assert_mostly_equal(batch.state[slot], wanted)
    assert torch.equal(batch.state[6], before[5]), "copied from slot 5 before its prompt"


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("name", GPU_CASES)
def test_the_scan_equals_the_recurrence_at_real_sizes(name: str) -> None:
    case = GPU_CASES[name]
    dtype = torch.float32 if name.endswith("float32") else torch.bfloat16
    check_scan(case._replace(prompts=LONG, dtype=dtype))


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_state_stays_true_over_ten_thousand_tokens(dtype: torch.dtype) -> None:
    prompts = (Prompt(0, 10_000, -1, ((3_333, 1), (10_000, 0))),)
    check_scan(Case(Sizes(8, 80, 2, 128), prompts, dtype=dtype, largest_step=0.02))


class ConvCase(NamedTuple):
    sizes: Sizes
    prompts: tuple[Prompt, ...] = PROMPTS
    conv_kernel: int = 4
    bias: bool = True
    step_limit: tuple[float, float] = (0.0, float("inf"))
    block: int = 16
    dtype: torch.dtype = torch.float32


CONV_CASES = [
    pytest.param(ConvCase(SMALL), id="usual"),
    pytest.param(ConvCase(SMALL, block=4), id="several-blocks"),
    pytest.param(ConvCase(SMALL, PROMPTS, 2, False, (0.1, 0.5)), id="two-taps-no-bias-clamp"),
    pytest.param(ConvCase(ONE_HEAD, dtype=torch.bfloat16), id="bfloat16"),
]
CONV_GPU_CASES = [
    pytest.param(ConvCase(NANO, LONG, block=block, dtype=torch.bfloat16), id=f"nano-{block}")
    for block in (8, 16, 64)
]


def check_conv(case: ConvCase) -> None:
    draw = Draw(0)
    H, P, G, N = case.sizes
    n, K = sum(prompt.length for prompt in case.prompts), case.conv_kernel
    conv_dim = H * P + 2 * G * N

    def normal(*shape: int) -> torch.Tensor:
        return draw.normal(*shape).to(case.dtype)

    weights = ConvWeights(
        normal(K, conv_dim),
        normal(conv_dim) if case.bias else None,
        draw.steps(H, largest=12) - 11,
        draw.decay_rates(H),
        case.step_limit,
    )
    weights, projected = to_device(weights), normal(n, 64 + conv_dim + H).to(DEVICE)
    history = normal(SLOTS, K - 1, conv_dim).to(DEVICE)
    xbc, dt_raw = projected[:, 64 : 64 + conv_dim], projected[:, 64 + conv_dim :]
    dt_raw[0, 0] = 40.0  # past softplus's threshold
    wanted = conv_naive.conv_prompts(xbc, *weights[:2], history, case.prompts)
    wanted_dt = conv_naive.step_sizes(dt_raw, weights.dt_bias, case.step_limit)

    plan = prefill_plan(case.prompts, ON_DEVICE, case.block)
    found = prefill_conv(xbc, dt_raw, weights, history, plan, case.sizes)
    assert torch.equal(history, wanted.history)
    out = torch.cat([part.flatten(1) for part in (found.x, found.B, found.C)], dim=1)
    close = {"rtol": 2e-6, "atol": 2e-6}
    rounded = close if case.dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-5}
    torch.testing.assert_close(out.double(), wanted.out, **rounded)
    torch.testing.assert_close(found.dt.double(), wanted_dt, rtol=3e-6, atol=1e-9)
    assert found.dt.stride(0) == 1, "the scan reads a head's tokens side by side"
    alone = prompt_steps(dt_raw, weights.dt_bias, case.step_limit)
    assert torch.equal(alone, found.dt)


@runs_kernels
@pytest.mark.parametrize("case", CONV_CASES)
def test_the_convolution_equals_a_loop(case: ConvCase) -> None:
    check_conv(case)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("case", CONV_GPU_CASES)
def test_the_convolution_equals_a_loop_at_real_sizes(case: ConvCase) -> None:
    check_conv(case)


@runs_kernels
@pytest.mark.parametrize("values", [96, 40], ids=["whole", "not-a-multiple"])
def test_heads_of_delta_rules_are_the_convolution_divided_by_norms(values: int) -> None:
    draw, keys = Draw(0), Keys(2, 32, 1e-6)
    conv_dim, n = 2 * 64 + values, sum(prompt.length for prompt in PROMPTS)
    channels = draw.normal(n, 8 + conv_dim).to(DEVICE)[:, 8:]
    taps = draw.normal(4, conv_dim).to(DEVICE), None
    history = draw.normal(SLOTS, 3, conv_dim).to(DEVICE)
    plan, saved = prefill_plan(PROMPTS, ON_DEVICE), history.clone()
    q, k, v = conv_heads(channels, *taps, history, plan, keys)
    flat = conv_prompts(channels, *taps, saved, plan)
    for found, part in zip((q, k), flat[:, :128].split(64, dim=1)):
        each = part.unflatten(1, (2, 32)).double()
        wanted = each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(v, flat[:, 128:]) and torch.equal(history, saved)
    assert all(part.is_contiguous() for part in (q, k, v))


@runs_kernels
def test_what_fills_up_a_captured_pass_changes_nothing() -> None:
    """Tokens behind the prompts, and rows of tables: no bit of a prompt is another one."""
    draw, (H, P, G, N), n = Draw(0), ONE_HEAD, 47
    conv_dim = H * P + 2 * G * N
    taps = (draw.normal(4, conv_dim), draw.normal(conv_dim), draw.normal(H), draw.decay_rates(H))
    weights = to_device(ConvWeights(*taps, (0.0, float("inf"))))
    xbc, raw = draw.normal(64, conv_dim).to(DEVICE), draw.normal(64, H).to(DEVICE)
    xbc[n:], raw[n:] = float("nan"), float("nan")
    pools = draw.normal(SLOTS, 3, conv_dim).to(DEVICE), draw.normal(SLOTS, H, P, N).to(DEVICE)
    filled = prefill_plan(PROMPTS, ON_DEVICE, room=Room(7, 16, 10))._replace(tokens=64)
    assert [len(table) for table in filled[:3]] == [7, 16, 10]
    found = []
    for plan in (prefill_plan(PROMPTS, ON_DEVICE), filled):
        history, state = (pool.clone() for pool in pools)
        given = (xbc[: plan.tokens], raw[: plan.tokens], weights, history, plan, ONE_HEAD)
        x, dt, B, C = prefill_conv(*given)
        y = scan(x, dt, weights.A, B, C, weights.dt_bias, state, plan)
        found.append((y[:n], history, state))
    assert all(torch.equal(*both) for both in zip(*found))


@runs_kernels
def test_blocks_shorter_than_the_taps_before_a_token_are_refused() -> None:
    plan = prefill_plan(PROMPTS, ON_DEVICE, block=2)
    empty = torch.empty(47, 4)
    weights = ConvWeights(torch.empty(4, 4), None, empty[0], empty[0], (0.0, 1.0))
    with pytest.raises(ValueError, match="blocks of 2 tokens: must hold 3"):
        prefill_conv(empty, empty, weights, empty, plan, Sizes(1, 2, 1, 1))


@pytest.mark.gpu
@runs_kernels
def test_nothing_waits_for_the_device() -> None:
    batch = to_device(make_batch(NANO, LONG, torch.bfloat16))
    scan(*batch[1:], prefill_plan(LONG, ON_DEVICE))  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        scan(*batch[1:], prefill_plan(LONG, Cuda(DEVICE).to_device))
    finally:
        torch.cuda.set_sync_debug_mode("default")
