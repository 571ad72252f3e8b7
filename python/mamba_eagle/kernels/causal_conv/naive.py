"""Mamba2's depthwise causal convolution and its step sizes, token by token in float64.

    out_t = silu(bias + Σ_k weight_k · x_{t-(K-1)+k})        K taps, the token's own last
    dt_t  = clamp(softplus(raw_t + dt_bias))

(arXiv 2312.00752, section 3.4; arXiv 2405.21060, section 7). What comes before a sequence is
its *history*: the K-1 raw inputs of the tokens before it, oldest first; zeros where there are
none. In a tree, what comes before a node is its path from the root, and the history before that.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.kernels.prefill_plan import Prompt
from mamba_eagle.kernels.tree_verify.naive import root_path


def convolve(window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One token. window, weight: [K, channels], the token's own input last -> [channels]."""
    total = torch.zeros_like(window[0], dtype=torch.float64)
    if bias is not None:
        total += bias
    for tap, value in zip(weight.double(), window.double()):
        total += tap * value
    return total / (1 + torch.exp(-total))  # silu


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor) -> Tensor:
    """A sequence. x: [l, channels]; weight: [K, channels]; history: [K-1, channels].

    Returns: [l, channels] float64.
    """
    K, inputs = weight.shape[0], torch.cat([history, x])
    outputs = [convolve(inputs[t : t + K], weight, bias) for t in range(len(x))]
    return torch.stack(outputs)


def tree_conv(
    x: Tensor, parents: Sequence[int], weight: Tensor, bias: Tensor | None, history: Tensor
) -> Tensor:
    """The nodes of a tree. x: [T, channels]; parents: [T], the root its own; else as above."""
    K, outputs = weight.shape[0], []
    for node in range(len(x)):
        inputs = torch.cat([history, x[root_path(parents, node)]])
        outputs.append(convolve(inputs[-K:], weight, bias))
    return torch.stack(outputs)


class Convolved(NamedTuple):
    out: Tensor  # [n, channels] float64
    history: Tensor  # [slots, K-1, channels], the histories of all state slots afterwards


def conv_prompts(
    xbc: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, prompts: Sequence[Prompt]
) -> Convolved:
    """Prompts that lie one after the other, from and to state slots.

    Args:
        xbc: [n, channels]; weight: [K, channels].
        history: [slots, K-1, channels]; only read.
    """
    K, outputs, saved = weight.shape[0], [], history.clone()
    for prompt in prompts:
        before = torch.zeros_like(history[0])
        if prompt.source >= 0:
            before = history[prompt.source]
        own = xbc[prompt.first : prompt.first + prompt.length]
        outputs.append(causal_conv(own, weight, bias, before))
        inputs = torch.cat([before, own])
        for offset, slot in prompt.saves:  # after this many of the prompt's tokens
            saved[slot] = inputs[offset : offset + K - 1]
    return Convolved(torch.cat(outputs), saved)


def step_sizes(raw: Tensor, bias: Tensor, limit: tuple[float, float]) -> Tensor:
    """dt. raw: [n, H], of in_proj; bias: [H]; limit: smallest and largest -> [n, H] float64."""
    softplus = torch.log1p(torch.exp(raw.double() + bias.double()))
    return softplus.clamp(*limit)
