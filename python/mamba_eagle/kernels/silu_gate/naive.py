"""The gate of an MLP, number by number in float64 (SwiGLU, arXiv 2002.05202).

out_i = silu(gate_i) up_i
"""

import math

import torch
from torch import Tensor


def silu_and_mul(both: Tensor) -> Tensor:
    """both [n, 2 * size], gates and what they let through -> [n, size] float64."""
    size = both.shape[1] // 2
    rows = [
        [gate / (1.0 + math.exp(-gate)) * up for gate, up in zip(row[:size], row[size:])]
        for row in both.tolist()
    ]
    return torch.tensor(rows, dtype=torch.float64)
