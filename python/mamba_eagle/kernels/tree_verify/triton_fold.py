"""torch.py's fold, in place, for all layers in one launch.

For requests that end or are retracted while their journals have rows; those of running requests are
folded by tree_verify. The number of rows to fold is read on the device, and a request without any
moves no state. Precision as in triton.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import next_power_of_2
from mamba_eagle.kernels.state_rounding.triton import round_state
from mamba_eagle.kernels.tree_verify.layout import Folds, RowBuffers, Sizes
from mamba_eagle.kernels.tree_verify.triton import channel_tiles
from mamba_eagle.kernels.triton_math import end_shares, split_dot


@triton.jit
def _fold_kernel(
    xB,  # [layers, R, W, H*P + G*N]
    dt,  # [layers, R, W, H]
    log_decay,  # [layers, R, W, H]
    state,  # [layers, S, H, P, N]
    slots,  # [b]
    state_slots,  # [b]
    journal,  # [b, M]
    lengths,  # [b]
    round_keys,  # [b]; None: to nearest
    R,
    W,
    S,
    M,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    J: tl.constexpr,  # rows of a journal, padded
    TILE: tl.constexpr,  # channels of the flat H*P, at most P: a tile lies in one head or in two
    PRECISION: tl.constexpr,
):
    WIDTH: tl.constexpr = H * P + G * N
    first = tl.program_id(0) * TILE
    layer = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2)
    length = tl.load(lengths + request).to(tl.int32)
    if length == 0:
        return

    packed = tl.arange(0, J)
    in_journal = packed < length
    row = tl.load(journal + request * M + packed, mask=in_journal, other=0).to(tl.int32)
    last_row = tl.load(journal + request * M + length - 1).to(tl.int32)
    first_row = (layer * R + tl.load(slots + request)) * W
    xB += first_row * WIDTH
    dt += first_row * H
    log_decay += first_row * H
    state += (layer * S + tl.load(state_slots + request)) * (H * P * N)

    n = tl.arange(0, N)
    channel = first + tl.arange(0, TILE)
    in_state = channel[:, None] * N + n[None, :]
    before = tl.load(state + in_state)  # [TILE, N]
    x = tl.load((xB + row * WIDTH)[:, None] + channel[None, :], mask=in_journal[:, None], other=0.0)
    B_rows = xB + row * WIDTH + H * P + first // (H // G * P) * N
    B = tl.load(B_rows[:, None] + n[None, :], mask=in_journal[:, None], other=0.0)  # [J, N]

    head = first // P
    end_log = tl.load(log_decay + last_row * H + head)
    row_log = tl.load(log_decay + row * H + head, mask=in_journal, other=0.0)
    step = tl.load(dt + row * H + head, mask=in_journal, other=0.0)
    share = end_shares(row_log, end_log, step, in_journal)[:, None]
    decay = tl.exp(end_log)
    if P % TILE != 0:
        head = (first + TILE - 1) // P
        in_last = channel >= head * P
        end_log = tl.load(log_decay + last_row * H + head)
        row_log = tl.load(log_decay + row * H + head, mask=in_journal, other=0.0)
        step = tl.load(dt + row * H + head, mask=in_journal, other=0.0)
        last_share = end_shares(row_log, end_log, step, in_journal)[:, None]
        share = tl.where(in_last[None, :], last_share, share)
        decay = tl.where(in_last, tl.exp(end_log), decay)[:, None]
    dtx = tl.trans(x.to(tl.float32) * share)  # [TILE, J]
    gained = split_dot(dtx, B, tl.zeros([TILE, N], tl.float32), PRECISION)
    after = before.to(tl.float32) * decay + gained
    if round_keys is not None:
        key = tl.load(round_keys + request)
        after = round_state(after, key, layer, in_state, state.dtype.element_ty)
    tl.store(state + in_state, after)


def fold_journals(buffers: RowBuffers, state: Tensor, folds: Folds, sizes: Sizes) -> None:
    """S0 := the state after the first ``length[i]`` rows of request i's journal, in all layers.

    ``exp(L_end) S0 + Σ_j exp(L_end - L_j) dt_j x_j B_jᵀ``, with L counted from S0; L_end is that of
    the last row folded. Neither rows nor indices change. What is left of the journal still counts L
    from the old S0, so it can't be used any more. Nothing waits for the device.

    Args:
        buffers: of all layers, each [layers, R, W, …], contiguous.
        state: [layers, S, H, P, N], contiguous; bfloat16, float16 or float32.
    Raises: ValueError when the channels of a group cannot be divided into tiles.
    """
    layers, R, W, _ = buffers.xB.shape
    (b, M), tile = folds.journal.shape, min(32, channel_tiles(sizes)[-1])
    _fold_kernel[(sizes.heads * sizes.head_dim // tile, layers, b)](
        *(*buffers, state, *folds[:4], folds.round_keys, R, W, state.shape[1], M),
        **sizes.constants,
        J=max(16, next_power_of_2(M)),
        TILE=tile,
        PRECISION="tf32x3" if buffers.xB.dtype == torch.float32 else "tf32",
        num_warps=4,
    )
