"""Rotary position encoding in torch."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Channel i < half turns with channel i + half; channels from 2 * half on stay as they are.

    x [n, heads, D]; cos, sin [n, 1, half] float32.
    """
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    first, second = first.float(), second.float()
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*(part.to(x.dtype) for part in turned), rest], dim=-1)
