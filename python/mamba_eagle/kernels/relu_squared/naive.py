"""relu(x)², number by number in float64 (Primer, arXiv 2109.08668).

out = max(x, 0)²
"""

import torch
from torch import Tensor


def relu_squared(x: Tensor) -> Tensor:
    """x of any shape -> the same shape, float64."""
    squares = [max(number, 0.0) ** 2 for number in x.flatten().tolist()]
    return torch.tensor(squares, dtype=torch.float64).view(x.shape)
