"""The fold of delta rules: journals into states, in all layers by one launch."""

import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.delta_rule.rows import (
    DeltaRows,
    decay_sums,
    float32_dot,
    has_channel_decay,
    value_tile,
)
from mamba_eagle.kernels.gpu import next_power_of_2
from mamba_eagle.kernels.state_rounding.triton import round_state
from mamba_eagle.kernels.tree_verify.layout import Folds, Sizes


# not specialized, so that one kernel serves all numbers of requests
@triton.jit(do_not_specialize=["b"])
def _fold_kernel(
    gates,  # [layers, R, W, GATES]
    keys,  # [layers, R, W, G*N]
    u,  # [layers, R, W, H*P]
    state,  # [layers, S, H, P, N]
    slots,  # [b]
    state_slots,  # [b]
    journal,  # [b, M]
    lengths,  # [b]
    wanted,  # [b]; None: all
    round_keys,  # [b]; None: to nearest
    b,
    R,
    W,
    S,
    M,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    JP: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,  # channels of a key
    CHANNELS: tl.constexpr,
    EPS: tl.constexpr,
):
    GATES: tl.constexpr = (H * N if CHANNELS else H) + H
    first = tl.program_id(0) * TILE
    part = tl.program_id(1) * PART
    layer = tl.program_id(2).to(tl.int64)
    head = first // P
    n, every = part + tl.arange(0, PART), tl.arange(0, N)
    in_state = (first + tl.arange(0, TILE))[:, None] * N + n[None, :]
    packed = tl.arange(0, JP)
    for request in range(b):
        length = tl.load(lengths + request).to(tl.int32)
        if wanted is not None:
            length = tl.where(tl.load(wanted + request) != 0, length, 0)
        if length > 0:
            valid, follows = packed < length, packed + 1 < length
            path = journal + request * M + packed
            first_row = (layer * R + tl.load(slots + request)) * W
            row = first_row + tl.load(path, mask=valid, other=0)
            next_row = first_row + tl.load(path + 1, mask=follows, other=0)
            states = state + (layer * S + tl.load(state_slots + request)) * (H * P * N)
            before = tl.load(states + in_state).to(tl.float32)
            k_at = (keys + row * (G * N) + head // (H // G) * N)[:, None]
            whole = tl.load(k_at + every[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
            of_k = 1.0 / tl.sqrt(tl.sum(whole * whole, 1) + EPS)
            k = tl.load(k_at + n[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
            u_at = (u + row * (H * P))[None, :] + (first + tl.arange(0, TILE))[:, None]
            written = tl.load(u_at, mask=valid[None, :], other=0.0) * of_k[None, :]
            log_at = gates + head * (N if CHANNELS else 1)
            g_rows, g_next = log_at + row * GATES, log_at + next_row * GATES
            if CHANNELS:
                g_rows, g_next = g_rows[:, None] + n[None, :], g_next[:, None] + n[None, :]
                inside = (valid[:, None], follows[:, None])
                suffix, total = decay_sums(g_rows, g_next, inside[0], inside[1])
                decay, k = tl.exp(total)[None, :], k * tl.exp(suffix)
            else:
                suffix, total = decay_sums(g_rows, g_next, valid, follows)
                decay, k = tl.exp(total), k * tl.exp(suffix)[:, None]
            folded = float32_dot(written, k, before * decay)
            if round_keys is not None:
                key = tl.load(round_keys + request)
                folded = round_state(folded, key, layer, in_state, state.dtype.element_ty)
            tl.store(states + in_state, folded)


def fold_journals(rows: DeltaRows, state: Tensor, folds: Folds, sizes: Sizes, eps: float) -> None:
    """tree_verify/triton_fold.py's, of delta rules.

    Few requests fold at a time, so a program goes through all of them: those that do not fold cost
    a look at a number.

    Args:
        rows: of all layers, contiguous.
        state: [layers, S, H, P, N], contiguous; bfloat16, float16 or float32.
        eps: as in ``tree_verify``.
    """
    (layers, R, W, width), (b, M) = rows.u.shape, folds.journal.shape
    tile, part = value_tile(sizes.head_dim), min(64, sizes.state_size)
    _fold_kernel[(width // tile, sizes.state_size // part, layers)](
        *(*rows, state, *folds, b, R, W, state.shape[1], M),
        **sizes.constants,
        JP=max(16, next_power_of_2(M)),
        TILE=tile,
        PART=part,
        CHANNELS=has_channel_decay(rows, sizes),
        EPS=eps,
        num_warps=4,
    )
