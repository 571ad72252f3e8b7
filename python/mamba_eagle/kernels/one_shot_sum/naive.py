"""The sum of the ranks' parts, in the order of the ranks, rounded once; and with the residual
stream and its RMSNorm, in float64.

    whole  = parts[0] + parts[1] + …
    stream = stream + whole
    normed = weight · stream / sqrt(mean(stream²) + eps)
"""

import torch
from torch import Tensor


def one_shot_sum(parts: Tensor) -> Tensor:
    """parts [ranks, n, size] -> [n, size]."""
    whole = torch.zeros_like(parts[0], dtype=torch.float64)
    for part in parts:
        whole += part.double()
    return whole.to(parts.dtype)


def one_shot_sum_norm(
    stream: Tensor, parts: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """stream [n, size], parts [ranks, n, size], weight [size] -> normed, stream, both [n, size]."""
    whole = stream.double() + one_shot_sum(parts).double()
    mean = (whole * whole).mean(dim=-1, keepdim=True)
    normed = whole / (mean + eps).sqrt() * weight.double()
    return normed.to(stream.dtype), whole.to(stream.dtype)
