"""The recurrence in float32, operation by operation: what exact bits are.

    decay = exp2(dt · (A · log2 e))
    S[p, n] ← fma(decay, S[p, n], (dt · x[p]) · B[n])
    y[p] = fma(D, x[p], Σ_n S[p, n] · C[n])

The sum: chains of 8 consecutive n, each a product and then fused multiply-adds; chains that are 8
apart one after the other; what is left in halves. ``ssd/naive.py`` has the same in float64.

Shapes: l tokens, H heads of P channels, G groups, N state size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
CHAIN = 8
ACROSS = 8


class Recurrence(NamedTuple):
    """What l tokens give, in float32."""

    y: Tensor  # [l, H, P]
    states: Tensor  # [l, H, P, N], after each token


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a·b + c, rounded once; float64 in between rounds twice in one of some 2**29 cases."""
    return (a.double() * b.double() + c.double()).float()


def sum_of_products(S: Tensor, C: Tensor) -> Tensor:
    """Σ_n S[..., n] · C[..., n] in the order above: -> [...]."""
    S, C = torch.broadcast_tensors(S, C)
    S, C = (part.unflatten(-1, (-1, CHAIN)) for part in (S, C))
    chains = S[..., 0] * C[..., 0]  # [..., N / 8]
    for i in range(1, CHAIN):
        chains = fma(S[..., i], C[..., i], chains)
    across = chains[..., :ACROSS]
    for i in range(ACROSS, chains.shape[-1], ACROSS):
        across = across + chains[..., i : i + ACROSS]
    while across.shape[-1] > 1:
        low, high = across.chunk(2, -1)
        across = low + high
    return across[..., 0]


def recurrence(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> Recurrence:
    """x: [l, H, P]; dt: [l, H], after softplus; A, D: [H]; B, C: [l, G, N]; state: [H, P, N]."""
    x, dt, A, B, C, D = (part.float() for part in (x, dt, A, B, C, D))
    heads_per_group = x.shape[1] // B.shape[1]
    B, C = (part.repeat_interleave(heads_per_group, 1)[:, :, None] for part in (B, C))
    rate = A * torch.tensor(LOG2_E, dtype=torch.float32)
    outputs, states = [], []
    for t in range(len(x)):
        decay = torch.exp2(dt[t] * rate)[:, None, None]
        state = fma(decay, state, (dt[t, :, None] * x[t])[:, :, None] * B[t])
        outputs.append(fma(D[:, None], x[t], sum_of_products(state, C[t])))
        states.append(state)
    return Recurrence(torch.stack(outputs), torch.stack(states))
