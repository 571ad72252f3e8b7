"""The recurrence over prompts of several requests, from and to state slots, in one kernel.

A program walks over the tokens of a request with channels of one head, if possible all of them:
then an H100 has a head per multiprocessor for a single prompt of Nemotron-Nano-9B-v2. 80 channels
are a tile of 64 and one of 16, for which B and C are read and widened once. What the next CHUNK
tokens feed in is copied to shared memory while it works on these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from mamba_eagle.kernels.prefill_plan import PrefillPlan
from mamba_eagle.kernels.recurrence.gluon import check_sizes
from mamba_eagle.kernels.recurrence.gluon_step import (
    LOG2_E,
    advance,
    as_loaded,
    barrier,
    loads_layout,
    numbers_per_load,
    output,
    shared_row,
    tile_layout,
)
from mamba_eagle.kernels.tree_verify.layout import Sizes

CHUNK = gl.constexpr(16)
UNROLLED = gl.constexpr(4)  # tokens whose instructions may overlap


class Config(NamedTuple):
    """How the work is divided; bits do not depend on it."""

    tile: int  # channels of a program: a power of two, at least 4 per warp
    rest: int  # of a second tile of the program; 0: none
    warps: int


# renamed after Triton 3.6
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _copy_tokens(buffer, rows, stride, at, end, layout: gl.constexpr):
    """The next CHUNK tokens' elements, of those before ``end``, to ``buffer`` [CHUNK, elements]."""
    token = at + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    element = gl.arange(0, buffer.shape[1], gl.SliceLayout(0, layout))
    pointers = rows + token.to(gl.int64)[:, None] * stride + element[None, :]
    _copy(buffer, pointers, mask=(token < end)[:, None])


@gluon.jit
def _chunk(buffers, stage, reads, at, end, copied: gl.constexpr, REST: gl.constexpr):
    """Have x, B and C of a chunk copied to their buffers."""
    x, B, C, x_stride, B_stride, C_stride = reads
    _copy_tokens(buffers[0].index(stage), x, x_stride, at, end, copied[0])
    _copy_tokens(buffers[1].index(stage), B, B_stride, at, end, copied[1])
    _copy_tokens(buffers[2].index(stage), C, C_stride, at, end, copied[1])
    if REST:
        rest = x + buffers[0].shape[2]
        _copy_tokens(buffers[3].index(stage), rest, x_stride, at, end, copied[2])
    async_copy.commit_group()


@gluon.jit
def _steps(dt, stride, left):
    """dt of the next UNROLLED tokens, if there are as many."""
    steps = ()
    for i in gl.static_range(UNROLLED):
        steps += (gl.load(dt + i * stride, mask=left > 0, other=0.0),)
    return steps


@gluon.jit
def _tile_token(S, x, given, y, index, step):
    """A token's turn in one tile. x: its buffer; y: at the tile's first channel."""
    buffers, rate, skip = given
    layout: gl.constexpr = S.type.layout
    by_channel: gl.constexpr = gl.SliceLayout(1, layout)
    numbers: gl.constexpr = loads_layout(layout, S.shape[1] // buffers[1].shape[2])
    x = shared_row(x, index, by_channel)
    S = advance(S, x, shared_row(buffers[1], index, numbers), step, rate)
    out = output(S, shared_row(buffers[2], index, numbers), x, skip)
    gl.store(y + gl.arange(0, S.shape[0], by_channel), out.to(y.dtype.element_ty))
    return S


@gluon.jit
def _token(S, S_rest, given, y, index, step, REST: gl.constexpr):
    S = _tile_token(S, given[0][0], given, y, index, step)
    if REST:
        S_rest = _tile_token(S_rest, given[0][3], given, y + S.shape[0], index, step)
    return S, S_rest


@gluon.jit
def _in_state(TILE: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    channel = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    return channel[:, None] * N + gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _loaded_state(state, slot, stride, N: gl.constexpr, TILE: gl.constexpr, layout: gl.constexpr):
    """[TILE, N]; zeros if the slot is negative."""
    S = gl.load(state + gl.maximum(slot, 0) * stride + _in_state(TILE, N, layout))
    return gl.where(slot >= 0, S, 0.0)


@gluon.jit
def _store_state(state, slot, stride, S):
    layout: gl.constexpr = S.type.layout
    gl.store(state + slot * stride + _in_state(S.shape[0], S.shape[1], layout), S)


@gluon.constexpr_function
def _copied(elements, itemsize, warps):
    """16 bytes a thread."""
    share = 16 // itemsize
    across = min(32, elements // share)
    return gl.BlockedLayout([1, share], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def _scan_kernel(
    x,  # [n, H*P], rows x_stride apart
    B,  # [n, G*N], rows B_stride apart
    C,  # [n, G*N], rows C_stride apart
    dt,  # [n, H], strides dt_token, dt_head
    A,  # [H]
    D,  # [H]
    state,  # [slots, H, P, N]
    y,  # [n, H*P]
    requests,  # [b, 3]
    segments,  # [S, 3]
    x_stride,
    B_stride,
    C_stride,
    dt_token,
    dt_head,
    state_stride,
    H: gl.constexpr,
    P: gl.constexpr,
    G: gl.constexpr,
    N: gl.constexpr,
    TILE: gl.constexpr,
    REST: gl.constexpr,
    num_warps: gl.constexpr,
):
    rows_dtype: gl.constexpr = x.dtype.element_ty
    itemsize: gl.constexpr = rows_dtype.primitive_bitwidth // 8
    PER_LOAD: gl.constexpr = numbers_per_load(rows_dtype)
    layout: gl.constexpr = tile_layout(TILE, num_warps)
    SECOND: gl.constexpr = REST if REST else TILE
    rest_layout: gl.constexpr = tile_layout(SECOND, num_warps)
    loaded: gl.constexpr = gl.int32 if PER_LOAD == 2 else rows_dtype
    copied: gl.constexpr = (
        _copied(TILE, itemsize, num_warps),
        _copied(N // PER_LOAD, itemsize * PER_LOAD, num_warps),
        _copied(SECOND, itemsize, num_warps),
    )
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    buffers = (
        gl.allocate_shared_memory(rows_dtype, [2, CHUNK, TILE], flat),
        gl.allocate_shared_memory(loaded, [2, CHUNK, N // PER_LOAD], flat),
        gl.allocate_shared_memory(loaded, [2, CHUNK, N // PER_LOAD], flat),
    )
    if REST:
        buffers += (gl.allocate_shared_memory(rows_dtype, [2, CHUNK, REST], flat),)

    first = gl.program_id(0) * (TILE + REST)
    request = gl.program_id(1)
    head = first // P
    group = head // (H // G)
    rate = gl.load(A + head) * LOG2_E
    skip = gl.load(D + head)
    dt += head * dt_head
    reads = (
        x + first, as_loaded(B + group * N, PER_LOAD), as_loaded(C + group * N, PER_LOAD),
        x_stride, B_stride // PER_LOAD, C_stride // PER_LOAD,
    )  # fmt: skip
    state += first * N
    y += first

    segment = gl.load(requests + request * 3)
    last_segment = gl.load(requests + request * 3 + 1)
    source = gl.load(requests + request * 3 + 2).to(gl.int64)
    S = _loaded_state(state, source, state_stride, N, TILE, layout)
    S_rest = S
    if REST:
        S_rest = _loaded_state(state + TILE * N, source, state_stride, N, REST, rest_layout)
    for s in range(segment, last_segment):
        begin = gl.load(segments + s * 3)
        end = gl.load(segments + s * 3 + 1)
        slot = gl.load(segments + s * 3 + 2).to(gl.int64)
        stage = 0
        _chunk(buffers, stage, reads, begin, end, copied, REST)
        for at in range(begin, end, CHUNK):
            _chunk(buffers, 1 - stage, reads, at + CHUNK, end, copied, REST)
            async_copy.wait_group(1)
            barrier()
            count = gl.minimum(CHUNK, end - at)
            many = count // UNROLLED * UNROLLED
            given = (buffers, rate, skip)
            index = stage * CHUNK
            dt_at, y_at = dt + at.to(gl.int64) * dt_token, y + at.to(gl.int64) * (H * P)
            steps = _steps(dt_at, dt_token, many)
            for token in range(0, many, UNROLLED):
                ahead = token + UNROLLED
                later = _steps(dt_at + ahead * dt_token, dt_token, many - ahead)
                for i in gl.static_range(UNROLLED):
                    out_at = y_at + (token + i) * (H * P)
                    S, S_rest = _token(S, S_rest, given, out_at, index + token + i, steps[i], REST)
                steps = later
            for token in range(many, count):
                step, out_at = gl.load(dt_at + token * dt_token), y_at + token * (H * P)
                S, S_rest = _token(S, S_rest, given, out_at, index + token, step, REST)
            barrier()
            stage = 1 - stage
        if slot >= 0:
            _store_state(state, slot, state_stride, S)
            if REST:
                _store_state(state + TILE * N, slot, state_stride, S_rest)


def choose_config(head_dim: int, state_size: int) -> Config:
    """Four warps, and no more than 80 numbers of the state in a thread at Mamba2's usual sizes."""
    tile = min(1024 * 8 // state_size, 1 << head_dim.bit_length() - 1)
    rest = head_dim % tile
    if head_dim // tile == 1 and rest >= 16 and rest & (rest - 1) == 0:
        return Config(tile, rest, 4)
    return Config(tile if rest == 0 else 16, 0, 4)


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    plan: PrefillPlan,
    config: Config | None = None,
) -> Tensor:
    """ssd/triton.py's, with a state in float32.

    Args:
        config: None: ``choose_config``.
    Raises: ValueError as ``gluon.check_sizes``.
    """
    n, H, P = x.shape
    G, N = B.shape[1:]
    check_sizes(Sizes(H, P, G, N), state)
    tile, rest, warps = config or choose_config(P, N)
    y = torch.empty(n, H * P, dtype=x.dtype, device=x.device)
    _scan_kernel[(H * P // (tile + rest), len(plan.requests))](
        x,
        B,
        C,
        dt,
        A,
        D,
        state,
        y,
        plan.requests,
        plan.segments,
        x.stride(0),
        B.stride(0),
        C.stride(0),
        *dt.stride(),
        state.stride(0),
        H=H,
        P=P,
        G=G,
        N=N,
        TILE=tile,
        REST=rest,
        num_warps=warps,
    )
    return y
