"""RMSNorm, row by row in float64 (arXiv 1910.07467, equation 4).

out_i = weight_i · x_i / sqrt(mean(x²) + eps)
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [n, size]; weight: [size] -> [n, size] float64."""
    rows = []
    for row in x.double():
        rms = torch.sqrt((row * row).sum() / len(row) + eps)
        rows.append(weight.double() * row / rms)
    return torch.stack(rows)
