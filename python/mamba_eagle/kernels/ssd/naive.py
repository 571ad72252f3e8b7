"""The Mamba2 recurrence, token by token in float64 (arXiv 2405.21060, section 3).

Shapes: b sequences, l tokens, H heads of P channels, G groups, N state size. Head h reads B and
C of group ``h // (H/G)``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def recurrence_oracle(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Token by token in float64: ``S = exp(dt A) S + dt x Bᵀ``, ``y = S C + D x``.

    Args: x [l, H, P], dt [l, H] after softplus, A [H], B and C [l, G, N], D [H].
    Returns: y [l, H, P] and the states after each token [l, H, P, N], both float64.
    """
    x, dt, A, B, C, D = (t.double() for t in (x, dt, A, B, C, D))
    heads, groups = x.shape[1], B.shape[1]
    B = B.repeat_interleave(heads // groups, dim=1)
    C = C.repeat_interleave(heads // groups, dim=1)
    state = x.new_zeros(heads, x.shape[2], B.shape[2])
    if initial_state is not None:
        state = initial_state.double().clone()
    outputs, states = [], []
    for t in range(x.shape[0]):
        decay = torch.exp(dt[t] * A)[:, None, None]
        state = decay * state + (dt[t][:, None] * x[t])[:, :, None] * B[t][:, None, :]
        outputs.append(torch.einsum("hpn,hn->hp", state, C[t]) + D[:, None] * x[t])
        states.append(state)
    return torch.stack(outputs), torch.stack(states)
