"""relu(x)² in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def relu_squared(x: Tensor) -> Tensor:
    """``relu(x)²``, in x's dtype. x of any shape."""
    # no square(): autocast would make it, and what backward keeps, float32
    positive = F.relu(x)
    return positive * positive
