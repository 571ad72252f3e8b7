"""triton.py's tree_verify for rows of 16 bits, with the state in registers from load to store.

A program is one warp. It takes 16 channels of a head at a time and loads their state, [16, N], as
the factor of a product that the tensor cores read from registers: each thread gets some consecutive
numbers of a channel, and in which order a product adds up over N is free. So a state never goes
through shared memory, a fold happens in the same registers, and many warps have loads under way at
the same time. There is one launch whether requests fold or not: a program takes one path or the
other.

triton.py leaves such layouts to the compiler, which moves each state into shared memory first, with
several barriers per tile. It stays for float32 rows, larger trees, and heads whose channels are no
multiple of 16; and Triton's interpreter can run its arithmetic, which it can't do with this.

Precision: as in triton.py. Factors in float32 are split into two 16-bit numbers (to 2**-16), S0·C
takes S0 in tf32, sums are float32.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from mamba_eagle.kernels.gpu import TENSOR_CORES, capability, next_power_of_2, overlapping
from mamba_eagle.kernels.state_rounding.triton import round_state
from mamba_eagle.kernels.tree_verify import triton as by_compiler
from mamba_eagle.kernels.tree_verify.layout import RowBuffers, Sizes, TreeLayout
from mamba_eagle.kernels.triton_math import end_shares, previous_done

MAX_NODES = 16
MAX_PACKED = 64  # rows of the tree and the journal
STATE_SIZES = (32, 64, 128, 256)
CHUNK = 128  # numbers of a channel's state in a program's registers
# Up to this many programs, each takes 16 channels; otherwise all channels of a head, whose weights
# are then computed once.
SMALL_GRID, SMALL_GRID_ONE_NODE = 2048, 20480

# renamed after Triton 3.6
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _two_parts(a, dtype: gl.constexpr):
    """Two 16-bit numbers whose sum is ``a``, to 2**-16 of it."""
    if dtype == gl.bfloat16:  # cut: rounding element by element is slow
        high = (a.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    else:
        high = a.to(dtype).to(gl.float32)
    return high.to(dtype), (a - high).to(dtype)


@gluon.jit
def _nodes(TP: gl.constexpr, layout: gl.constexpr):
    """0 … TP-1, so that the compiler does not see how they come from the number of the thread.

    LLVM of Triton 3.6 takes two such computations together if both are added to one pointer, here
    those of a node and of a row, and lets bits of the one overflow into the other: the threads of
    half a warp got other rows.
    """
    node = gl.arange(0, TP, layout)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [node], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _packed_rows(rows, journal, request, T, M, J: gl.constexpr, layout: gl.constexpr):
    """Ids of the rows [tree ; journal]: [J]. Loaded once per layout: exchanging them between
    threads would take longer than reading them from the cache."""
    packed = gl.arange(0, J, layout)
    node_row = gl.load(rows + request * T + packed, mask=packed < T, other=0)
    in_table = (packed >= T) & (packed < T + M)
    journal_row = gl.load(journal + request * M + packed - T, mask=in_table, other=0)
    return gl.where(packed < T, node_row, journal_row).to(gl.int32)


@gluon.jit
def _C_nodes(C, T, WIDTH: gl.constexpr, TP: gl.constexpr, SIZE: gl.constexpr, layout: gl.constexpr):
    """SIZE numbers of C of the nodes: [SIZE, TP]. C: at the first number of node 0."""
    node = gl.arange(0, TP, gl.SliceLayout(0, layout))
    at = C + node[None, :] * WIDTH + gl.arange(0, SIZE, gl.SliceLayout(1, layout))[:, None]
    return gl.load(at, mask=(node < T)[None, :], other=0.0)


@gluon.jit
def _state_tile(state, N: gl.constexpr, SIZE: gl.constexpr, layout: gl.constexpr):
    """[16, SIZE], of 16 channels. state: at the first number."""
    channel = gl.arange(0, 16, gl.SliceLayout(1, layout))
    n = gl.arange(0, SIZE, gl.SliceLayout(0, layout))
    return gl.load(state + channel[:, None] * N + n[None, :])


# not specialized: layers 1 and 16 should not need new machine code
@gluon.jit(do_not_specialize=["layer"])
def _tree_verify_kernel(
    xB,  # [R, W, H*P + G*N]
    dt,  # [R, W, H]
    log_decay,  # [R, W, H]
    C,  # [b, T, G*N]
    D,  # [H]
    state,  # [slots, H, P, N]
    y,  # [b, T, H*P]
    slots,
    state_slots,
    journal,  # [b, M]
    journal_len,
    rows,  # [b, T]
    ancestors,  # [b, T]
    fold,
    round_keys,  # [b]; None: to nearest
    layer,
    T,
    W,
    M,
    state_stride,
    H: gl.constexpr,
    P: gl.constexpr,
    G: gl.constexpr,
    N: gl.constexpr,
    TP: gl.constexpr,  # nodes, padded
    J: gl.constexpr,  # packed rows [tree ; journal], padded
    TILES: gl.constexpr,  # of 16 channels, per program, all in one head
    SIZE: gl.constexpr,  # numbers of a channel's state at a time: N or a part of it
    OVERLAP: gl.constexpr,
):
    WIDTH: gl.constexpr = H * P + G * N
    CHUNKS: gl.constexpr = N // SIZE
    rows_dtype: gl.constexpr = xB.dtype.element_ty
    state_dtype: gl.constexpr = state.dtype.element_ty
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    # Factors of products. The last number says how many consecutive ones a thread has: 16 bytes of
    # what is read from memory.
    state_in: gl.constexpr = gl.DotOperandLayout(0, sums, 128 // state_dtype.primitive_bitwidth)
    C_in: gl.constexpr = gl.DotOperandLayout(1, sums, 128 // state_dtype.primitive_bitwidth)
    B_scored: gl.constexpr = gl.DotOperandLayout(0, sums, 8)
    C_scored: gl.constexpr = gl.DotOperandLayout(1, sums, 8)
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    x_copied: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [1, 1], [1, 0])
    B_copied: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])

    request = gl.program_id(1)
    first = gl.program_id(0) * (16 * TILES)
    head = first // P
    group = head // (H // G)

    # Indices, which the previous kernel does not write, all at once: one after the other, each
    # would wait for the memory anew.
    length = gl.load(journal_len + request).to(gl.int32)
    state_slot = gl.load(state_slots + request).to(gl.int64)
    slot = gl.load(slots + request).to(gl.int64)
    last_row = gl.load(journal + request * M + gl.maximum(length - 1, 0)).to(gl.int32)
    row = _packed_rows(rows, journal, request, T, M, J, gl.SliceLayout(1, right))
    row_of_B = _packed_rows(rows, journal, request, T, M, J, gl.SliceLayout(1, B_copied))
    row_of_x = _packed_rows(rows, journal, request, T, M, J, gl.SliceLayout(1, x_copied))
    node = _nodes(TP, gl.SliceLayout(0, right))
    output = _nodes(TP, gl.SliceLayout(0, sums))
    own_row = gl.load(rows + request * T + node, mask=node < T, other=0).to(gl.int32)
    output_row = gl.load(rows + request * T + output, mask=output < T, other=0).to(gl.int32)
    bits = gl.load(ancestors + request * T + node, mask=node < T, other=0)

    state += state_slot * state_stride + first * N
    xB += slot * W * WIDTH
    dt += slot * W * H + head
    log_decay += slot * W * H + head
    C += request * T * (G * N) + group * N
    y += request.to(gl.int64) * T * (H * P) + first
    before = _state_tile(state, N, SIZE, state_in)  # what takes longest is asked for first
    previous_done(OVERLAP)

    # B and x of rows that are not valid become zeros
    B_shared = gl.allocate_shared_memory(
        rows_dtype, [J, N], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )
    valid_B = (gl.arange(0, J, gl.SliceLayout(1, B_copied)) < T + length)[:, None]
    B_at = H * P + group * N + gl.arange(0, N, gl.SliceLayout(0, B_copied))
    _copy(B_shared, xB + row_of_B[:, None] * WIDTH + B_at[None, :], mask=valid_B)
    async_copy.commit_group()
    C_first = _C_nodes(C, T, G * N, TP, SIZE, C_scored)
    C_tile = _C_nodes(C, T, G * N, TP, SIZE, C_in)
    x_at = gl.arange(0, 16, gl.SliceLayout(0, x_copied))
    x_rows = xB + row_of_x[:, None] * WIDTH + first + x_at[None, :]
    valid_x = (gl.arange(0, J, gl.SliceLayout(1, x_copied)) < T + length)[:, None]
    x = gl.load(x_rows, mask=valid_x, other=0.0)
    packed = gl.arange(0, J, gl.SliceLayout(1, right))
    is_node = packed < T
    valid = packed < T + length
    in_journal = valid & (packed >= T)
    step = gl.load(dt + row * H, mask=valid, other=0.0)
    row_log = gl.load(log_decay + row * H, mask=valid, other=0.0)
    node_log = gl.load(log_decay + own_row * H, mask=node < T, other=0.0)
    output_log = gl.load(log_decay + output_row * H, mask=output < T, other=0.0)
    skip = gl.load(D + head)
    if fold is not None:
        folding = (gl.load(fold + request) != 0) & (length > 0)
        # the nodes' L then counts from the end of the journal
        end_log = gl.load(log_decay + last_row * H, mask=folding, other=0.0)
        row_log += gl.where(is_node, end_log, 0.0)
        node_log += end_log
        output_log += end_log
        decay = gl.exp(end_log)
        share = end_shares(row_log, end_log, step, in_journal)
        share = gl.convert_layout(share, gl.SliceLayout(0, left))[None, :]

    async_copy.wait_group(0)
    scores = gl.zeros([J, TP], gl.float32, sums)
    for c in gl.static_range(CHUNKS):
        if c > 0:
            C_first = _C_nodes(C + c * SIZE, T, G * N, TP, SIZE, C_scored)
        scores = mma_v2(B_shared.slice(c * SIZE, SIZE, dim=1).load(B_scored), C_first, scores)
    scores = gl.convert_layout(scores, right)
    above = (bits[None, :] >> gl.minimum(packed, 63).to(gl.int64)[:, None]) & 1
    visible = ((above != 0) & is_node[:, None]) | in_journal[:, None]  # [J, TP]
    # as triton_math.dual_weights
    gap = gl.where(visible, node_log[None, :] - row_log[:, None], float("-inf"))
    weights = gl.exp(gap) * step[:, None] * scores
    weights += gl.where(packed[:, None] == node[None, :], skip, 0.0)
    high, low = _two_parts(weights, rows_dtype)

    x_shared = gl.allocate_shared_memory(
        rows_dtype, [J, 16], gl.SwizzledSharedLayout(8, 2, 2, [1, 0])
    )
    channel = gl.arange(0, 16, gl.SliceLayout(1, sums))
    outputs = y + output[None, :] * (H * P) + channel[:, None]
    for i in range(TILES):
        x_shared.store(x)
        x_left = x_shared.permute((1, 0)).load(left)  # [16, J]
        added = mma_v2(x_left, low, gl.zeros([16, TP], gl.float32, sums))
        added = mma_v2(x_left, high, added)
        from_state = gl.zeros([16, TP], gl.float32, sums)
        for c in gl.static_range(CHUNKS):
            if CHUNKS > 1:
                C_tile = _C_nodes(C + c * SIZE, T, G * N, TP, SIZE, C_in)
            S0 = before.to(gl.float32)
            from_state = mma_v2(S0, C_tile.to(gl.float32), from_state, input_precision="tf32")
            if fold is not None:  # noqa: SIM102 - known when compiled; the other one is not
                if folding:
                    B = B_shared.slice(c * SIZE, SIZE, dim=1).load(right)
                    dtx_high, dtx_low = _two_parts(x_left.to(gl.float32) * share, rows_dtype)
                    after = gl.convert_layout(S0, sums) * decay
                    after = mma_v2(dtx_high, B, mma_v2(dtx_low, B, after))
                    n = c * SIZE + gl.arange(0, SIZE, gl.SliceLayout(0, sums))
                    place = i * 16 * N + channel[:, None] * N + n[None, :]
                    if round_keys is not None:
                        key = gl.load(round_keys + request)
                        after = round_state(after, key, layer, first * N + place, state_dtype)
                    gl.store(state + place, after.to(state_dtype))
            # the next one into the same registers, while this one's outputs are formed
            if c + 1 < CHUNKS:
                before = _state_tile(state + i * 16 * N + (c + 1) * SIZE, N, SIZE, state_in)
            elif TILES > 1:  # noqa: SIM102 - as above
                if i + 1 < TILES:
                    before = _state_tile(state + (i + 1) * 16 * N, N, SIZE, state_in)
                    x = gl.load(x_rows + (i + 1) * 16, mask=valid_x, other=0.0)
        total = added + gl.exp(output_log)[None, :] * from_state
        gl.store(outputs + i * 16, total.to(y.dtype.element_ty), mask=(output < T)[None, :])


def supports(buffers: RowBuffers, step: TreeLayout, sizes: Sizes) -> bool:
    """Whether this file's kernel can be used for such a step; otherwise triton.py's is."""
    nodes, max_journal = step.rows.shape[1], step.journal.shape[1]
    return (
        capability(buffers.xB.device) >= TENSOR_CORES
        and buffers.xB.dtype in (torch.bfloat16, torch.float16)
        and nodes <= MAX_NODES
        and nodes + max_journal <= MAX_PACKED
        and sizes.head_dim % 16 == 0
        and sizes.state_size in STATE_SIZES
    )


def tree_verify(
    buffers: RowBuffers,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    step: TreeLayout,
    sizes: Sizes,
    layer: int = 0,
    tiles: int | None = None,
) -> Tensor:
    """triton.py's, to which it leaves what this kernel does not support.

    Args:
        tiles: of 16 channels per program, a divisor of those of a head; None: the best on an H200
            at Nemotron-Nano-9B-v2's sizes.
    """
    if not supports(buffers, step, sizes):
        return by_compiler.tree_verify(buffers, C, D, state, step, sizes, layer=layer)
    (b, T), (H, P, _, N) = step.rows.shape, sizes
    W, M = buffers.xB.shape[1], step.journal.shape[1]
    y = torch.empty(b * T, H * P, dtype=buffers.xB.dtype, device=C.device)
    if tiles is None:
        small = SMALL_GRID_ONE_NODE if T == 1 else SMALL_GRID
        tiles = 1 if b * H * P // 16 <= small else P // 16
    _tree_verify_kernel[(H * P // (16 * tiles), b)](
        *(*buffers, C, D, state, y, *step.up_to_rows, step.ancestors, step.fold),
        step.round_keys,
        *(layer, T, W, M, state.stride(0)),
        **sizes.constants,
        TP=8 if T <= 8 else 16,
        J=max(16, next_power_of_2(T + M)),
        TILES=tiles,
        SIZE=min(N, CHUNK),
        num_warps=1,
        **overlapping(C.device),
    )
    return y
