"""Attention of tree nodes and of prompt chunks over gathered keys and values, in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax attention in which ``mask`` says which keys a query sees.

    Args: q [b, T, heads, D]; k, v [b, S, kv_heads, D]; mask [b, T, S]: bool, or additive and of q's
        dtype.
    Returns: [b, T, heads, D]. Query head h reads key head ``h // (heads / kv_heads)``.
    """
    b, T, heads, D = q.shape
    kv_heads = k.shape[2]
    if T * heads <= 64 and mask.is_floating_point() and q.dtype == k.dtype and heads != kv_heads:
        # few queries: one small product for all query heads that share a key head
        group = heads // kv_heads
        grouped = q.view(b, T, kv_heads, group, D).permute(0, 2, 3, 1, 4)  # [b, kv, g, T, D]
        scores = grouped.reshape(b, kv_heads, group * T, D) @ k.permute(0, 2, 3, 1)
        scores = scores.view(b, kv_heads, group, T, -1).mul_(scale).add_(mask[:, None, None])
        weights = scores.softmax(-1).view(b, kv_heads, group * T, -1)
        out = (weights @ v.transpose(1, 2)).view(b, kv_heads, group, T, D)
        return out.permute(0, 3, 1, 2, 4).reshape(b, T, heads, D)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask[:, None],
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return out.transpose(1, 2)
