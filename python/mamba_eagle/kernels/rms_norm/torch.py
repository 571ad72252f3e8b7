"""RMSNorm in torch; sums in float32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight · x / rms(x)`` over the last dimension. x [..., size], weight [size]."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
