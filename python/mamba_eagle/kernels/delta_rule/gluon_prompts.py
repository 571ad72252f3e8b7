"""triton_states.py's walk and what tokens read on it, in one kernel on Hopper.

A program carries 64 rows of one head's state, in registers, through all chunks of a request. With
the names of triton_states.py, a token t reads

    o_t = scale (exp2(g_t) S q_t + sum_{i <= t} exp2(g_t - g_i) (q_t . k_i) v_i).

One warp group has the state. Its products wait for each other: S w, from which come the values, and
what those add to the state. All else runs beside these: a second group makes of a chunk ahead the
factors [t, i] of values and the decays, and takes outputs to where they belong; a warp has tiles
copied. Neither the states between chunks nor the values are written.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mamba_eagle.kernels.delta_rule.triton_states import CHUNK
from mamba_eagle.kernels.gpu import capability

HOPPER = 9
SIZES = (64, 128)  # of values and of keys
ROWS = 64  # of a state, per program
STAGES = 3  # tiles of q, k, w and u each in shared memory
# Triton 3.7 gave it another name
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    """Of a ring."""
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(made.index(i), count=1)
    return made


@gluon.jit
def _wait(barriers, number, pred=True):
    """For what is done for the ``number``-th time with the barriers' ring."""
    STAGES: gl.constexpr = barriers.shape[0]
    mbarrier.wait(barriers.index(number % STAGES), number // STAGES & 1, pred=pred)


@gluon.jit
def _fill(sources, ring, number, row, columns):
    """Have two tiles copied. The first wait for a stage is over at once."""
    ready, free, at = ring[2], ring[3], number % ring[2].shape[0]
    mbarrier.wait(free.index(at), 1 - (number // ready.shape[0] & 1))
    mbarrier.expect(ready.index(at), sources[0].block_type.nbytes + sources[1].block_type.nbytes)
    for i in gl.static_range(2):
        _copy(sources[i], [row, columns[i]], ready.index(at), ring[i].index(at))


@gluon.jit
def _produce(of_keys, of_values, keys, values, starts, count, key_columns, value_columns):
    for number in range(count):
        row = gl.load(starts + number)
        _fill(of_keys, keys, number, row, key_columns)
        _fill(of_values, values, number, row, value_columns)


@gluon.jit
def _carry(y, span, number, out, TOKEN: gl.constexpr):
    """A chunk's outputs, which have come, to where they belong."""
    out_ring, _ = out
    CHUNK: gl.constexpr = out_ring.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    token = span[0] + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    row = gl.arange(0, out_ring.shape[2], gl.SliceLayout(0, layout))
    o = out_ring.index(number % out_ring.shape[0]).load(layout)
    at = token.to(gl.int64)[:, None] * TOKEN + row[None, :]
    gl.store(y + at, o, mask=(token < span[1])[:, None])


@gluon.jit
def _span(starts, number, count):
    """A chunk's first token and the one after its last, both 0 if there is no such chunk."""
    begin = gl.load(starts + number, mask=number < count, other=0)
    return begin, gl.load(starts + number + 1, mask=number < count, other=0)


@gluon.jit
def _decays(g, span, place, H: gl.constexpr):
    """Of a chunk's tokens and of the last one."""
    begin, end = span
    each = gl.load(g + (begin + place).to(gl.int64) * H, mask=begin + place < end, other=0.0)
    return each, gl.load(g + (end - 1).to(gl.int64) * H, mask=begin < end, other=0.0)


@gluon.jit
def _prepare(g, starts, count, y, scale, keys, made, out, H: gl.constexpr, TOKEN: gl.constexpr):
    """What a chunk's tokens read of each other, and its decays. Once outputs of the chunk before
    the last one have come, nothing is read any more of what this one overwrites. Where a chunk is
    gets loaded two chunks ahead and its decays one, since what is loaded is waited for here."""
    q_ring, k_ring, keys_ready, _ = keys
    pairs, factors, ready = made
    _, out_ready = out
    CHUNK: gl.constexpr = pairs.shape[1]
    SLOTS: gl.constexpr = pairs.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CHUNK, 16])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    t = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    i = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    own, following = _span(starts, 0, count), _span(starts, 1, count)
    g_t, last = _decays(g, own, t, H)
    g_i, _ = _decays(g, own, i, H)
    for number in range(count):
        tokens = own[1] - own[0]
        at, slot = number % keys_ready.shape[0], number % SLOTS
        _wait(keys_ready, number)
        q, k = q_ring.index(at), k_ring.index(at)
        zeros = gl.zeros([CHUNK, CHUNK], gl.float32, layout)
        read = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        gone, later = gl.maximum(number - SLOTS, 0), _span(starts, number + 2, count)
        of_gone = _span(starts, gone, count)
        next_t, next_last = _decays(g, following, t, H)
        next_i, _ = _decays(g, following, i, H)
        decay = gl.exp2(g_t[:, None] - g_i[None, :]) * scale
        of_value = gl.where(t < tokens, gl.exp2(last - g_t), 0.0)
        of_output = gl.where(t < tokens, gl.exp2(g_t) * scale, -1.0)
        of_state = gl.full([CHUNK], gl.exp2(last), gl.float32, gl.SliceLayout(1, layout))
        read = warpgroup_mma_wait(0, deps=[read])
        _wait(out_ready, gone, number >= SLOTS)
        read = gl.where(i[None, :] <= t[:, None], read * decay, 0.0)
        pairs.index(slot).store(read.to(pairs.dtype))
        factors.index(3 * slot).store(of_value)
        factors.index(3 * slot + 1).store(of_output)
        factors.index(3 * slot + 2).store(of_state)
        if tokens < CHUNK:  # the rest belongs to others: zero times what it is may not be zero
            is_own = gl.arange(0, CHUNK, gl.SliceLayout(1, rows)) < tokens
            k.store(gl.where(is_own[:, None], k.load(rows), 0.0))
        fence_async_shared()  # products read pairs and keys
        mbarrier.arrive(ready.index(slot))
        if number >= SLOTS:
            _carry(y, of_gone, gone, out, TOKEN)
        g_t, g_i, last = next_t, next_i, next_last
        own, following = following, later
    for number in range(gl.maximum(count - SLOTS, 0), count):
        _wait(out_ready, number)
        _carry(y, _span(starts, number, count), number, out, TOKEN)


@gluon.jit
def _hand_over(o, out, number):
    out_ring, out_ready = out
    at = number % out_ring.shape[0]
    out_ring.index(at).permute((1, 0)).store(o.to(out_ring.dtype))
    mbarrier.arrive(out_ready.index(at))


@gluon.jit
def _walk(state, lasts, ends, count, keys, values, made, out, SEQUENCE: gl.constexpr):
    """The state [rows, N] from chunk to chunk. Values and outputs are [rows, tokens]."""
    q_ring, k_ring, keys_ready, keys_free = keys
    w_ring, u_ring, values_ready, values_free = values
    pairs, factors, ready = made
    CHUNK: gl.constexpr = u_ring.shape[1]
    ROWS: gl.constexpr = u_ring.shape[2]
    N: gl.constexpr = k_ring.shape[2]
    dtype: gl.constexpr = u_ring.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CHUNK, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_tokens: gl.constexpr = gl.SliceLayout(0, narrow)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, N, gl.SliceLayout(0, layout))
    own = row[:, None] * N + column[None, :]
    s = gl.load(state + own)
    rounded = gl.convert_layout(s.to(dtype), left)
    zeros = gl.zeros([ROWS, CHUNK], gl.float32, narrow)
    o = zeros
    ended = gl.load(ends)
    _wait(values_ready, 0)
    for number in range(count):
        following = gl.load(ends + number + 1, mask=number + 1 < count, other=-1)
        at, slot = number % keys_ready.shape[0], number % ready.shape[0]
        w, u = w_ring.index(at).permute((1, 0)), u_ring.index(at).permute((1, 0))
        known = warpgroup_mma(rounded, w, zeros, use_acc=False, is_async=True)
        _wait(keys_ready, number)
        q = q_ring.index(at).permute((1, 0))
        read = warpgroup_mma(rounded, q, zeros, use_acc=False, is_async=True)
        v = u.load(narrow).to(gl.float32)
        _wait(ready, number)
        if number > 0:
            _hand_over(o, out, number - 1)
        s *= factors.index(3 * slot + 2).load(gl.SliceLayout(1, layout))[:, None]
        of_value = factors.index(3 * slot).load(of_tokens)
        of_output = factors.index(3 * slot + 1).load(of_tokens)
        known = warpgroup_mma_wait(1, deps=[known])
        v = gl.where(of_output[None, :] >= 0, v - known, 0.0)
        added = gl.convert_layout((v * of_value[None, :]).to(dtype), left)
        s = warpgroup_mma(added, k_ring.index(at), s, is_async=True)
        mbarrier.arrive(values_free.index(at))
        written = gl.convert_layout(v.to(dtype), gl.DotOperandLayout(0, narrow, 2))
        read = warpgroup_mma_wait(1, deps=[read])
        o = read * of_output[None, :]
        o = warpgroup_mma(written, pairs.index(slot).permute((1, 0)), o, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        rounded = gl.convert_layout(s.to(dtype), left)
        mbarrier.arrive(keys_free.index(at))
        _wait(values_ready, number + 1, number + 1 < count)
        # without s here ptxas would scale it where the next product waits for values
        o, s = warpgroup_mma_wait(0, deps=[o, s])
        if ended >= 0:
            gl.store(lasts + ended.to(gl.int64) * SEQUENCE + own, s)
        ended = following
    _hand_over(o, out, count - 1)


@gluon.jit
def _prompt_kernel(
    q,  # [n, G * N], in tiles [CHUNK, N], as the following two
    k,
    w,  # [n, H * N]
    u,  # [n, H * P], in tiles [CHUNK, ROWS]
    g,  # [n, H] float32
    state,  # [b, H, P, N] float32
    starts,  # [chunks + 1] int32, the first token of each chunk
    ends,  # [chunks] int32, the sequence that the chunk ends; -1: none
    chunks,  # [b + 1] int32, the first chunk of each request
    y,  # [n, H, P]
    lasts,  # [sequences, H, P, N] float32
    scale,
    H: gl.constexpr,
    G: gl.constexpr,
    P: gl.constexpr,
    STAGES: gl.constexpr,
):
    CHUNK: gl.constexpr = u.block_type.shape[0]
    ROWS: gl.constexpr = u.block_type.shape[1]
    N: gl.constexpr = q.block_type.shape[1]
    SLOTS: gl.constexpr = 2
    dtype: gl.constexpr = u.dtype
    linear: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], dtype)
    keys = (
        gl.allocate_shared_memory(dtype, [STAGES, CHUNK, N], q.layout),
        gl.allocate_shared_memory(dtype, [STAGES, CHUNK, N], k.layout),
        _barriers(STAGES),  # ready
        _barriers(STAGES),  # free
    )
    values = (
        gl.allocate_shared_memory(dtype, [STAGES, CHUNK, N], w.layout),
        gl.allocate_shared_memory(dtype, [STAGES, CHUNK, ROWS], u.layout),
        _barriers(STAGES),
        _barriers(STAGES),
    )
    made = (
        gl.allocate_shared_memory(dtype, [SLOTS, CHUNK, CHUNK], square),
        # of values, to the chunk's end; of outputs, negative where there is no token; of the state
        gl.allocate_shared_memory(gl.float32, [3 * SLOTS, CHUNK], linear),
        _barriers(SLOTS),
    )
    # one more: outputs of a chunk may come while those of two before it are carried
    outs = gl.allocate_shared_memory(dtype, [SLOTS + 1, CHUNK, ROWS], u.layout)
    out = outs, _barriers(SLOTS + 1)
    row, request, head = gl.program_id(0) * ROWS, gl.program_id(1), gl.program_id(2)
    first = gl.load(chunks + request)
    count = gl.load(chunks + request + 1) - first
    starts += first
    own = (head * P + row) * N
    state += request.to(gl.int64) * (H * P * N) + own
    y += head * P + row
    key = head // (H // G) * N
    of_values = head * N, head * P + row
    gl.warp_specialize(
        [
            (
                _walk,
                (state, lasts + own, ends + first, count, keys, values, made, out, H * P * N),
            ),
            (_prepare, (g + head, starts, count, y, scale, keys, made, out, H, H * P)),
            (_produce, ((q, k), (w, u), keys, values, starts, count, (key, key), of_values)),
        ],
        [4, 1],
        [216, 24],
    )


@cache
def _layout(columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([CHUNK, columns], kind)


def _described(x: Tensor, columns: int) -> TensorDescriptor:
    """[n, heads, size] as a matrix, read in tiles of a chunk's tokens and some columns."""
    n, heads, size = x.shape
    shape, strides = [n, heads * size], [heads * size, 1]
    return TensorDescriptor(x, shape, strides, [CHUNK, columns], _layout(columns, x.dtype))


def supports(u: Tensor, state_size: int) -> bool:
    """Whether this file's kernel can be used for such values [n, H, P]."""
    sizes = u.shape[2] in SIZES and state_size in SIZES
    return sizes and u.element_size() == 2 and capability(u.device)[0] == HOPPER


def walk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor,
    state: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    sequences: int,
) -> tuple[Tensor, Tensor]:
    """As ``states``, for 16-bit inputs.

    Args:
        q: [n, G, N], contiguous, to be divided by the root of N.
    Returns: what tokens read [n, H, P], of u's dtype, and the states at the sequences' ends
        [sequences, H, P, N] float32.
    """
    (_, G, N), (_, H, P) = k.shape, u.shape
    lasts = torch.empty(sequences, H, P, N, dtype=torch.float32, device=u.device)
    y = torch.empty_like(u)
    _prompt_kernel[(P // ROWS, len(state), H)](
        *(_described(x, N) for x in (q, k, w)),
        *(_described(u, ROWS), g, state, *where, y, lasts, N**-0.5),
        H=H,
        G=G,
        P=P,
        STAGES=STAGES,
        num_warps=4,
    )
    return y, lasts
