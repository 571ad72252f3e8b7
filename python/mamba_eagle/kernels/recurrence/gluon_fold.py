"""Folds outside of a step, of all layers in one launch, by the recurrence itself.

A program is a warp with a tile of channels of one request; see gluon_step.py. To a fold a row of
gated DeltaNet (delta_recurrence/) is one of Mamba2's, with u for dt · x and k for B.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mamba_eagle.kernels.delta_rule.rows import DeltaRows
from mamba_eagle.kernels.recurrence.gluon_step import LOG2_E, in_state, stepped, tile_layout
from mamba_eagle.kernels.recurrence.layout import check_sizes
from mamba_eagle.kernels.tree_verify.layout import Folds, RowBuffers, Sizes


@gluon.jit(do_not_specialize=["R", "W", "S_slots", "M"])
def _fold_kernel(
    x,  # [layers, R, W, H*P + G*N], with B; or [layers, R, W, H*P]: u
    keys,  # [layers, R, W, G*N]; None: B
    gates,  # [layers, R, W, H]: dt; or [layers, R, W, H + H]: g, beta
    A,  # [layers, H]; None: 1
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
    WIDTH: gl.constexpr = H * P + G * N if keys is None else H * P
    B_WIDTH: gl.constexpr = WIDTH if keys is None else G * N
    GATES: gl.constexpr = H if keys is None else 2 * H
    layout: gl.constexpr = tile_layout(TILE, 1)
    first = gl.program_id(0) * TILE
    layer = gl.program_id(1).to(gl.int64)
    request = gl.program_id(2)
    length = gl.load(lengths + request).to(gl.int32)
    if length > 0:
        head = first // P
        first_row = (layer * R + gl.load(slots + request)) * W
        x += first_row * WIDTH
        B = x + H * P if keys is None else keys + first_row * B_WIDTH
        x_at = x + first + gl.arange(0, TILE, gl.SliceLayout(1, layout))
        B_at = B + head // (H // G) * N + gl.arange(0, N, gl.SliceLayout(0, layout))
        gates += first_row * GATES + head
        state += (layer * S_slots + gl.load(state_slots + request)) * (H * P * N) + first * N
        rate = LOG2_E if A is None else gl.load(A + layer * H + head) * LOG2_E
        S = gl.load(state + in_state(TILE, N, layout))
        for k in range(length):
            row = gl.load(journal + request * M + k).to(gl.int32)
            gate = gl.load(gates + row * GATES)
            dtx = gl.load(x_at + row * WIDTH).to(gl.float32)
            dtx = dtx if A is None else dtx * gate
            numbers = gl.load(B_at + row * B_WIDTH).to(gl.float32)[None, :]
            decay = gl.full([1, 1], gl.exp2(gate * rate), gl.float32, layout)
            S = stepped(S, decay, dtx, numbers)
        gl.store(state + in_state(TILE, N, layout), S)


def fold_journals(
    rows: RowBuffers | DeltaRows, A: Tensor | None, state: Tensor, folds: Folds, sizes: Sizes
) -> None:
    """tree_verify/triton_fold.py's, from dt and A instead of L; or delta_rule/triton_fold.py's.
    What is left of a journal can still be used.

    Args:
        rows: of all layers. u of gated DeltaNet is over the length of its key.
        A: [layers, H] float32, negative; None with gated DeltaNet.
        state: [layers, S, H, P, N] float32, contiguous.
    Raises: ValueError as ``check_sizes``.
    """
    check_sizes(sizes, state)
    x, keys, gates = (
        (rows.xB, None, rows.dt)
        if isinstance(rows, RowBuffers)
        else (rows.u, rows.keys, rows.gates)
    )
    layers, R, W, _ = x.shape
    (b, M), tile = folds.journal.shape, 16 if sizes.state_size <= 128 else 8
    _fold_kernel[(sizes.heads * sizes.head_dim // tile, layers, b)](
        *(x, keys, gates, A, state, *folds[:4], R, W, state.shape[1], M),
        **sizes.constants,
        TILE=tile,
        num_warps=1,
    )
