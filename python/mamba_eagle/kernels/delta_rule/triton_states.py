"""States of delta rules along prompts, from chunk to chunk, on a GPU.

A chunk's tokens i write values v_i under keys k_i; their decays' sum from its beginning is g_i. In
the chunked WY form (arXiv 2412.06464) u and w are made of the chunk alone, and with S, the state it
begins with,

    v_i = u_i - S w_i,    S' = exp2(g_last) S + sum_i exp2(g_last - g_i) v_i k_i^T.

A program carries some rows of one head's state through all chunks of a request, so that what is
saved between them costs no launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.triton_math import exact_dot

CHUNK = 64  # tokens
ROWS = 32  # of a state, per program


@triton.jit
def _states_kernel(
    k,  # [n, G, N]
    w,  # [n, H, N]
    u,  # [n, H, P]
    g,  # [n, H] float32
    state,  # [b, H, P, N] float32
    starts,  # [chunks + 1] int32, the first token of each chunk
    ends,  # [chunks] int32, the sequence that the chunk ends; -1: none
    chunks,  # [b + 1] int32, the first chunk of each request
    firsts,  # [chunks, H, P, N]
    values,  # [n, H, P]
    lasts,  # [sequences, H, P, N] float32
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    request, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, place = tl.arange(0, N), tl.arange(0, CHUNK)
    own = head * P * N + row[None, :] * N + column[:, None]
    s = tl.load(state + request * H * P * N + own)  # [N, ROWS]
    for chunk in tl.range(tl.load(chunks + request), tl.load(chunks + request + 1)):
        begin, end = tl.load(starts + chunk), tl.load(starts + chunk + 1)
        token = begin + place
        inside = (token < end)[:, None]
        of_head = (token.to(tl.int64) * H + head)[:, None]
        at = tl.zeros([], tl.int64) + chunk
        tl.store(firsts + at * H * P * N + own, s.to(firsts.dtype.element_ty))
        t = tl.load(w + of_head * N + column[None, :], mask=inside, other=0.0)
        v = tl.load(u + of_head * P + row[None, :], mask=inside, other=0.0).to(tl.float32)
        v = exact_dot(-t, s.to(t.dtype), v, "tf32")
        tl.store(values + of_head * P + row[None, :], v.to(values.dtype.element_ty), mask=inside)
        last = tl.load(g + (end - 1).to(tl.int64) * H + head)
        decay = tl.exp2(last - tl.load(g + of_head, mask=inside, other=0.0))
        v = tl.where(inside, v * decay, 0.0)
        at = (token.to(tl.int64) * G + head // (H // G))[None, :] * N + column[:, None]
        key = tl.load(k + at, mask=(token < end)[None, :], other=0.0)
        s = exact_dot(key, v.to(key.dtype), s * tl.exp2(last), "tf32")
        sequence = tl.load(ends + chunk)
        if sequence >= 0:
            tl.store(lasts + sequence.to(tl.int64) * H * P * N + own, s)


def states(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor,
    state: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    sequences: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk through the chunks of each request.

    Args:
        k: [n, G, N], w: [n, H, N], u: [n, H, P], contiguous; N a power of two, P a multiple of 16.
        g: [n, H] float32, base 2.
        state: [b, H, P, N] float32, which the requests begin with.
        where: starts, ends and chunks, as the kernel reads them.
    Returns: the states that chunks begin with [chunks, H, P, N] and the values that tokens write
        [n, H, P], both of u's dtype; those at the sequences' ends [sequences, H, P, N] float32.
    """
    (_, G, N), (_, H, P), device = k.shape, u.shape, u.device
    firsts = torch.empty(len(where[1]), H, P, N, dtype=u.dtype, device=device)
    lasts = torch.empty(sequences, H, P, N, dtype=torch.float32, device=device)
    values, rows = torch.empty_like(u), min(ROWS, P & -P)
    _states_kernel[(P // rows, len(state), H)](
        *(k, w, u, g, state, *where, firsts, values, lasts),
        H=H,
        G=G,
        P=P,
        N=N,
        CHUNK=CHUNK,
        ROWS=rows,
        num_warps=4,
    )
    return firsts, values, lasts
