"""Verifying tree nodes on a Mamba2 layer: each node by a plain run over its own path, in float64.

The output of a node is what the recurrence (``ssd/naive.py``) gives for it at the end of

    S0 → journal, oldest first → the node's path from the root

where S0 is the request's saved state and the journal holds the tokens accepted since it was saved.
Deferred verification (rows and folds) must give these outputs without forming the states; snapshot
verification, whose journal is always empty, must give the states as well.

One request: T nodes, H heads of P channels, G groups, N state size. ``parents`` [T] names the node
above each node; a root is its own parent.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.kernels.ssd.naive import recurrence_oracle


class Rows(NamedTuple):
    """What l tokens feed into the recurrence."""

    x: Tensor  # [l, H, P], after convolution and SiLU
    dt: Tensor  # [l, H], after softplus
    B: Tensor  # [l, G, N]


class Verified(NamedTuple):
    """T nodes, in float64."""

    y: Tensor  # [T, H, P], with the skip D x
    states: Tensor  # [T, H, P, N], after each node


def root_path(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root down to ``node``, which is the last of them."""
    path = [node]
    while parents[path[0]] != path[0]:
        path.insert(0, int(parents[path[0]]))
    return path


def tree_verify(
    journal: Rows,
    nodes: Rows,
    C: Tensor,
    parents: Sequence[int],
    A: Tensor,
    D: Tensor,
    state: Tensor,
) -> Verified:
    """All nodes of a tree. C: [T, G, N]; A, D: [H]; state: [H, P, N], S0."""
    outputs, states = [], []
    for node in range(len(C)):
        path = root_path(parents, node)
        x, dt, B = (torch.cat([past, own[path]]) for past, own in zip(journal, nodes))
        C_node = C[node].expand_as(B)  # only the last token's output is looked at
        y, after = recurrence_oracle(x, dt, A, B, C_node, D, state)
        outputs.append(y[-1])
        states.append(after[-1])
    return Verified(torch.stack(outputs), torch.stack(states))


def fold(journal: Rows, A: Tensor, state: Tensor) -> Tensor:
    """The state after the journal, which replaces S0. state: [H, P, N] -> [H, P, N] float64."""
    x, dt, B = journal
    if len(x) == 0:
        return state.double()
    return recurrence_oracle(x, dt, A, B, B, torch.zeros_like(A), state).states[-1]
