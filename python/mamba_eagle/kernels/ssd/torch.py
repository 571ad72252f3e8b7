"""The Mamba2 recurrence as a chunked scan in torch.

Shapes: b sequences, l tokens, H heads of P channels, G groups, N state size. Head h reads B and
C of group ``h // (H/G)``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Tokens per chunk, where results are all that counts: a chunk of q tokens takes q² numbers per head
# in several passes over memory. The chunk in a checkpoint's config suits the GPU that trained it.
CHUNK = 64


def even_chunk(length: int) -> int:
    """CHUNK at most, and such that chunks of that size pad ``length`` tokens by few."""
    return -(-length // -(-length // CHUNK))


class ScanResult(NamedTuple):
    y: Tensor  # [b, l, H, P], dtype of x
    final_state: Tensor  # [b, H, P, N], float32
    boundary_states: Tensor  # [b, chunks + 1, H, P, N]: before chunk 0, 1, …, and after the last


def ssd_chunked(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    chunk: int,
    initial_state: Tensor | None = None,
) -> ScanResult:
    """The chunked scan (arXiv 2405.21060, section 6); differentiable, sums in float32.

    Within a chunk the dual form, ``y_i += Σ_{j<=i} exp(L_i - L_j) dt_j (C_i·B_j) x_j`` with L the
    running sum of dt·A; from chunk to chunk the state is carried.

    Args:
        x: [b, l, H, P]; dt: [b, l, H] after softplus, float32; A, D: [H];
        B, C: [b, l, G, N]; initial_state: [b, H, P, N] or None for zeros.
    """
    b, length, heads, _ = x.shape
    groups = B.shape[2]
    pad = -length % chunk  # padding has dt = 0: it neither decays the state nor adds to it
    xf, Bf, Cf = (
        torch.nn.functional.pad(t.float(), (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, chunk))
        for t in (x, B, C)
    )
    dtf = torch.nn.functional.pad(dt.float(), (0, 0, 0, pad)).unflatten(1, (-1, chunk))

    # [b, c, H, q]: running log decay in each chunk
    log_decay = (dtf * A.float()).cumsum(2).transpose(2, 3)
    dtx = (dtf[..., None] * xf).permute(0, 1, 3, 2, 4)  # [b, c, H, q, P]

    # within chunks; masked before exp, since above the diagonal the difference is unbounded
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    gap = log_decay[..., :, None] - log_decay[..., None, :]
    decay = gap.masked_fill(~causal, float("-inf")).exp()  # [b, c, H, i, j]
    scores = torch.einsum("bcign,bcjgn->bcgij", Cf, Bf)
    weights = scores.repeat_interleave(heads // groups, dim=2) * decay
    y = weights @ dtx  # [b, c, H, q, P]

    # what each chunk adds to the state, and the carry between chunks
    Bh = Bf.transpose(2, 3).repeat_interleave(heads // groups, dim=2)  # [b, c, H, q, N]
    to_end = (log_decay[..., -1:] - log_decay).exp()
    added = (dtx * to_end[..., None]).transpose(-1, -2) @ Bh  # [b, c, H, P, N]
    through = log_decay[..., -1].exp()  # [b, c, H]
    state = torch.zeros_like(added[:, 0]) if initial_state is None else initial_state.float()
    states = [state]
    for c in range(added.shape[1]):
        state = through[:, c, :, None, None] * state + added[:, c]
        states.append(state)
    boundary = torch.stack(states, dim=1)

    Ch = Cf.transpose(2, 3).repeat_interleave(heads // groups, dim=2)  # [b, c, H, q, N]
    y = y + (Ch @ boundary[:, :-1].transpose(-1, -2)) * log_decay.exp()[..., None]
    y = y.transpose(2, 3).flatten(1, 2)[:, :length] + D.float()[:, None] * x.float()
    return ScanResult(y.to(x.dtype), state, boundary)
