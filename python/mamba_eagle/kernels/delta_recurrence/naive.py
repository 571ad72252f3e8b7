"""Gated DeltaNet in float32, operation by operation: what exact bits are.

    decay = exp2(g · log2 e)        a = rsqrt(Σ_n k[n]² + ε)        b = rsqrt(Σ_n q[n]² + ε) · N^-½
    w = beta · a                    r = w · (decay · a)
    u[p] = fma(−r, Σ_n S[p, n] · k[n], w · v[p])
    S[p, n] ← fma(decay, S[p, n], u[p] · k[n])
    o[p] = b · Σ_n S[p, n] · q[n]

q and k are as the convolution leaves them, and u is that of the rule over the length of k, so that
a row of a journal (k, u, g) needs no norm. Sums are those of ``recurrence/naive.py``.
``delta_rule/naive.py`` has the same in float64.

Shapes: l tokens, H heads of P values, G heads of queries and keys, N numbers each.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.kernels.recurrence.naive import LOG2_E, fma, sum_of_products


class Recurrence(NamedTuple):
    """What l tokens give, in float32."""

    o: Tensor  # [l, H, P]
    u: Tensor  # [l, H, P], of the journal's rows
    states: Tensor  # [l, H, P, N], after each token


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, eps: float
) -> Recurrence:
    """q, k: [l, G, N]; v: [l, H, P]; g, beta: [l, H]; state: [H, P, N]."""
    q, k, v, g, beta = (part.float() for part in (q, k, v, g, beta))
    each = v.shape[1] // k.shape[1]
    of_q = torch.rsqrt(sum_of_products(q, q) + eps) * q.shape[-1] ** -0.5
    of_k = torch.rsqrt(sum_of_products(k, k) + eps)
    of_q, of_k, q, k = (part.repeat_interleave(each, 1) for part in (of_q, of_k, q, k))
    decays = torch.exp2(g * torch.tensor(LOG2_E, dtype=torch.float32))
    write = beta * of_k
    read = write * (decays * of_k)
    outputs, written, states = [], [], []
    for t in range(len(v)):
        seen = sum_of_products(state, k[t, :, None])
        u = fma(-read[t, :, None], seen, write[t, :, None] * v[t])
        state = fma(decays[t, :, None, None], state, u[:, :, None] * k[t, :, None])
        outputs.append(of_q[t, :, None] * sum_of_products(state, q[t, :, None]))
        written.append(u)
        states.append(state)
    return Recurrence(torch.stack(outputs), torch.stack(written), torch.stack(states))
