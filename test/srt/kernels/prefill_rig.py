"""Random prompts of several requests in one batch, and what their prefill must give, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton_rig import random_rates

from mamba_eagle.kernels.prefill_plan import Prompt
from mamba_eagle.kernels.ssd.naive import recurrence_oracle

SLOTS = 12

# One after the other. Saves before the first token, inside and at the end, one position to two
# slots, over the own source or not at all; prompts of one token, and shorter than a convolution.
PROMPTS = (
    Prompt(0, 21, 3, ((5, 1), (16, 7), (21, 3))),
    Prompt(21, 1, -1, ((1, 0),)),
    Prompt(22, 2, 5, ((0, 6), (1, 8), (2, 9), (2, 5))),
    Prompt(24, 16, 2, ()),
    Prompt(40, 7, -1, ((3, 11),)),
)


class Batch(NamedTuple):
    prompts: Sequence[Prompt]
    x: Tensor  # [n, H, P], a view
    dt: Tensor  # [n, H] float32, tokens side by side, as prefill_conv leaves it
    A: Tensor  # [H]
    B: Tensor  # [n, G, N], a view
    C: Tensor  # [n, G, N], a view
    D: Tensor  # [H]
    state: Tensor  # [slots, H, P, N]


def make_batch(
    sizes: tuple[int, int, int, int],
    prompts: Sequence[Prompt] = PROMPTS,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    largest_step: float = 0.3,
) -> Batch:
    generator = torch.Generator().manual_seed(0)
    H, P, G, N = sizes
    n = sum(prompt.length for prompt in prompts)
    xbc = torch.randn(n, H * P + 2 * G * N, generator=generator).to(dtype)
    dt = torch.rand(n, H, generator=generator) * largest_step
    x, B, C = xbc.split([H * P, G * N, G * N], dim=1)
    return Batch(
        prompts=prompts,
        x=x.unflatten(1, (H, P)),
        dt=dt.t().contiguous().t(),
        A=random_rates(H, generator),
        B=B.unflatten(1, (G, N)),
        C=C.unflatten(1, (G, N)),
        D=torch.randn(H, generator=generator),
        state=torch.randn(SLOTS, H, P, N, generator=generator).to(state_dtype),
    )


class Scanned(NamedTuple):
    y: Tensor  # [n, H, P] float64
    state: Tensor  # [slots, H, P, N] float64


def scanned(batch: Batch) -> Scanned:
    """Token by token; what is not saved to stays as it was."""
    outputs, state = [], batch.state.double()
    for prompt in batch.prompts:
        own = slice(prompt.first, prompt.first + prompt.length)
        before = batch.state[prompt.source].double()
        if prompt.source < 0:
            before = torch.zeros_like(before)
        x, dt, B, C = (part[own] for part in (batch.x, batch.dt, batch.B, batch.C))
        y, after = recurrence_oracle(x, dt, batch.A, B, C, batch.D, before)
        outputs.append(y)
        for offset, slot in prompt.saves:
            state[slot] = torch.cat([before[None], after])[offset]
    return Scanned(torch.cat(outputs), state)


class Convolved(NamedTuple):
    out: Tensor  # [n, channels] float64
    history: Tensor  # [slots, K-1, channels]


def convolved(
    xbc: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, prompts: Sequence[Prompt]
) -> Convolved:
    """Window by window. weight [K, channels]; history [slots, K-1, channels]."""
    K, outputs, after = weight.shape[0], [], history.clone()
    for prompt in prompts:
        past = history[prompt.source] if prompt.source >= 0 else torch.zeros_like(history[0])
        inputs = torch.cat([past, xbc[prompt.first : prompt.first + prompt.length]])
        for offset, slot in prompt.saves:
            after[slot] = inputs[offset : offset + K - 1]
        for token in range(prompt.length):
            total = (inputs[token : token + K].double() * weight.double()).sum(0)
            outputs.append(F.silu(total if bias is None else total + bias.double()))
    return Convolved(torch.stack(outputs), after)
