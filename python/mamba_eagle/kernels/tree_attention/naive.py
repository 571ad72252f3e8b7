"""Attention of tree nodes: each query head of each node on its own, in float64.

A node sees its request's prefix and its own path from the root, and nothing else:

    out = Σ_j softmax_j(scale · q·k_j) v_j

(arXiv 1706.03762, section 3.2.1; with trees: SpecInfer, arXiv 2305.09781). Query heads share key
heads in groups: query head h reads key head ``h // (heads / kv_heads)`` (arXiv 2305.13245).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_eagle.kernels.tree_verify.naive import root_path


def attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One query head. query: [D]; keys, values: [S, D] -> [D] float64."""
    scores = scale * (keys.double() @ query.double())  # [S]
    weights = torch.exp(scores - scores.max())
    return (weights / weights.sum()) @ values.double()


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """T queries over S keys, of which query i sees those where ``visible[i]`` is true.

    Args: q [T, heads, D]; k, v [S, kv_heads, D]; visible [T, S] bool.
    Returns: [T, heads, D] float64.
    """
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i, head in ((i, head) for i in range(q.shape[0]) for head in range(q.shape[1])):
        keys, values = (part[visible[i], head // group] for part in (k, v))
        out[i, head] = attention(q[i, head], keys, values, scale)
    return out


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    parents: Sequence[int],
    scale: float,
) -> Tensor:
    """The nodes of one request's tree, or forest.

    Args:
        q: [T, heads, D]; k, v: [T, kv_heads, D], of the nodes.
        prefix_k, prefix_v: [S, kv_heads, D], of the tokens before them.
        parents: [T]; a root is its own parent.
    Returns: [T, heads, D] float64.
    """
    T, S = len(q), len(prefix_k)
    visible = torch.zeros(T, S + T, dtype=torch.bool, device=q.device)
    visible[:, :S] = True
    for node in range(T):
        visible[node, [S + above for above in root_path(parents, node)]] = True
    return masked_attention(q, torch.cat([prefix_k, k]), torch.cat([prefix_v, v]), visible, scale)
