"""Delta rules in torch: whole trees from one state by the dual form, folds, and prompts by chunks.

The rule is that of ``naive.py``. Along a path from a state S0, with G the sum of g on it, ``j ≺ i``
if j is above i, and ``E_ij = exp(G_i − G_j)`` per channel:

    u_i = r_i − S0 (exp(G_i) ∘ l_i) − Σ_{j ≺ i} (l_i · E_ij k_j) u_j
    o_i = S0 (exp(G_i) ∘ q_i) + Σ_{j ⪯ i} (q_i · E_ij k_j) u_j

The first line is a unit lower triangular system, for nodes in an order with parents first; a chain
is the tree whose mask is a triangle, and the same code with one node is plain decoding. u depends
on S0 and a node's ancestors alone, so it stays valid once the node is accepted: the rows of a
journal (k, u, g) are added, and never solved again. A fold is ``S0 ∘ exp(G) + Σ_j u_j (k_j ∘
E_j)ᵀ``.

Shapes: b sequences, T nodes, M rows of a journal, H heads, a state [V, K] for each; all float32. g
has K channels, or one for all of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """What tokens feed into a rule; [b, H, T, ·]."""

    q: Tensor  # K
    k: Tensor  # K
    l: Tensor  # K  # noqa: E741
    r: Tensor  # V
    g: Tensor  # K or 1


class Rows(NamedTuple):
    """Accepted tokens, oldest first; [b, H, M, ·]. Those past a journal's end have k = 0, g = 0."""

    k: Tensor  # K
    u: Tensor  # V
    g: Tensor  # K or 1


class Outputs(NamedTuple):
    o: Tensor  # [b, H, T, V]
    u: Tensor  # [b, H, T, V]


class Scan(NamedTuple):
    o: Tensor  # [b, H, T, V]
    state: Tensor  # [b, H, V, K], after the last token


def tree_verify(rows: Rows, nodes: Tokens, ancestors: Tensor, state: Tensor) -> Outputs:
    """All nodes of trees that stand below journals; nothing is written.

    Args:
        ancestors: [b, T, T] float32: 1 for a node's ancestors and itself, else 0.
        state: [b, H, V, K], S0.
    """
    G_rows = rows.g.double().cumsum(2)
    G = ancestors[:, None].double() @ nodes.g.double()
    if rows.g.shape[2]:
        G = G + G_rows[:, :, -1:]
    seen = ancestors[:, None] > 0
    own = seen & ~torch.eye(seen.shape[-1], dtype=torch.bool, device=seen.device)
    grown = G.float().exp()
    q_and_l = torch.cat([grown * nodes.q, grown * nodes.l], dim=2)
    o, read = (q_and_l @ state.float().transpose(2, 3)).chunk(2, dim=2)  # one read of the state
    r = nodes.r - read - pairs(nodes.l, G, rows.k, G_rows) @ rows.u
    u = torch.linalg.solve_triangular(
        pairs(nodes.l, G, nodes.k, G, own), r, upper=False, unitriangular=True
    )
    o = o + pairs(nodes.q, G, rows.k, G_rows) @ rows.u + pairs(nodes.q, G, nodes.k, G, seen) @ u
    return Outputs(o, u)


def pairs(x: Tensor, G_x: Tensor, y: Tensor, G_y: Tensor, mask: Tensor | None = None) -> Tensor:
    """``Σ_c x_ic exp(G_ic − G_jc) y_jc`` where ``mask`` [b, 1, T, M] has j above i, else 0; None: j
    is above all. x: [b, H, T, K]; y: [b, H, M, K] -> [b, H, T, M].

    The mask comes before ``exp``: the difference to a node on another path may be large. Sums of g
    are float64: where many tokens forget nearly all, the difference of two of them is small.
    """
    if G_x.shape[-1] == 1:
        gap = G_x - G_y.transpose(2, 3)
        if mask is not None:
            gap = gap.masked_fill(~mask, float("-inf"))
        return (x @ y.transpose(2, 3)) * gap.float().exp()
    gap = G_x[:, :, :, None] - G_y[:, :, None]  # [b, H, T, M, K]
    if mask is not None:
        gap = gap.masked_fill(~mask[..., None], float("-inf"))
    return torch.einsum("bhic,bhijc,bhjc->bhij", x, gap.float().exp(), y)


def fold(rows: Rows, state: Tensor) -> Tensor:
    """The state after the journal: [b, H, V, K] -> the same, float32."""
    G = rows.g.double().cumsum(2)
    last = G[:, :, -1:]
    to_end = (last - G).float().exp()
    return state.float() * last.float().exp() + rows.u.transpose(2, 3) @ (rows.k * to_end)


def snapshot_verify(nodes: Tokens, state: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """The rule node by node: each starts from its parent's state and keeps its own.

    Args:
        parents: [b, T], below the node's own index.
    Returns: o [b, H, T, V], states [b, T, H, V, K].
    """
    b, _, T, _ = nodes.q.shape
    states = state.new_empty(b, T, *state.shape[1:], dtype=torch.float32)
    batch = torch.arange(b, device=state.device)
    for node in range(T):
        before = state.float() if node == 0 else states[batch, parents[:, node]]
        q, k, l, r, g = (part[:, :, node] for part in nodes)  # noqa: E741
        decayed = before * g.exp()[:, :, None]
        u = r - (decayed @ l[..., None])[..., 0]
        states[:, node] = decayed + u[..., None] * k[:, :, None]
    return torch.einsum("bthvk,bhtk->bhtv", states, nodes.q), states


def chunked(tokens: Tokens, state: Tensor, chunk: int) -> Scan:
    """Sequences from states; differentiable. Within a chunk the dual form, whose system is solved
    for what S0 adds as well (the WY form, arXiv 2412.06464); from chunk to chunk the state is
    carried. chunk: tokens."""
    length = tokens.q.shape[2]
    pad = -length % chunk  # padding writes nothing, and does not decay
    q, k, l, r, g = (  # noqa: E741, [b, H, chunks, chunk, ·]
        torch.nn.functional.pad(part, (0, 0, 0, pad)).unflatten(2, (-1, chunk)) for part in tokens
    )
    G = g.double().cumsum(3)
    grown = G.float().exp()
    seen = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()

    def within(x: Tensor, mask: Tensor) -> Tensor:
        flat = (part.flatten(0, 1) for part in (x, G, k, G))
        return pairs(*flat, mask[None, None]).unflatten(0, q.shape[:2])

    system = torch.cat([r, grown * l], dim=-1)
    solved = torch.linalg.solve_triangular(
        within(l, seen.tril(-1)), system, upper=False, unitriangular=True
    )
    own, reads = solved.split([r.shape[-1], l.shape[-1]], dim=-1)
    scores, grown_q = within(q, seen), grown * q
    last = G[:, :, :, -1:]
    to_end, through = k * (last - G).float().exp(), last.float().exp()
    outputs, carried = [], state.float()
    for c in range(q.shape[2]):
        u = own[:, :, c] - reads[:, :, c] @ carried.transpose(2, 3)
        outputs.append(grown_q[:, :, c] @ carried.transpose(2, 3) + scores[:, :, c] @ u)
        carried = carried * through[:, :, c] + u.transpose(2, 3) @ to_end[:, :, c]
    return Scan(torch.cat(outputs, dim=2)[:, :, :length], carried)
