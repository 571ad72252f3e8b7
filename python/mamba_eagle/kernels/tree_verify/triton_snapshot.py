"""snapshot_verify of torch.py, and the copy on acceptance. Rows and folds are measured against it.

A program owns TILE channels of a request, with the N numbers of each, and walks through the nodes
in order. A node that comes right after its parent finds the parent's state in registers; any other
node reads it from the buffer, to which every node's state is written. So a step writes T states
and reads one, plus one for each branch; accepting reads and writes one more.

Rows are filled by causal_conv/triton.py's tree_conv, as for triton.py: node i has row
``step.rows[:, i]``, and its state is stored at the same index. There is no journal. Nothing here
waits for the device.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import cdiv
from mamba_eagle.kernels.state_rounding.triton import round_state
from mamba_eagle.kernels.tree_verify.layout import RowBuffers, Sizes, TreeLayout


class SnapshotConfig(NamedTuple):
    """How the work is divided; the result does not depend on it."""

    tile: int  # channels: a power of two that divides those of a group
    warps: int


@triton.jit
def _snapshot_kernel(
    xB,  # [R, W, H*P + G*N]
    dt,  # [R, W, H]
    C,  # [b, T, G*N]
    A,  # [H]
    D,  # [H]
    state,  # [slots, H, P, N]
    node_states,  # [R, W, H, P, N]
    y,  # [b, T, H*P]
    slots,  # [b]
    state_slots,  # [b]
    rows,  # [b, T]
    parents,  # [b, T]
    T,
    W,
    state_stride,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
):
    WIDTH: tl.constexpr = H * P + G * N
    first = tl.program_id(0) * TILE
    request = tl.program_id(1)
    group = first // (H // G * P)
    channel = first + tl.arange(0, TILE)
    head = channel // P
    n = tl.arange(0, N)
    in_tile = channel[:, None] * N + n[None, :]
    rate = tl.load(A + head)
    skip = tl.load(D + head)

    slot = tl.load(slots + request).to(tl.int64)
    state_slot = tl.load(state_slots + request).to(tl.int64)
    rows += request * T
    parents += request * T
    node_states += slot * W * (H * P * N)
    state += state_slot * state_stride
    now = tl.load(state + in_tile).to(tl.float32)  # [TILE, N]
    for node in range(T):
        row = tl.load(rows + node)
        if node > 0:
            parent = tl.load(parents + node)
            if parent != node - 1:
                tl.debug_barrier()  # other threads may have written the parent's state
                place = tl.load(rows + parent) * (H * P * N)
                now = tl.load(node_states + place + in_tile)
        at = slot * W + row
        x = tl.load(xB + at * WIDTH + channel).to(tl.float32)
        B = tl.load(xB + at * WIDTH + H * P + group * N + n).to(tl.float32)
        C_node = tl.load(C + ((request * T + node) * G + group) * N + n).to(tl.float32)
        step = tl.load(dt + at * H + head)
        now = tl.exp(step * rate)[:, None] * now + (step * x)[:, None] * B[None, :]
        tl.store(node_states + row * (H * P * N) + in_tile, now)
        out = tl.sum(now * C_node[None, :], 1) + skip * x
        tl.store(y + (request * T + node) * (H * P) + channel, out)


def snapshot_verify(
    buffers: RowBuffers,
    C: Tensor,
    A: Tensor,
    D: Tensor,
    state: Tensor,
    node_states: Tensor,
    step: TreeLayout,
    sizes: Sizes,
    config: SnapshotConfig | None = None,
) -> Tensor:
    """Outputs of all nodes, ``D x`` included; the state after each is left in ``node_states``.

    Args:
        buffers: contiguous; the nodes' rows are already filled (see causal_conv/triton.py).
        C: [b, T, G*N], dtype of the rows; A, D: [H] float32.
        state: [slots, H, P, N], the layer's part of the pool, contiguous; only read.
        node_states: [R, W, H, P, N] float32, contiguous: one state per row.
    Returns: [b*T, H*P], dtype of the rows.
    """
    b, T = step.rows.shape
    H, P, G, N = sizes
    channels = H // G * P
    if config is None:  # 4096 numbers, 32 per thread; not tuned by measurement
        tile = max(1, 4096 // N)
        while channels % tile:
            tile //= 2
        config = SnapshotConfig(tile, 4)
    y = torch.empty(b * T, H * P, dtype=buffers.xB.dtype, device=C.device)
    _snapshot_kernel[(H * P // config.tile, b)](
        *(buffers.xB, buffers.dt, C, A, D, state, node_states, y, step.slots, step.state_slots),
        *(step.rows, step.parents),
        *(T, buffers.xB.shape[1], state.stride(0)),
        **sizes.constants,
        TILE=config.tile,
        num_warps=config.warps,
    )
    return y


@triton.jit
def _copy_kernel(
    node_states,  # [layers, R, W, size]
    state,  # [layers, slots, size]
    slots,  # [b]
    state_slots,  # [b]
    rows,  # [b]
    count,  # [b]
    round_keys,  # [b]; None: to nearest
    R,
    W,
    num_slots,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(2)
    if tl.load(count + request) > 0:
        layer = tl.program_id(1).to(tl.int64)
        source = (layer * R + tl.load(slots + request)) * W + tl.load(rows + request)
        target = layer * num_slots + tl.load(state_slots + request)
        number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = number < SIZE
        value = tl.load(node_states + source * SIZE + number, mask=inside)
        if round_keys is not None:
            key = tl.load(round_keys + request)
            value = round_state(value, key, layer, number, state.dtype.element_ty)
        tl.store(state + target * SIZE + number, value, mask=inside)


def commit_snapshots(
    node_states: Tensor,
    state: Tensor,
    slots: Tensor,
    state_slots: Tensor,
    rows: Tensor,
    count: Tensor,
    block: int = 4096,
    round_keys: Tensor | None = None,
) -> None:
    """The last accepted node's state becomes the request's, in all layers at once.

    Args:
        node_states: [layers, R, W, H, P, N] float32; state: [layers, slots, H, P, N], the pool.
        slots, state_slots, rows: [b] int64; rows are those of the last accepted nodes.
        count: [b] int64, accepted nodes; a request with none keeps its state.
        round_keys: [b] int64, of the noise that rounds a state to 16 bits; None: to nearest.
    """
    layers, R, W, *shape = node_states.shape
    size = torch.Size(shape).numel()
    _copy_kernel[(cdiv(size, block), layers, len(slots))](
        *(node_states, state, slots, state_slots, rows, count, round_keys, R, W, state.shape[1]),
        SIZE=size,
        BLOCK=block,
        num_warps=8,
    )
