"""Folds outside of a step, of all layers in one launch, by the recurrence itself.

A program is a warp with a tile of channels of one request; see gluon_step.py.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mamba_eagle.kernels.recurrence.gluon_step import LOG2_E, in_state, stepped, tile_layout
from mamba_eagle.kernels.recurrence.layout import check_sizes
from mamba_eagle.kernels.tree_verify.layout import Folds, RowBuffers, Sizes


@gluon.jit(do_not_specialize=["R", "W", "S_slots", "M"])
def _fold_kernel(
    xB,  # [layers, R, W, H*P + G*N]
    dt,  # [layers, R, W, H]
    A,  # [layers, H]
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
    WIDTH: gl.constexpr = H * P + G * N
    layout: gl.constexpr = tile_layout(TILE, 1)
    first = gl.program_id(0) * TILE
    layer = gl.program_id(1).to(gl.int64)
    request = gl.program_id(2)
    length = gl.load(lengths + request).to(gl.int32)
    if length > 0:
        head = first // P
        first_row = (layer * R + gl.load(slots + request)) * W
        xB += first_row * WIDTH
        x_at = xB + first + gl.arange(0, TILE, gl.SliceLayout(1, layout))
        B_at = xB + H * P + head // (H // G) * N + gl.arange(0, N, gl.SliceLayout(0, layout))
        dt += first_row * H + head
        state += (layer * S_slots + gl.load(state_slots + request)) * (H * P * N) + first * N
        rate = gl.load(A + layer * H + head) * LOG2_E
        S = gl.load(state + in_state(TILE, N, layout))
        for k in range(length):
            row = gl.load(journal + request * M + k).to(gl.int32)
            step = gl.load(dt + row * H)
            dtx = gl.load(x_at + row * WIDTH).to(gl.float32) * step
            B = gl.load(B_at + row * WIDTH).to(gl.float32)[None, :]
            decay = gl.full([1, 1], gl.exp2(step * rate), gl.float32, layout)
            S = stepped(S, decay, dtx, B)
        gl.store(state + in_state(TILE, N, layout), S)


def fold_journals(
    buffers: RowBuffers, A: Tensor, state: Tensor, folds: Folds, sizes: Sizes
) -> None:
    """tree_verify/triton_fold.py's, from dt and A instead of L. What is left of a journal can still
    be used.

    Args:
        A: [layers, H] float32, negative.
    Raises: ValueError as ``check_sizes``.
    """
    check_sizes(sizes, state)
    layers, R, W, _ = buffers.xB.shape
    H, P, G, N = sizes
    (b, M), tile = folds.journal.shape, 16 if N <= 128 else 8
    _fold_kernel[(H * P // tile, layers, b)](
        buffers.xB,
        buffers.dt,
        A,
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
