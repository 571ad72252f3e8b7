"""Folds outside of a step, of all layers in one launch, by the recurrence itself.

A program is a warp with a tile of values of one request.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mamba_eagle.kernels.delta_recurrence.layout import check_sizes
from mamba_eagle.kernels.delta_rule.rows import DeltaRows
from mamba_eagle.kernels.recurrence.gluon_step import LOG2_E, in_state, stepped, tile_layout
from mamba_eagle.kernels.tree_verify.layout import Folds, Sizes


@gluon.jit(do_not_specialize=["R", "W", "S_slots", "M"])
def _fold_kernel(
    gates,  # [layers, R, W, H + H]
    keys,  # [layers, R, W, G*N]
    u,  # [layers, R, W, H*P]
    state,  # [layers, S_slots, H, P, N]
    slots,
    state_slots,
    journal,  # [b, M]
    lengths,
    R,
    W,
    S_slots,
    M,
    H: gl.constexpr,
    P: gl.constexpr,
    G: gl.constexpr,
    N: gl.constexpr,
    TILE: gl.constexpr,
):
    layout: gl.constexpr = tile_layout(TILE, 1)
    first = gl.program_id(0) * TILE
    layer = gl.program_id(1).to(gl.int64)
    request = gl.program_id(2)
    length = gl.load(lengths + request).to(gl.int32)
    if length > 0:
        head = first // P
        first_row = (layer * R + gl.load(slots + request)) * W
        u_at = u + first_row * (H * P) + first + gl.arange(0, TILE, gl.SliceLayout(1, layout))
        k_at = keys + first_row * (G * N) + head // (H // G) * N
        k_at += gl.arange(0, N, gl.SliceLayout(0, layout))
        gates += first_row * (2 * H) + head
        state += (layer * S_slots + gl.load(state_slots + request)) * (H * P * N) + first * N
        S = gl.load(state + in_state(TILE, N, layout))
        for i in range(length):
            row = gl.load(journal + request * M + i).to(gl.int32)
            decay = gl.exp2(gl.load(gates + row * (2 * H)) * LOG2_E)
            k = gl.load(k_at + row * (G * N)).to(gl.float32)[None, :]
            written = gl.load(u_at + row * (H * P))
            S = stepped(S, gl.full([1, 1], decay, gl.float32, layout), written, k)
        gl.store(state + in_state(TILE, N, layout), S)


def fold_journals(rows: DeltaRows, state: Tensor, folds: Folds, sizes: Sizes) -> None:
    """delta_rule/triton_fold.py's, of all requests and to nearest. What is left of a journal can
    still be used.

    Args:
        rows: of all layers, contiguous; u as ``gluon_verify.tree_verify`` writes it.
        state: [layers, S, H, P, N] float32, contiguous.
    Raises: ValueError as ``check_sizes``.
    """
    check_sizes(sizes, state)
    layers, R, W, _ = rows.u.shape
    (b, M), (H, P, G, N) = folds.journal.shape, sizes
    tile = 16
    _fold_kernel[(H * P // tile, layers, b)](
        *rows,
        state,
        *folds[:4],
        R,
        W,
        state.shape[1],
        M,
        H=H,
        P=P,
        G=G,
        N=N,
        TILE=tile,
        num_warps=1,
    )
