"""Prompts of several requests in one batch, in torch: the plan, the scan, the convolution."""

from __future__ import annotations

import pytest
import torch
from prefill_rig import PROMPTS, SLOTS, make_batch
from tensor_checks import relative_error

from mamba_eagle.kernels.causal_conv import naive as conv_naive
from mamba_eagle.kernels.causal_conv.torch import conv_prompts
from mamba_eagle.kernels.prefill_plan import Prompt, prefill_plan
from mamba_eagle.kernels.ssd import naive as ssd_naive
from mamba_eagle.kernels.ssd.torch import scan_prompts

torch.set_num_threads(1)


@pytest.mark.parametrize("chunk", [4, 64])
def test_prompts_equal_the_recurrence_from_and_to_their_states(chunk: int) -> None:
    batch = make_batch((4, 6, 2, 5))
    wanted = ssd_naive.scan_prompts(*batch[1:], batch.prompts)
    y = scan_prompts(*batch[1:], batch.prompts, chunk)
    assert relative_error(y, wanted.y) < 2e-6
    assert relative_error(batch.state, wanted.state) < 2e-6


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("with_bias", [True, False])
def test_convolved_prompts_equal_a_loop(width: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    xbc, weight, history, bias = (
        torch.randn(*shape, generator=generator)
        for shape in ((47, 6), (width, 6), (SLOTS, width - 1, 6), (6,))
    )
    taps = (weight, bias if with_bias else None)
    wanted = conv_naive.conv_prompts(xbc, *taps, history, PROMPTS)
    out = conv_prompts(xbc, *taps, history, PROMPTS)
    torch.testing.assert_close(out.double(), wanted.out, rtol=1e-5, atol=1e-6)
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
