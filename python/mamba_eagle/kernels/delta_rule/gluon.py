"""triton.py's verification of few nodes, with states in registers from load to product.

A warp has 16 values of a head and all channels of their state. As in float8/gluon.py a thread loads
16 consecutive bytes of a row to where ``mma.sync`` wants its left factor. The queries and keys of
four nodes, one after the other, are the eight columns of the right one, and the journal's products
are added to the same sums: a thread has what belongs to the query and to the key of a node. Each
sum over nodes is one more product, whose left factor is where the sums are. So nothing goes through
shared memory, and no warp waits for another one.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mamba_eagle.kernels.delta_rule.rows import DeltaRows, has_channel_decay
from mamba_eagle.kernels.gpu import capability
from mamba_eagle.kernels.tree_verify.layout import Sizes, TreeLayout

MAX_NODES = 8
MAX_JOURNAL = 32  # more of it, and of a state's channels, would not fit into registers
STATE_SIZES = (64, 128)
HOPPER = (9, 0)  # earlier ones were not measured
WARPS = 4  # per program
TILE = 16 * WARPS  # values of a head


@gluon.jit
def _halves(x, dtype: gl.constexpr):
    """float32 -> its leading bits and the rest, in a dtype of 16 bits."""
    if dtype == gl.bfloat16:  # truncated, which takes fewer instructions
        bits = x.to(gl.int32, bitcast=True)
        high = (bits >> 16).to(gl.int16).to(dtype, bitcast=True)
        return high, (x - (bits & -65536).to(gl.float32, bitcast=True)).to(dtype)
    else:
        high = x.to(dtype)
        return high, (x - high.to(gl.float32)).to(dtype)


@gluon.jit
def _add_product(a, b, total):
    """total + a·b of float32 numbers, nearly as exact: what a tensor core reads of each, and what
    it does not, times both of the other. a, b: by threads and warps as the factors of tf32."""
    a_high = (a.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)
    b_high = (b.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)
    a, b = gl.join(a_high, a - a_high), gl.join(b_high, b - b_high)
    columns: gl.constexpr = 4 * a.shape[1]
    a = gl.reshape(gl.permute(gl.join(a, a), (0, 2, 3, 1)), [a.shape[0], columns])
    b = gl.reshape(gl.permute(gl.join(b, b), (3, 2, 0, 1)), [columns, b.shape[1]])
    a = gl.convert_layout(a, gl.DotOperandLayout(0, total.type.layout, 1), assert_trivial=True)
    b = gl.convert_layout(b, gl.DotOperandLayout(1, total.type.layout, 1), assert_trivial=True)
    return mma_v2(a, b, total, "tf32")


@gluon.jit
def _pairs(sums):
    """Columns of queries and of keys: [values, 2 * nodes] -> [values, nodes] twice."""
    return gl.split(gl.reshape(sums, [sums.shape[0], sums.shape[1] // 2, 2]))


@gluon.jit(do_not_specialize=["T", "W", "M"])
def verify_kernel(
    convolved,  # [b, T, 2*G*N + H*P]: queries, keys, values
    weights,  # [b, H, T, 3 + 2*M + 2*T]
    decayed,  # None
    row_u,  # [R, W, H*P]
    state,  # [slots, H, P, N]
    y,  # [b, T, H*P]
    slots,
    state_slots,
    journal,  # [b, M]
    journal_len,
    rows,  # [b, T]
    fold,  # [b]: whether the journal is already in the state; None: nowhere
    T,
    W,
    M,
    state_stride,
    H: gl.constexpr,
    P: gl.constexpr,
    G: gl.constexpr,
    N: gl.constexpr,
    TP: gl.constexpr,  # nodes, padded: 4 or 8
    JP: gl.constexpr,  # rows of a journal, padded
    TILE: gl.constexpr,  # values of a head: 16 per warp
    CHANNELS: gl.constexpr,  # False
    OVERLAP: gl.constexpr,
):
    """Some values of a head of a request; launched as triton.py's ``_verify_kernel``."""
    dtype: gl.constexpr = convolved.dtype.element_ty
    WIDTH: gl.constexpr = 2 * G * N + H * P
    EACH: gl.constexpr = 128 // state.dtype.element_ty.primitive_bitwidth  # numbers in 16 bytes
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [TILE // 16, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, EACH)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, EACH)
    small_left: gl.constexpr = gl.DotOperandLayout(0, sums, 1)
    small_right: gl.constexpr = gl.DotOperandLayout(1, sums, 1)
    none = gl.zeros([TILE, 2 * TP], gl.float32, sums)
    of_nodes: gl.constexpr = _pairs(none)[0].type.layout
    first = gl.program_id(0) * TILE  # of the flat H*P
    request = gl.program_id(1)
    head = first // P

    # All of this was written before the kernel that makes the weights stopped waiting, and this one
    # starts after that. Ids past a journal's end are read as well: so no load waits for two others.
    packed = gl.arange(0, JP, gl.SliceLayout(0, small_left))
    row = gl.load(journal + request * M + packed, mask=packed < M, other=0).to(gl.int32)
    length = gl.load(journal_len + request).to(gl.int32)
    if fold is not None:
        length = gl.where(gl.load(fold + request) != 0, 0, length)
    row_u += gl.load(slots + request).to(gl.int64) * W * (H * P)
    state += gl.load(state_slots + request).to(gl.int64) * state_stride
    value = first + gl.arange(0, TILE, gl.SliceLayout(1, left))
    channel = gl.arange(0, N, gl.SliceLayout(0, left))
    stored = gl.load(state + value[:, None] * N + channel[None, :])  # takes longest
    value = first + gl.arange(0, TILE, gl.SliceLayout(1, small_left))
    at = row_u + value[:, None] + (row * (H * P))[None, :]
    u_rows = gl.load(at, mask=(packed < length)[None, :], other=0.0)
    of_tree = convolved + request.to(gl.int64) * T * WIDTH
    column = gl.arange(0, 2 * TP, gl.SliceLayout(0, right))  # query, key; query, key; …
    channel = gl.arange(0, N, gl.SliceLayout(1, right))
    at = of_tree + head // (H // G) * N + (column // 2 * WIDTH + column % 2 * (G * N))
    read = gl.load(at[None, :] + channel[:, None], mask=(column < 2 * T)[None, :], other=0.0)
    node = gl.arange(0, TP, gl.SliceLayout(0, of_nodes))
    value = first + gl.arange(0, TILE, gl.SliceLayout(1, of_nodes))
    at = of_tree + 2 * G * N + value[:, None] + (node * WIDTH)[None, :]
    v = gl.load(at, mask=(node < T)[None, :], other=0.0).to(gl.float32)
    own = gl.load(rows + request * T + node, mask=node < T, other=0).to(gl.int32)
    if OVERLAP:
        gdc_wait()

    LINE = 3 + 2 * M + 2 * T
    line = weights + (request * H + head).to(gl.int64) * T * LINE
    column = gl.arange(0, 2 * TP, gl.SliceLayout(0, small_right))
    packed = gl.arange(0, JP, gl.SliceLayout(1, small_right))
    of_node = line + (column // 2 * LINE + 3)
    at = (of_node + (1 - column % 2) * M)[None, :] + packed[:, None]
    past = gl.load(at, mask=(packed < length)[:, None] & (column < 2 * T)[None, :], other=0.0)
    past = gl.where((column % 2 == 0)[None, :], past, -past)  # what a key reads is subtracted
    # of a query: what it reads of the nodes; of a key: its row of the inverse
    above = gl.arange(0, TP, gl.SliceLayout(1, small_right))
    at = (of_node + (2 * M + (1 - column % 2) * T))[None, :] + above[:, None]
    tree = gl.load(at, mask=(above < T)[:, None] & (column < 2 * T)[None, :], other=0.0)
    column = gl.arange(0, 2 * TP, gl.SliceLayout(0, sums))
    at = line + (column // 2 * LINE + 2 - column % 2)
    from_state = gl.load(at, mask=column < 2 * T, other=0.0)
    from_state = gl.where(column % 2 == 0, from_state, -from_state)
    beta = gl.load(line + node * LINE, mask=node < T, other=0.0)
    if OVERLAP:  # after these loads, so that the compiler leaves them here
        gdc_launch_dependents()

    if stored.dtype == dtype:
        total = mma_v2(stored, read, none)
    else:
        high, low = _halves(stored, dtype)
        total = mma_v2(high, read, none) + mma_v2(low, read, none)  # side by side
    total = total * from_state[None, :] + _add_product(u_rows, past, none)
    known = v * beta[None, :] + _pairs(total)[1]
    u = _pairs(_add_product(known, tree, none))[1]
    o = _pairs(_add_product(u, tree, total))[0]
    stays = (node < T)[None, :]
    gl.store(row_u + value[:, None] + (own * (H * P))[None, :], u, mask=stays)
    y += request.to(gl.int64) * T * (H * P)
    gl.store(y + value[:, None] + (node * (H * P))[None, :], o.to(dtype), mask=stays)


def supports(
    rows: DeltaRows, convolved: Tensor, state: Tensor, step: TreeLayout, sizes: Sizes
) -> bool:
    """Whether this file's kernel can verify them, and is the faster one."""
    few = step.rows.shape[1] <= MAX_NODES and step.journal.shape[1] <= MAX_JOURNAL
    exact = convolved.element_size() == 2 and state.dtype in (torch.float32, convolved.dtype)
    whole = sizes.head_dim % TILE == 0 and sizes.state_size in STATE_SIZES
    narrow = few and exact and whole and not has_channel_decay(rows, sizes)
    return narrow and capability(state.device) >= HOPPER
