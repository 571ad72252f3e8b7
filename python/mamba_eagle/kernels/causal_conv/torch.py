"""Mamba2's depthwise causal convolution in torch.

Sums in float32, rounded once to the dtype of the inputs: every token's x and B pass through here,
and precision lost here is lost in the state.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    history: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """``silu(bias + Σ_k weight[:, k] · x[t - (K-1) + k])`` with zeros, or history, before t = 0.

    Args:
        x: [batch, length, channels].
        weight: [channels, K]; the last column weighs the token itself.
        history: [batch, K-1, channels], the raw inputs before x, oldest first.
        silu: False: without that.
    Returns: [batch, length, channels].
    """
    width = weight.shape[1]
    if history is None:
        history = x.new_zeros(x.shape[0], width - 1, x.shape[2])
    padded = torch.cat([history, x], dim=1).float()
    taps = [padded[:, k : k + x.shape[1]] for k in range(width)]
    return _weighted(taps, weight.t(), bias, silu).to(x.dtype)


def causal_conv_windows(
    windows: Tensor, weight: Tensor, bias: Tensor | None, silu: bool = True
) -> Tensor:
    """The same for tokens whose predecessors were gathered, such as the nodes of a tree.

    Args:
        windows: [n, K, channels]: each token's K-1 nearest ancestors, oldest first, then itself.
        weight: [K, channels], transposed.
    Returns: [n, channels].
    """
    taps = windows.float().unbind(1)
    return _weighted(taps, weight, bias, silu).to(windows.dtype)


def _weighted(taps: Sequence[Tensor], weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Added up one after the other, so that a token of a prompt has the bits of a tree's node.
    taps: K times [..., channels], float32. weight: [K, channels]."""
    out = taps[0] * weight[0].float()
    for tap, own in zip(taps[1:], weight[1:]):
        out = out + tap * own.float()
    out = out if bias is None else out + bias.float()
    return F.silu(out) if silu else out
