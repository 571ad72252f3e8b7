"""Verifying tree nodes on a Mamba2 layer, in torch: the dual form, the fold, snapshots.

b requests, T tree nodes, W rows per request, H heads of P channels, G groups, N state size.
A row holds what one token feeds into the recurrence. The rows of a request are its journal (the
tokens accepted since S0, the state in its state slot, was written) and this step's nodes. ``L`` of
a row or node is the sum of ``dt·A`` along its path from S0.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """The row buffers of b requests in one layer."""

    x: Tensor  # [b, W, H, P] after convolution and SiLU
    B: Tensor  # [b, W, G, N]
    dt: Tensor  # [b, W, H] float32, after softplus
    log_decay: Tensor  # [b, W, H] float32: L


def tree_verify(
    rows: Rows, C: Tensor, log_decay: Tensor, state: Tensor, mask_bias: Tensor
) -> Tensor:
    """Outputs of all nodes at once; nothing is written.

    ``y_i = exp(L_i) S0 C_i + Σ_{j visible to i} exp(L_i - L_j) dt_j (B_j·C_i) x_j``; the skip
    ``D x_i`` is the caller's.

    Args:
        C: [b, T, G, N]; log_decay: [b, T, H], L of the nodes; state: [b, H, P, N], S0.
        mask_bias: [b, T, W], 0 where row j is in the journal or on node i's path, -inf elsewhere.
            Added before ``exp``: L_i - L_j of an unrelated row may be large and positive.
    Returns: [b, T, H, P] float32.
    """
    b, T, G, N = C.shape
    H, P = rows.x.shape[2:]
    C = C.float().transpose(1, 2)  # [b, G, T, N]
    scores = C @ rows.B.float().permute(0, 2, 3, 1)  # [b, G, T, W]
    L = log_decay.transpose(1, 2)  # [b, H, T]
    gap = L[..., None] - rows.log_decay.transpose(1, 2)[:, :, None, :] + mask_bias[:, None]
    weights = gap.exp_().mul_(rows.dt.transpose(1, 2)[:, :, None, :])  # [b, H, T, W]
    weights.view(b, G, H // G, T, -1).mul_(scores[:, :, None])
    from_rows = weights @ rows.x.float().transpose(1, 2)  # [b, H, T, P]
    # one product for the heads of a group, which share C
    from_state = (C @ state.float().reshape(b, G, -1, N).transpose(2, 3)).view(b, G, T, H // G, P)
    from_state = from_state.transpose(2, 3).reshape(b, H, T, P)
    return torch.addcmul(from_rows, L.exp()[..., None], from_state).transpose(1, 2)


def fold(rows: Rows, in_journal: Tensor, journal_decay: Tensor, state: Tensor) -> Tensor:
    """The state after the journal: ``exp(L) S0 + Σ_journal exp(L - L_j) dt_j x_j B_jᵀ``.

    Args:
        in_journal: [b, W] bool; journal_decay: [b, H], L of the journal's last token (0 if empty).
        state: [b, H, P, N], S0.
    Returns: [b, H, P, N] float32.
    """
    b, H, P, N = state.shape
    G = rows.B.shape[2]
    gap = (journal_decay[:, None] - rows.log_decay).masked_fill(
        ~in_journal[..., None], float("-inf")
    )
    weights = gap.exp() * rows.dt  # [b, W, H]
    x = (rows.x.float() * weights[..., None]).view(b, -1, G, H // G * P)
    added = x.permute(0, 2, 3, 1) @ rows.B.float().transpose(1, 2)  # [b, G, H/G*P, N]
    return journal_decay.exp()[..., None, None] * state.float() + added.view(b, H, P, N)


def snapshot_verify(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, parents: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence node by node: each starts from its parent's state and keeps its own.

    Args:
        x: [b, T, H, P]; dt: [b, T, H] after softplus; A: [H]; B, C: [b, T, G, N];
        state: [b, H, P, N], where the root starts; parents: [b, T], below the node's own index.
    Returns: y [b, T, H, P] float32 without the skip, states [b, T, H, P, N] float32.
    """
    b, T, H, P = x.shape
    heads_per_group = H // B.shape[2]
    states = state.new_empty(b, T, *state.shape[1:], dtype=torch.float32)
    decay = (dt * A).exp()[..., None, None]  # [b, T, H, 1, 1]
    dtx = (x.float() * dt[..., None])[..., None]  # [b, T, H, P, 1]
    B = B.float().repeat_interleave(heads_per_group, 2)[..., None, :]  # [b, T, H, 1, N]
    C = C.float().repeat_interleave(heads_per_group, 2)[..., None]  # [b, T, H, N, 1]
    batch = torch.arange(b, device=x.device)
    for node in range(T):
        before = state.float() if node == 0 else states[batch, parents[:, node]]
        states[:, node] = decay[:, node] * before + dtx[:, node] * B[:, node]
    return (states @ C)[..., 0], states
