"""Attention of prompt chunks: token i of a chunk sees its request's keys 0 … start + i."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_eagle.kernels.tree_attention.naive import masked_attention


def prompt_attention(
    q: Tensor, keys: Tensor, values: Tensor, spans: Sequence[tuple[int, int]], scale: float
) -> Tensor:
    """q [n, heads, D], the chunks concatenated; keys, values [S, kv_heads, D], of all tokens of the
    requests, concatenated; spans: the start and the length of each chunk, the last tokens of its
    request -> [n, heads, D] float64."""
    out, row, first = [], 0, 0
    for start, length in spans:
        query, seen = q[row : row + length], slice(first, first + start + length)
        visible = torch.ones(length, start + length, dtype=torch.bool).tril(start)
        out.append(masked_attention(query, keys[seen], values[seen], visible, scale))
        row, first = row + length, first + start + length
    return torch.cat(out)
