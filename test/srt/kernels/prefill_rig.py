"""Random prompts of several requests in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensor_checks import Draw
from torch import Tensor

from mamba_eagle.kernels.prefill_plan import Prompt

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
    draw = Draw(0)
    H, P, G, N = sizes
    n = sum(prompt.length for prompt in prompts)
    xbc = draw.normal(n, H * P + 2 * G * N).to(dtype)
    dt = draw.steps(n, H, largest=largest_step)
    x, B, C = xbc.split([H * P, G * N, G * N], dim=1)
    return Batch(
        prompts=prompts,
        x=x.unflatten(1, (H, P)),
        dt=dt.t().contiguous().t(),
        A=draw.decay_rates(H),
        B=B.unflatten(1, (G, N)),
        C=C.unflatten(1, (G, N)),
        D=draw.normal(H),
        state=draw.normal(SLOTS, H, P, N).to(state_dtype),
    )
