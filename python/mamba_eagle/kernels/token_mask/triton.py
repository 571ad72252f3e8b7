"""Masked logits in one pass over the constrained rows; the others are copied with them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import cdiv

BLOCK = 2048


@triton.jit
def _mask_kernel(
    logits,  # [n, V]
    rows,  # [m] int64
    masks,  # [m, W] int32
    out,  # [n, V]
    V,
    W,
    BLOCK: tl.constexpr,
):
    mask_row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < V
    row = tl.load(rows + mask_row)
    words = tl.load(masks + mask_row * W + token // 32, mask=inside, other=0)
    allowed = ((words >> (token % 32)) & 1) != 0
    value = tl.load(logits + row * V + token, mask=inside & allowed, other=float("-inf"))
    tl.store(out + row * V + token, value, mask=inside)


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """As ``TokenOps``': logits [n, V], rows [m] int64, masks [m, W] int32 -> [n, V]."""
    n, vocab = logits.shape
    out = torch.empty_like(logits) if len(rows) == n else logits.clone()
    grid = (len(rows), cdiv(vocab, BLOCK))
    _mask_kernel[grid](logits, rows, masks, out, vocab, masks.shape[1], BLOCK=BLOCK, num_warps=8)
    return out
