"""A sigmoid gate, number by number in float64.

out_i = y_i / (1 + exp(-gate_i))
"""

import math

import torch
from torch import Tensor


def gate_by_sigmoid(y: Tensor, gate: Tensor) -> Tensor:
    """y [n, heads, D], gate [n, heads, D]; or y [n, D], gate [n, 1] -> y's shape, float64."""
    pairs = zip(y.flatten().tolist(), gate.expand(y.shape).flatten().tolist())
    found = [value / (1.0 + math.exp(-by)) for value, by in pairs]
    return torch.tensor(found, dtype=torch.float64).view(y.shape)
