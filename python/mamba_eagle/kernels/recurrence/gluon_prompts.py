"""The recurrence over prompts of several requests, from and to state slots, in one kernel.

A program walks over the tokens of a request with a tile of channels of one head. What the next
CHUNK tokens feed in is copied to shared memory while it works on these.
"""

from __future__ import annotations

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
    loads_layout,
    numbers_per_load,
    output,
    tile_layout,
)
from mamba_eagle.kernels.tree_verify.layout import Sizes

CHUNK = gl.constexpr(8)
# renamed after Triton 3.6
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_shared = gl.shared_memory_descriptor
_reinterpret = getattr(_shared, "reinterpret", None) or _shared._reinterpret
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _copy_tokens(buffer, rows, stride, at, end, layout: gl.constexpr):
    """The next CHUNK tokens' elements, of those before ``end``, to ``buffer`` [CHUNK, elements]."""
    token = at + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    element = gl.arange(0, buffer.shape[1], gl.SliceLayout(0, layout))
    pointers = rows + token.to(gl.int64)[:, None] * stride + element[None, :]
    _copy(buffer, pointers, mask=(token < end)[:, None])


@gluon.jit
def _chunk(buffers, stage, reads, at, end, copied: gl.constexpr):
    """Have x, B and C of a chunk copied to their buffers."""
    x, B, C, x_stride, B_stride, C_stride = reads
    _copy_tokens(buffers[0].index(stage), x, x_stride, at, end, copied[0])
    _copy_tokens(buffers[1].index(stage), B, B_stride, at, end, copied[1])
    _copy_tokens(buffers[2].index(stage), C, C_stride, at, end, copied[1])
    async_copy.commit_group()


@gluon.jit
def _token(buffer, index, layout: gl.constexpr):
    """Token ``index`` of a buffer [2, CHUNK, elements]."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = _reinterpret(buffer, buffer.dtype, [2 * CHUNK, buffer.shape[2]], flat)
    return rows.index(index).load(layout)


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
    num_warps: gl.constexpr,
):
    rows_dtype: gl.constexpr = x.dtype.element_ty
    itemsize: gl.constexpr = rows_dtype.primitive_bitwidth // 8
    PER_LOAD: gl.constexpr = numbers_per_load(rows_dtype)
    layout: gl.constexpr = tile_layout(TILE, num_warps)
    by_channel: gl.constexpr = gl.SliceLayout(1, layout)
    numbers: gl.constexpr = loads_layout(layout, PER_LOAD)
    loaded: gl.constexpr = gl.int32 if PER_LOAD == 2 else rows_dtype
    copied: gl.constexpr = (
        _copied(TILE, itemsize, num_warps),
        _copied(N // PER_LOAD, itemsize * PER_LOAD, num_warps),
    )
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    buffers = (
        gl.allocate_shared_memory(rows_dtype, [2, CHUNK, TILE], flat),
        gl.allocate_shared_memory(loaded, [2, CHUNK, N // PER_LOAD], flat),
        gl.allocate_shared_memory(loaded, [2, CHUNK, N // PER_LOAD], flat),
    )

    first = gl.program_id(0) * TILE
    request = gl.program_id(1)
    head = first // P
    group = head // (H // G)
    channel = first + gl.arange(0, TILE, by_channel)
    n = gl.arange(0, N, gl.SliceLayout(0, layout))
    in_state = channel[:, None] * N + n[None, :]
    rate = gl.load(A + head) * LOG2_E
    skip = gl.load(D + head)
    dt += head * dt_head
    reads = (
        x + first, as_loaded(B + group * N, PER_LOAD), as_loaded(C + group * N, PER_LOAD),
        x_stride, B_stride // PER_LOAD, C_stride // PER_LOAD,
    )  # fmt: skip

    segment = gl.load(requests + request * 3)
    last_segment = gl.load(requests + request * 3 + 1)
    source = gl.load(requests + request * 3 + 2).to(gl.int64)
    S = gl.load(state + gl.maximum(source, 0) * state_stride + in_state)
    S = gl.where(source >= 0, S, 0.0)
    for s in range(segment, last_segment):
        begin = gl.load(segments + s * 3)
        end = gl.load(segments + s * 3 + 1)
        slot = gl.load(segments + s * 3 + 2).to(gl.int64)
        _chunk(buffers, 0, reads, begin, end, copied)
        stage = 0
        step = gl.load(dt + begin.to(gl.int64) * dt_token, mask=begin < end, other=0.0)
        for at in range(begin, end, CHUNK):
            _chunk(buffers, 1 - stage, reads, at + CHUNK, end, copied)
            async_copy.wait_group(1)
            _barrier()
            for token in range(at, gl.minimum(at + CHUNK, end)):
                index = stage * CHUNK + token - at
                later = gl.load(
                    dt + (token + 1).to(gl.int64) * dt_token, mask=token + 1 < end, other=0.0
                )
                x_token = _token(buffers[0], index, by_channel)
                S = advance(S, x_token, _token(buffers[1], index, numbers), step, rate)
                out = output(S, _token(buffers[2], index, numbers), x_token, skip)
                gl.store(y + token.to(gl.int64) * (H * P) + channel, out.to(rows_dtype))
                step = later
            _barrier()
            stage = 1 - stage
        if slot >= 0:
            gl.store(state + slot * state_stride + in_state, S)


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    plan: PrefillPlan,
    tile: tuple[int, int] | None = None,
) -> Tensor:
    """ssd/triton.py's, with a state in float32.

    Args:
        tile: channels and warps of a program, a divisor of a head's channels and at least 4 a warp;
            None: by measurement. Bits do not depend on it.
    Raises: ValueError as ``gluon.check_sizes``.
    """
    n, H, P = x.shape
    G, N = B.shape[1:]
    check_sizes(Sizes(H, P, G, N), state)
    channels, warps = tile or ((16, 2) if N <= 128 else (16, 4))
    y = torch.empty(n, H * P, dtype=x.dtype, device=x.device)
    _scan_kernel[(H * P // channels, len(plan.requests))](
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
        TILE=channels,
        num_warps=warps,
    )
    return y
