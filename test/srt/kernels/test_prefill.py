"""Prompts of several requests in one batch: the plan, the scan on a CPU, and the convolution there
and in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from prefill_rig import PROMPTS, SLOTS, Batch, make_batch
from tensor_checks import relative_error
from torch import Tensor

from mamba_eagle.cpu.ops.causal_conv import convolve_token, save_history
from mamba_eagle.cpu.ops.ssd import scan_head
from mamba_eagle.cpu.prefill import tokens_of
from mamba_eagle.kernels.causal_conv import naive as conv_naive
from mamba_eagle.kernels.causal_conv.torch import causal_conv
from mamba_eagle.kernels.prefill_plan import Prompt, prefill_plan
from mamba_eagle.kernels.ssd import naive as ssd_naive
from mamba_eagle.kernels.ssd.torch import even_chunk

torch.set_num_threads(1)


def scanned(batch: Batch, step: int = 1) -> Tensor:
    """y [n, H, P] by the fused kernels; step: -1 for the last request and head first."""
    plan = prefill_plan(batch.prompts)
    requests, segments = (table.numpy() for table in plan[:2])
    n, H, P = batch.x.shape
    parts = (part.flatten(1) for part in (batch.x, batch.B, batch.C))
    xBC, y = torch.cat(list(parts), 1).numpy(), torch.empty(n, H * P)
    dt, A, D, state = (part.numpy() for part in (batch.dt, batch.A, batch.D, batch.state))
    dt = np.ascontiguousarray(dt)
    given = (xBC, dt, np.exp(dt * A), D, state, requests, segments, y.numpy())
    for task in range(len(requests) * H)[::step]:
        scan_head(task, *given)
    return y.view(n, H, P)


LONG = (Prompt(0, 150, 3, ((64, 7), (70, 1), (128, 2), (150, 3))), Prompt(150, 64, -1, ((64, 0),)))


@pytest.mark.parametrize("prompts", [PROMPTS, LONG], ids=["short", "long"])
@pytest.mark.parametrize("sizes", [(4, 6, 2, 5), (2, 16, 1, 32), (3, 1, 3, 8)])
@pytest.mark.parametrize("largest_step", [0.3, 40.0], ids=["slow", "forgets-at-once"])
def test_fused_prompts_equal_the_recurrence(prompts, sizes, largest_step: float) -> None:
    batch = make_batch(sizes, prompts, largest_step=largest_step)
    wanted = ssd_naive.scan_prompts(*batch[1:], batch.prompts)
    assert relative_error(scanned(batch), wanted.y) < 2e-6
    assert relative_error(batch.state, wanted.state) < 2e-6


def test_who_comes_first_and_the_rest_of_the_batch_change_no_bit() -> None:
    one, other, alone = (make_batch((4, 6, 2, 5), LONG) for _ in range(3))
    y = scanned(one)
    assert torch.equal(scanned(other, step=-1), y)
    assert torch.equal(one.state, other.state)
    first = alone._replace(prompts=LONG[:1])
    parts = {name: getattr(first, name)[:150] for name in ("x", "dt", "B", "C")}
    assert torch.equal(scanned(first._replace(**parts)), y[:150])
    assert torch.equal(alone.state[3], one.state[3])


def test_chunks_pad_little() -> None:
    assert [even_chunk(n) for n in (1, 63, 64, 65, 129, 640)] == [1, 63, 64, 33, 43, 64]


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("with_bias", [True, False])
def test_convolved_prompts_equal_a_loop(width: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    xbc, weight, history, bias = (
        torch.randn(*shape, generator=generator)
        for shape in ((47, 6), (width, 6), (SLOTS, width - 1, 6), (6,))
    )
    taps = (weight, bias if with_bias else None)
    wanted = conv_naive.conv_prompts(xbc, *taps, history.clone(), PROMPTS)
    for prompt in PROMPTS:
        own = slice(prompt.first, prompt.first + prompt.length)
        before = history[prompt.source] if prompt.source >= 0 else torch.zeros_like(history[0])
        out = causal_conv(xbc[None, own], weight.t(), taps[1], before[None])[0]
        torch.testing.assert_close(out.double(), wanted.out[own], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [2, 4])
def test_fused_convolved_prompts_equal_a_loop(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    xbc, weight, history, bias = (
        torch.randn(*shape, generator=generator)
        for shape in ((47, 6), (width, 6), (SLOTS, width - 1, 6), (6,))
    )
    wanted = conv_naive.conv_prompts(xbc, weight, bias, history, PROMPTS)
    plan, out = prefill_plan(PROMPTS), torch.empty(47, 6)
    requests, segments = (table.numpy() for table in plan[:2])
    conv = torch.cat([weight, bias[None]]).numpy()
    tokens = tokens_of(requests, segments)
    for t in range(47):
        convolve_token(t, xbc.numpy(), 0, conv, history.numpy(), tokens, out.numpy())
    torch.testing.assert_close(out.double(), wanted.out, rtol=1e-5, atol=1e-6)
    for request in range(len(requests)):
        save_history(request, xbc.numpy(), 0, history.numpy(), requests, segments)
    assert torch.equal(history, wanted.history)


def test_segments_end_where_states_are_saved_and_long_prompts_come_first() -> None:
    prompts = (Prompt(0, 2, 7, ((2, 4),)), Prompt(2, 9, -1, ((0, 1), (4, 2), (4, 3))))
    plan = prefill_plan(prompts, block=4)
    assert plan.requests.tolist() == [[0, 4, -1], [4, 5, 7]]
    assert plan.segments.tolist() == [[2, 2, 1], [2, 6, 2], [6, 6, 3], [6, 11, -1], [0, 2, 4]]
    assert plan.blocks.tolist() == [[0, 2], [0, 6], [0, 10], [1, 0]]
    assert plan.tokens == 11
    assert {table.dtype for table in plan[:3]} == {torch.int32}


@pytest.mark.parametrize(
    "prompts,said",
    [
        pytest.param([Prompt(0, 0, 0, ())], "at least one", id="empty"),
        pytest.param([Prompt(0, 4, 0, ((5, 1),))], "saves after", id="past-the-end"),
        pytest.param([Prompt(0, 4, 0, ((3, 1), (2, 2)))], "increase", id="out-of-order"),
        pytest.param([Prompt(0, 4, 0, ((3, 1), (4, 1)))], "twice", id="one-slot-twice"),
        pytest.param([Prompt(0, 4, 1, ((3, 1), (4, 2)))], "only the last", id="source-too-early"),
        pytest.param(
            [Prompt(0, 4, 1, ((4, 2),)), Prompt(4, 4, 2, ())], "by another", id="anothers-source"
        ),
    ],
)
def test_plans_that_cannot_work_are_refused(prompts: list[Prompt], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        prefill_plan(prompts)
