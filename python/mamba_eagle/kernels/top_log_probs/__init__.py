"""The k best tokens of each row and their log-probabilities, without a table of all of them."""

from __future__ import annotations

# not ``import torch``: in this package that name belongs to torch.py
from torch import Tensor, empty, int64

from mamba_eagle.kernels import gpu, numba_math
from mamba_eagle.kernels.top_log_probs.cpu import best
from mamba_eagle.kernels.top_log_probs.torch import MAX_TOP, TopTokens
from mamba_eagle.kernels.top_log_probs.torch import top_log_probs as plain_top_log_probs


def top_log_probs(logits: Tensor, k: int) -> TopTokens:
    """Of ``log_softmax(logits)``, in float32. logits: [n, V], any float dtype."""
    if numba_math.usable(logits.device, logits.dtype):
        return top_of(logits.log_softmax(-1), k)
    if k <= MAX_TOP and gpu.usable(logits.device, logits.dtype):
        from mamba_eagle.kernels.top_log_probs import triton  # needs triton

        return triton.top_log_probs(logits, k)
    return plain_top_log_probs(logits, k)


def top_of(log_probs: Tensor, k: int) -> TopTokens:
    """The same of log-probabilities: [n, V] float32."""
    if not numba_math.usable(log_probs.device, log_probs.dtype):
        return top_log_probs(log_probs, k)
    shape = (log_probs.shape[0], k)
    found = TopTokens(empty(shape), empty(shape, dtype=int64))
    best(log_probs.contiguous().numpy(), *(part.numpy() for part in found))
    return found


__all__ = ["MAX_TOP", "TopTokens", "top_log_probs", "top_of"]
