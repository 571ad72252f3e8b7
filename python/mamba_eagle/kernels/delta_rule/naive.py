"""Delta rules, token by token in float64.

For each head, with a state S of V channels by K numbers, a decay of each of the K (or one for all),
a key k that is written, an l that is read first, and a value r:

    S ← S diag(exp g)      u = r − S l      S ← S + u kᵀ      o = S q

Mamba2 (arXiv 2405.21060) is the case l = 0; gated DeltaNet (arXiv 2412.06464) has l = βk and r = βv
with one decay; Kimi's (arXiv 2510.26692) a decay for each channel; GDN-2 gates l and r by channel.

Shapes: n tokens, H heads. ``parents`` [n] names the node above each node; a root is its own parent.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """What tokens feed into a rule."""

    q: Tensor  # [n, H, K]
    k: Tensor  # [n, H, K]
    l: Tensor  # [n, H, K]  # noqa: E741
    r: Tensor  # [n, H, V]
    g: Tensor  # [n, H, K], or [n, H, 1]: log decay, not positive


class Node(NamedTuple):
    """After a token, in float64."""

    o: Tensor  # [H, V]
    u: Tensor  # [H, V]
    state: Tensor  # [H, V, K]


def mamba2(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tokens:
    """x [n, H, V]; dt [n, H]; A [H]; B, C [n, H, K]."""
    return Tokens(C, B, torch.zeros_like(B), dt[..., None] * x, (dt * A)[..., None])


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tokens:
    """q, k [n, H, K]; v [n, H, V]; g [n, H] or [n, H, K]; beta [n, H]."""
    g = g if g.ndim == 3 else g[..., None]
    return Tokens(q, k, beta[..., None] * k, beta[..., None] * v, g)


def gated_delta_2(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor) -> Tokens:
    """q, k, g, b [n, H, K]; v, w [n, H, V]."""
    return Tokens(q, k, b * k, w * v, g)


def step(tokens: Tokens, i: int, state: Tensor) -> Node:
    """Token i after a state [H, V, K]."""
    q, k, l, r, g = (part[i].double() for part in tokens)  # noqa: E741
    decayed = state.double() * g.exp()[:, None, :]
    u = r - torch.einsum("hvk,hk->hv", decayed, l)
    state = decayed + u[:, :, None] * k[:, None, :]
    return Node(torch.einsum("hvk,hk->hv", state, q), u, state)


def chain(tokens: Tokens, state: Tensor) -> list[Node]:
    """One token after the other."""
    found: list[Node] = []
    for i in range(len(tokens.q)):
        found.append(step(tokens, i, found[-1].state if found else state))
    return found


def tree(tokens: Tokens, parents: Sequence[int], state: Tensor) -> list[Node]:
    """Nodes, each after the one above it; parents come before their children."""
    found: list[Node] = []
    for i, parent in enumerate(parents):
        found.append(step(tokens, i, state if parent == i else found[parent].state))
    return found
