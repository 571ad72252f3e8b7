"""Attention whose bits do not depend on how a token is served: the definition, row by row.

A query at position p sees the keys at positions 0 … p of its own path. They are taken in *blocks*
of 64 positions and these in *parts*, both at fixed positions, so neither depends on the number of
queries, on where a prompt is cut, or on what else is computed. In a block:

    s_j = q·k_j                                      (16 channels at a time, in order)
    m'  = max(m, rn(max_j s_j · scale · log2 e))     (rn: rounded to float32)
    a   = exp2(m - m')
    w_j = rn16(exp2(s_j · scale · log2 e - m'))      (one fused multiply-add; rn16: as values are)
    l   = l a + Σ_j w_j,    acc = acc a + Σ_j w_j v_j    (16 positions at a time, in order)

A part begins with an empty sum, m = LOWEST, and parts are joined in order by the same rule:

    M' = max(M, m),  A = exp2(M - M'),  B = exp2(m - M')
    L = L A + rn(l B),  ACC = ACC A + rn(acc B)    (fused, but for what is rounded)

so that a block or part in which a row sees nothing leaves its sums as they are. In the end,
out = ACC / L. What this file computes in Python differs from a GPU by rounding: tensor cores add 16
products at once, and truncate the sum.
"""

import math

import torch
from torch import Tensor

BLOCK = 64
SHORT = 256  # positions of a part, up to position 16 * SHORT
LOWEST = -1e30  # below all scores; unlike -inf it can be subtracted from itself


def parts(length: int) -> list[tuple[int, int]]:
    """Where the parts of ``length`` positions begin and end: from position 4096 on, each power of
    two has eight, so that few are to be joined and none is most of the work."""
    found, begin = list[tuple[int, int]](), 0
    while begin < length:
        size = SHORT
        while 16 * size <= begin:
            size *= 2
        found.append((begin, min(begin + size, length)))
        begin += size
    return found


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One query head at the last position. query [D]; keys, values [S, D] -> [D] float32."""
    factor = torch.tensor(scale * math.log2(math.e), dtype=torch.float32)
    M, L, ACC = torch.tensor(LOWEST), torch.tensor(0.0), torch.zeros(len(query))
    for begin, end in parts(len(keys)):
        m, total, acc = torch.tensor(LOWEST), torch.tensor(0.0), torch.zeros(len(query))
        for first in range(begin, end, BLOCK):
            block = slice(first, min(first + BLOCK, end))
            scores = keys[block].float() @ query.float()
            now = torch.maximum(m, scores.max() * factor)
            shrink = torch.exp2(m - now)
            weights = torch.exp2((scores.double() * factor - now).float()).to(values.dtype).float()
            m, total = now, total * shrink + weights.sum()
            acc = acc * shrink + weights @ values[block].float()
        now = torch.maximum(M, m)
        old, new = torch.exp2(M - now), torch.exp2(m - now)
        M, L, ACC = now, L * old + total * new, ACC * old + acc * new
    return ACC / L


def attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """A token at the last position of its path. q [heads, D]; keys, values [S, kv_heads, D], on
    the host -> [heads, D], q's dtype."""
    group = q.shape[0] // keys.shape[1]
    rows = [
        attend(head, keys[:, i // group], values[:, i // group], scale) for i, head in enumerate(q)
    ]
    return torch.stack(rows).to(q.dtype)
