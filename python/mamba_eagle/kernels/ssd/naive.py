"""The Mamba2 recurrence, token by token in float64 (arXiv 2405.21060).

For each head, with a state S of P channels by N numbers:

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_tᵀ
    y_t = S_t C_t + D x_t

Shapes: l tokens, H heads of P channels, G groups, N state size. Head h reads B and C of group
``h // (H/G)``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.kernels.prefill_plan import Prompt


class Recurrence(NamedTuple):
    """What l tokens give, in float64."""

    y: Tensor  # [l, H, P]
    states: Tensor  # [l, H, P, N], after each token


def recurrence_oracle(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_state: Tensor | None = None,
) -> Recurrence:
    """The recurrence over one sequence.

    Args:
        x: [l, H, P]; dt: [l, H], after softplus; A, D: [H]; B, C: [l, G, N]; any float dtype.
        initial_state: [H, P, N]; None: zeros.
    """
    x, dt, A, B, C, D = (t.double() for t in (x, dt, A, B, C, D))
    heads, groups = x.shape[1], B.shape[1]
    B = B.repeat_interleave(heads // groups, dim=1)  # [l, H, N]
    C = C.repeat_interleave(heads // groups, dim=1)
    state = x.new_zeros(heads, x.shape[2], B.shape[2])  # [H, P, N]
    if initial_state is not None:
        state = initial_state.double().clone()
    outputs, states = [], []
    for t in range(x.shape[0]):
        decay = torch.exp(dt[t] * A)[:, None, None]
        state = decay * state + (dt[t][:, None] * x[t])[:, :, None] * B[t][:, None, :]
        outputs.append(torch.einsum("hpn,hn->hp", state, C[t]) + D[:, None] * x[t])
        states.append(state)
    return Recurrence(torch.stack(outputs), torch.stack(states))


class Scanned(NamedTuple):
    """What a batch of prompts gives, in float64."""

    y: Tensor  # [n, H, P]
    state: Tensor  # [slots, H, P, N], all state slots afterwards


def scan_prompts(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    prompts: Sequence[Prompt],
) -> Scanned:
    """The recurrence over prompts that lie one after the other, from and to state slots.

    Args:
        x: [n, H, P]; dt: [n, H], after softplus; A, D: [H]; B, C: [n, G, N].
        state: [slots, H, P, N]; only read: slots that no prompt saves to come back unchanged.
    """
    outputs, saved = [], state.double().clone()
    for prompt in prompts:
        tokens = slice(prompt.first, prompt.first + prompt.length)
        before = torch.zeros_like(saved[0])
        if prompt.source >= 0:
            before = state[prompt.source].double()
        own = (part[tokens] for part in (x, dt, B, C))
        own_x, own_dt, own_B, own_C = own
        y, after = recurrence_oracle(own_x, own_dt, A, own_B, own_C, D, before)
        outputs.append(y)
        for offset, slot in prompt.saves:  # after this many of the prompt's tokens
            saved[slot] = after[offset - 1] if offset else before
    return Scanned(torch.cat(outputs), saved)
