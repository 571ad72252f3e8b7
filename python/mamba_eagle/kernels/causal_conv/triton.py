"""What precedes the recurrence, for all nodes of all trees: convolution along each node's path, and
step sizes.

One pass over in_proj's output. A node's predecessors are its ancestors in the tree, then the tail
of its request's path. The results go where tree_verify/triton.py reads them: x, B, dt and L into
the nodes' rows, and C, which no later step needs, into a tensor of its own.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import cdiv, next_power_of_2, overlapping
from mamba_eagle.kernels.tree_verify.layout import RowBuffers, Sizes, TreeLayout
from mamba_eagle.kernels.triton_math import fused_sum, previous_done, silu, step_sizes


class ConvWeights(NamedTuple):
    """The weights of one layer; K taps over conv_dim = H*P + 2*G*N channels."""

    conv_weight: Tensor  # [K, conv_dim], transposed
    conv_bias: Tensor | None  # [conv_dim]
    dt_bias: Tensor  # [H] float32
    A: Tensor  # [H] float32, negative
    step_limit: tuple[float, float]  # dt is clamped to this range


@triton.jit
def _convolve(
    block,
    part,
    request,
    given,
    ROW: tl.constexpr,
    CONV_DIM: tl.constexpr,
    K: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Convolution and SiLU of BLOCK channels of NODES nodes of a request.

    Weights and indices are not written by the kernel before, so they are asked for before the wait.
    None of them is used before the nodes' own inputs have been asked for as well: a program waits
    for memory twice, not for one index after the other.
    """
    xbc, conv_weight, conv_bias, conv_in, xB, C, slots, rows, parents, tail = given[:10]
    T, W, xbc_stride = given[10:]
    # nodes beyond the last one repeat it
    node = tl.minimum(part * NODES + tl.arange(0, NODES), T - 1)
    channel = block * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CONV_DIM
    taps = ()
    for tap in tl.static_range(K):
        taps += (tl.load(conv_weight + tap * CONV_DIM + channel, mask=inside, other=0.0),)
    if conv_bias is not None:
        bias = tl.load(conv_bias + channel, mask=inside, other=0.0)
    slot = tl.load(slots + request)
    row = tl.load(rows + request * T + node)
    above = tl.load(parents + request * T + node)
    places = ()
    for back in tl.static_range(1, K):
        places += (tl.load(tail + request * (K - 1) + (K - 1) - back),)
    previous_done(OVERLAP)

    mask = inside[None, :]
    tree = xbc + request.to(tl.int64) * T * xbc_stride
    own = tl.load((tree + node * xbc_stride)[:, None] + channel[None, :], mask=mask, other=0.0)
    slot, row = slot.to(tl.int64), row.to(tl.int32)
    buffer = conv_in + slot * (K - 1 + W) * CONV_DIM
    # the node, its parent, …; below 0 the tail of the path, whose last token is -1
    source = node
    inputs = (own,)
    for back in tl.static_range(1, K):
        if back > 1:
            above = tl.load(parents + request * T + tl.maximum(source, 0))
        source = tl.where(source > 0, above.to(tl.int32), source - 1)
        start = tree + tl.maximum(source, 0) * xbc_stride
        for end in tl.static_range(1, back + 1):  # no node is further behind the tail's end
            from_path = buffer + places[end - 1].to(tl.int32) * CONV_DIM
            start = tl.where(source == -end, from_path, start)
        inputs += (tl.load(start[:, None] + channel[None, :], mask=mask, other=0.0),)
    total = tl.zeros([NODES, BLOCK], tl.float32)
    if conv_bias is not None:
        total += bias.to(tl.float32)[None, :]
    for back in tl.static_range(K):
        total = fused_sum(inputs[back], taps[K - 1 - back][None, :], total)
    out = silu(total).to(own.dtype)
    first = block * BLOCK
    if first < ROW:
        of_rows = xB + slot * W * ROW + row * ROW
        tl.store(of_rows[:, None] + channel[None, :], out, mask=(mask & (channel < ROW)[None, :]))
    if first + BLOCK > ROW:
        of_nodes = C + (request * T + node) * (CONV_DIM - ROW) - ROW
        tl.store(of_nodes[:, None] + channel[None, :], out, mask=mask & (channel >= ROW)[None, :])
    tl.store((buffer + (K - 1 + row) * CONV_DIM)[:, None] + channel[None, :], own, mask=mask)


@triton.jit
def _step_sizes(
    block,
    request,
    given,
    H: tl.constexpr,
    TP: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """dt and L of HEAD_BLOCK heads of all nodes of a request."""
    dt_raw, dt_bias, A, dt, log_decay, slots, journal, journal_len, rows, ancestors = given[:10]
    fold, T, W, M, dt_stride, lowest, highest = given[10:]
    PADDED: tl.constexpr = TP if TP == 1 or TP > 16 else 16  # tl.dot needs 16
    node = tl.arange(0, PADDED)
    valid = node < T
    slot = tl.load(slots + request).to(tl.int64)
    row = tl.load(rows + request * T + node, mask=valid, other=0).to(tl.int32)
    head = block * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    in_block = head < H
    inside = valid[:, None] & in_block[None, :]
    length = tl.load(journal_len + request).to(tl.int32)
    previous_done(OVERLAP)
    raw = tl.load(
        dt_raw + (request * T + node[:, None]) * dt_stride + head[None, :],
        mask=inside,
        other=0.0,
    )
    last = tl.load(journal + request * M + length - 1, mask=length > 0, other=0).to(tl.int32)
    started = tl.where(length > 0, H, 0)  # heads whose L goes on from the end of the journal
    if fold is not None:
        started = tl.where(tl.load(fold + request) != 0, 0, started)
    place = slot * W * H + last * H + head
    base = tl.load(log_decay + place, mask=head < started, other=0.0)
    bias = tl.load(dt_bias + head, mask=in_block, other=0.0)
    rate = tl.load(A + head, mask=in_block, other=0.0)
    if TP > 1:
        bits = tl.load(ancestors + request * T + node, mask=valid, other=0)
        above = ((bits[:, None] >> node.to(tl.int64)[None, :]) & 1).to(tl.float32)
    step = step_sizes(raw, bias, lowest, highest)
    decay = step * rate[None, :]
    decay = tl.where(inside, decay, 0.0)
    if TP > 1:
        decay = tl.dot(above, decay, input_precision="ieee")
    decay += base[None, :]
    out = slot * W * H + row[:, None] * H + head[None, :]
    tl.store(dt + out, step, mask=inside)
    tl.store(log_decay + out, decay, mask=inside)


@triton.jit
def _tree_conv_kernel(
    xbc,  # [b*T, conv_dim], rows xbc_stride apart
    dt_raw,  # [b*T, H], rows dt_stride apart
    conv_weight,  # [K, conv_dim]
    conv_bias,  # [conv_dim]
    dt_bias,  # [H]
    A,  # [H]
    conv_in,  # [R, K-1+W, conv_dim]
    xB,  # [R, W, H*P + G*N]
    dt,  # [R, W, H]
    log_decay,  # [R, W, H]
    C,  # [b, T, G*N]
    slots,
    journal,  # [b, M]
    journal_len,
    rows,  # [b, T]
    parents,  # [b, T]
    ancestors,  # [b, T]
    tail,  # [b, K-1]
    fold,
    T,
    W,
    M,
    xbc_stride,
    dt_stride,
    lowest,
    highest,
    H: tl.constexpr,
    ROW: tl.constexpr,  # H*P + G*N
    CONV_DIM: tl.constexpr,
    K: tl.constexpr,
    TP: tl.constexpr,  # nodes, padded
    NODES: tl.constexpr,  # per program
    BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    CHANNEL_BLOCKS: tl.constexpr = (CONV_DIM + BLOCK - 1) // BLOCK
    HEAD_BLOCKS: tl.constexpr = (H + HEAD_BLOCK - 1) // HEAD_BLOCK
    # in one line, those of the heads first: they take longest
    program = tl.program_id(0)
    request = tl.program_id(1)
    if program < HEAD_BLOCKS:
        of_heads = (
            dt_raw, dt_bias, A, dt, log_decay, slots, journal, journal_len, rows, ancestors,
            fold, T, W, M, dt_stride, lowest, highest,
        )  # fmt: skip
        _step_sizes(program, request, of_heads, H, TP, HEAD_BLOCK, OVERLAP)
    else:
        program -= HEAD_BLOCKS
        block, part = program % CHANNEL_BLOCKS, program // CHANNEL_BLOCKS
        of_nodes = (
            xbc, conv_weight, conv_bias, conv_in, xB, C, slots, rows, parents, tail,
            T, W, xbc_stride,
        )  # fmt: skip
        _convolve(block, part, request, of_nodes, ROW, CONV_DIM, K, NODES, BLOCK, OVERLAP)


class Config(NamedTuple):
    """How a convolution is divided among programs, whatever is the result."""

    nodes: int  # of a tree, per program: a power of two
    block: int  # channels per program
    warps: int


def choose_config(nodes: int) -> Config:
    """For Hopper; measured with benchmark/kernels/bench_step_kernels.py. With 256 channels per warp
    a thread has 8 of each node, which are read and written at once."""
    return Config(min(nodes, 2), 1024, 4)


def tree_conv(
    xbc: Tensor,
    dt_raw: Tensor,
    weights: ConvWeights,
    conv_in: Tensor,
    buffers: RowBuffers,
    step: TreeLayout,
    sizes: Sizes,
    config: Config | None = None,
) -> Tensor:
    """Fill the nodes' rows: x, B, dt and L in ``buffers``, raw inputs in ``conv_in``.

    Args:
        xbc: [b*T, conv_dim]; dt_raw: [b*T, H]; both may be views of in_proj's output.
        conv_in: [R, K-1+W, conv_dim]: the history, then the rows.
    Returns: C [b, T, G*N], dtype of xbc.
    """
    b, T = step.rows.shape
    K, conv_dim = weights.conv_weight.shape
    if T > 64:
        raise ValueError(f"a tree of {T} nodes: at most 64 are supported")
    H, P, G, N = sizes
    padded = next_power_of_2(T)
    C = torch.empty(b, T, G * N, dtype=xbc.dtype, device=xbc.device)
    config = config or choose_config(T)
    head_block = 16 if padded > 16 else 32
    low, high = weights.step_limit
    tensors = (xbc, dt_raw, *weights[:4], conv_in, *buffers, C)
    journal = (step.slots, step.journal, step.journal_len)
    nodes = (step.rows, step.parents, step.ancestors, step.tail, step.fold)
    numbers = (T, buffers.xB.shape[1], step.journal.shape[1], xbc.stride(0), dt_raw.stride(0))
    programs = cdiv(conv_dim, config.block) * cdiv(T, config.nodes)
    _tree_conv_kernel[(programs + cdiv(H, head_block), b)](
        *(*tensors, *journal, *nodes, *numbers, float(low), float(high)),
        H=H,
        ROW=H * P + G * N,
        CONV_DIM=conv_dim,
        K=K,
        TP=padded,
        NODES=config.nodes,
        BLOCK=config.block,
        HEAD_BLOCK=head_block,
        num_warps=config.warps,
        **overlapping(xbc.device),
    )
    return C


@triton.jit
def _conv_nodes_kernel(
    channels,  # [b*T, conv_dim], rows ``stride`` apart
    conv_weight,  # [K, conv_dim]
    conv_bias,  # [conv_dim]
    conv_in,  # [R, K-1+W, conv_dim]
    out,  # [b, T, conv_dim]
    slots,
    rows,  # [b, T]
    parents,  # [b, T]
    tail,  # [b, K-1]
    T,
    W,
    stride,
    CONV_DIM: tl.constexpr,
    K: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block, part, request = tl.program_id(0), tl.program_id(2), tl.program_id(1)
    given = (
        channels, conv_weight, conv_bias, conv_in, out, out, slots, rows, parents, tail,
        T, W, stride,
    )  # fmt: skip
    _convolve(block, part, request, given, 0, CONV_DIM, K, NODES, BLOCK, OVERLAP)


def conv_nodes(
    channels: Tensor, weight: Tensor, bias: Tensor | None, conv_in: Tensor, step: TreeLayout
) -> Tensor:
    """The convolution alone: raw inputs go to the nodes' rows of ``conv_in``, results to a tensor.

    Args:
        channels: [b*T, conv_dim], may be a view; weight: [K, conv_dim]; bias: [conv_dim].
        conv_in: [R, K-1+W, conv_dim]: the history, then the rows.
    Returns: [b, T, conv_dim], dtype of ``channels``.
    """
    (b, T), (K, conv_dim) = step.rows.shape, weight.shape
    out = torch.empty(b, T, conv_dim, dtype=channels.dtype, device=channels.device)
    config = choose_config(T)
    grid = (cdiv(conv_dim, config.block), b, cdiv(T, config.nodes))
    _conv_nodes_kernel[grid](
        *(channels, weight, bias, conv_in, out, step.slots, step.rows, step.parents, step.tail),
        *(T, conv_in.shape[1] - (K - 1), channels.stride(0)),
        CONV_DIM=conv_dim,
        K=K,
        NODES=config.nodes,
        BLOCK=config.block,
        num_warps=config.warps,
        **overlapping(channels.device),
    )
    return out
