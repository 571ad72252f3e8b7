"""Attention of tree nodes, of drafted blocks and of prompt chunks over gathered keys and values, in
torch."""

import torch
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


def sink_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor
) -> Tensor:
    """``masked_attention`` with one more logit per query head, of a key without a value.

    Args: mask [b, T, S] bool; sinks [heads].
    """
    b, T, heads, D = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    grouped = q.view(b, T, kv_heads, group, D).permute(0, 2, 3, 1, 4)  # [b, kv, group, T, D]
    scores = grouped.float() @ k.float().permute(0, 2, 3, 1)[:, :, None] * scale
    scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    rest = sinks.float().view(1, kv_heads, group, 1, 1).expand(b, -1, -1, T, -1)
    weights = torch.cat([scores, rest], dim=-1).softmax(-1)[..., :-1]
    out = weights @ v.float().transpose(1, 2)[:, :, None]  # [b, kv, group, T, D]
    return out.permute(0, 3, 1, 2, 4).reshape(b, T, heads, D).to(q.dtype)


def pack_paths(ancestors: Tensor) -> Tensor:
    """Which of E nodes each of T sees, as bits: [b, T, E] bool -> [b, T, ceil(E / 64)] int64; node
    e is bit e % 64 of word e // 64."""
    words = []
    for part in ancestors.split(64, dim=2):
        bits = torch.arange(part.shape[2], device=part.device)
        words.append((part.long() << bits).sum(2))
    return torch.stack(words, dim=2)
