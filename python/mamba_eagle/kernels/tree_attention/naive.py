"""Attention of tree nodes and of drafted blocks: each query head on its own, in float64.

A node sees its request's prefix and its own path from the root, and nothing else:

    out = Σ_j softmax_j(scale · q·k_j) v_j

(arXiv 1706.03762, section 3.2.1; with trees: SpecInfer, arXiv 2305.09781). Query heads share key
heads in groups: query head h reads key head ``h // (heads / kv_heads)`` (arXiv 2305.13245).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_eagle.kernels.tree_verify.naive import root_path


def attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, sink: float | None = None
) -> Tensor:
    """One query head. query: [D]; keys, values: [S, D] -> [D] float64.

    sink: one more logit, of a key without a value.
    """
    scores = scale * (keys.double() @ query.double())  # [S]
    largest = float(scores.max()) if sink is None else max(float(scores.max()), sink)
    weights = torch.exp(scores - largest)
    rest = 0.0 if sink is None else math.exp(sink - largest)
    return (weights / (weights.sum() + rest)) @ values.double()


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    sinks: Sequence[float] | None = None,
) -> Tensor:
    """T queries over S keys, of which query i sees those where ``visible[i]`` is true.

    Args: q [T, heads, D]; k, v [S, kv_heads, D]; visible [T, S] bool; sinks: [heads].
    Returns: [T, heads, D] float64.
    """
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i, head in ((i, head) for i in range(q.shape[0]) for head in range(q.shape[1])):
        keys, values = (part[visible[i], head // group] for part in (k, v))
        sink = None if sinks is None else sinks[head]
        out[i, head] = attention(q[i, head], keys, values, scale, sink)
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


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    window: int,
    causal: bool,
    scale: float,
    sinks: Sequence[float] | None = None,
) -> Tensor:
    """The rows of one request's block. Row i stands at position S + i. It sees the prefix and the
    rows (causal: those up to itself), of both what is less than ``window`` away (0: all of it).

    Args:
        q: [T, heads, D]; k, v: [T, kv_heads, D], of the rows.
        prefix_k, prefix_v: [S, kv_heads, D], of the tokens before them.
        sinks: [heads], logits of keys without values.
    Returns: [T, heads, D] float64.
    """
    T, S = len(q), len(prefix_k)
    visible = torch.zeros(T, S + T, dtype=torch.bool, device=q.device)
    for row in range(T):
        for other in range(S + T):
            ahead = other - (S + row)
            in_window = not window or abs(ahead) < window
            visible[row, other] = in_window and (other < S or not causal or ahead <= 0)
    keys, values = torch.cat([prefix_k, k]), torch.cat([prefix_v, v])
    return masked_attention(q, keys, values, visible, scale, sinks)
