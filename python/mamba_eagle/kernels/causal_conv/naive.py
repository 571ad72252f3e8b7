"""Depthwise causal convolution of Mamba2, in readable torch.

Sums in float32, rounded once to the dtype of the inputs: every token's x and B pass through here,
and what is lost here is lost in the state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None = None
) -> Tensor:
    """``silu(bias + Σ_k weight[:, k] · x[t - (K-1) + k])`` with zeros, or history, before t = 0.

    Args:
        x: [batch, length, channels].
        weight: [channels, K]; the last column weighs the token itself.
        history: [batch, K-1, channels], the raw inputs before x, oldest first.
    Returns: [batch, length, channels].
    """
    width = weight.shape[1]
    if history is None:
        history = x.new_zeros(x.shape[0], width - 1, x.shape[2])
    padded = torch.cat([history.float(), x.float()], dim=1).transpose(1, 2)
    bias = None if bias is None else bias.float()
    out = F.conv1d(padded, weight[:, None].float(), bias, groups=weight.shape[0])
    return F.silu(out).transpose(1, 2).to(x.dtype)


def causal_conv_windows(windows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same for tokens whose predecessors were gathered: nodes of a tree.

    Args:
        windows: [n, K, channels], each token's K-1 nearest ancestors, oldest first, and itself.
        weight: [K, channels], that is, transposed.
    Returns: [n, channels].
    """
    out = (windows.float() * weight.float()).sum(1)
    return F.silu(out if bias is None else out + bias.float()).to(windows.dtype)
