"""The recurrence over prompts of several requests, from and to state slots, in one kernel.

A program walks over the tokens of a request with channels of one head, if possible all of them:
then an H100 has a head per multiprocessor for a single prompt of Nemotron-Nano-9B-v2. 80 channels
are a tile of 64 and one of 16, for which B and C are read once. The inputs of the next CHUNK tokens
are copied to shared memory while it works on these; then they become a feed (gluon_step.py).
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from mamba_eagle.kernels.prefill_plan import PrefillPlan
from mamba_eagle.kernels.recurrence.gluon_step import (
    LOG2_E,
    PLAIN,
    REGISTERS,
    advance,
    barrier,
    in_state,
    prepare,
    read_layout,
    store_numbers,
    store_tiles,
    tile_feed,
    tile_layout,
    write_output,
)
from mamba_eagle.kernels.recurrence.layout import Tiles, check_sizes, choose_tiles
from mamba_eagle.kernels.tree_verify.layout import Sizes

CHUNK = gl.constexpr(16)
UNROLLED = gl.constexpr(4)  # tokens whose instructions may overlap
# renamed after Triton 3.6
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def _copied(elements, itemsize, warps):
    """Up to 16 bytes a thread."""
    share = min(16 // itemsize, elements)
    across = min(32, elements // share)
    return gl.BlockedLayout([1, share], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def _copy_tokens(raw, stage, rows, stride, at, end, num_warps: gl.constexpr):
    """Tokens [at, at + CHUNK), of those before ``end``. raw: [2, CHUNK, elements]; rows: of 0."""
    ELEMENTS: gl.constexpr = raw.shape[2]
    layout: gl.constexpr = _copied(ELEMENTS, raw.dtype.primitive_bitwidth // 8, num_warps)
    token = at + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    element = gl.arange(0, ELEMENTS, gl.SliceLayout(0, layout))
    pointers = rows + token.to(gl.int64)[:, None] * stride + element[None, :]
    _copy(raw.index(stage), pointers, mask=(token < end)[:, None])


@gluon.jit
def _chunk(raw, reads, strides, stage, at, end, num_warps: gl.constexpr):
    """Have a chunk copied to shared memory, as it is."""
    for part in gl.static_range(len(raw)):
        _copy_tokens(raw[part], stage, reads[part], strides[part], at, end, num_warps)
    async_copy.commit_group()


@gluon.jit
def _widen(raw, stage, buffer, num_warps: gl.constexpr):
    layout: gl.constexpr = read_layout(buffer.shape[1], num_warps)
    store_numbers(buffer, raw.index(stage).load(layout))


@gluon.jit
def _prepare_x(raw, dt, stage, feed, rate, num_warps: gl.constexpr):
    layout: gl.constexpr = read_layout(raw.shape[2], num_warps)
    x = raw.index(stage).load(layout)
    prepare(feed, x, dt.index(stage).load(layout), rate)
    feed[1].store(x.to(gl.float32))


@gluon.jit
def _prepare(raw, stage, given, num_warps: gl.constexpr):
    feeds, rate, _ = given
    _widen(raw[0], stage, feeds[0][3], num_warps)
    _widen(raw[1], stage, feeds[0][4], num_warps)
    for i in gl.static_range(len(feeds)):
        _prepare_x(raw[3 + i], raw[2], stage, feeds[i], rate, num_warps)


@gluon.jit
def _token(S, given, row, y):
    feeds, _, skip = given
    after = ()
    for i in gl.static_range(len(feeds)):
        tile = advance(S[i], feeds[i], row)
        write_output(tile, feeds[i], row, skip, y + i * S[0].shape[0])
        after += (tile,)
    return after


@gluon.jit
def load_state(state, slot, stride, TILE: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """[TILE, N]; zeros if the slot is negative."""
    S = gl.load(state + gl.maximum(slot, 0) * stride + in_state(TILE, N, layout))
    return gl.where(slot >= 0, S, 0.0)


@gluon.jit
def walk(
    S, state, y, segments, bounds, copies, given, state_stride,
    WIDTH: gl.constexpr, PREPARE: gl.constexpr, TOKEN: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Over the tokens of a request's segments, at whose ends states are stored.

    S: tiles of a head, one behind the other; state, y: at the first channel; bounds: which
    segments; copies: buffers, and where their rows lie. PREPARE(raw, stage, given, num_warps) makes
    of a chunk what TOKEN(S, given, row, y) takes, which returns the state after a token."""
    raw, reads, strides = copies
    for s in range(bounds[0], bounds[1]):
        begin = gl.load(segments + s * 3)
        end = gl.load(segments + s * 3 + 1)
        slot = gl.load(segments + s * 3 + 2).to(gl.int64)
        async_copy.wait_group(0)  # of the segment before, nothing may come late
        stage = 0
        _chunk(raw, reads, strides, stage, begin, end, num_warps)
        for at in range(begin, end, CHUNK):
            _chunk(raw, reads, strides, 1 - stage, at + CHUNK, end, num_warps)
            async_copy.wait_group(1)
            barrier()
            PREPARE(raw, stage, given, num_warps)
            barrier()
            count = gl.minimum(CHUNK, end - at)
            many = count // UNROLLED * UNROLLED
            out = y + at.to(gl.int64) * WIDTH
            for row in range(0, many, UNROLLED):
                for i in gl.static_range(UNROLLED):
                    S = TOKEN(S, given, row + i, out + (row + i) * WIDTH)
            for row in range(many, count):
                S = TOKEN(S, given, row, out + row * WIDTH)
            barrier()
            stage = 1 - stage
        if slot >= 0:
            store_tiles(state + slot * state_stride, S)


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
    SECOND: gl.constexpr = REST if REST else TILE
    layout: gl.constexpr = tile_layout(TILE, num_warps)
    rest_layout: gl.constexpr = tile_layout(SECOND, num_warps)
    raw = (
        gl.allocate_shared_memory(rows_dtype, [2, CHUNK, N], PLAIN),
        gl.allocate_shared_memory(rows_dtype, [2, CHUNK, N], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, CHUNK, 1], PLAIN),
        gl.allocate_shared_memory(rows_dtype, [2, CHUNK, TILE], PLAIN),
    )
    B_shared = gl.allocate_shared_memory(gl.float32, [CHUNK, N], PLAIN)
    C_shared = gl.allocate_shared_memory(gl.float32, [CHUNK, N], PLAIN)
    feeds = (tile_feed(CHUNK, CHUNK, TILE, B_shared, C_shared),)
    if REST:
        raw += (gl.allocate_shared_memory(rows_dtype, [2, CHUNK, REST], PLAIN),)
        feeds += (tile_feed(CHUNK, CHUNK, REST, B_shared, C_shared),)

    first = gl.program_id(0) * (TILE + REST)
    request = gl.program_id(1)
    head = first // P
    group = head // (H // G)
    rate = gl.load(A + head) * LOG2_E
    skip = gl.load(D + head)
    reads = (B + group * N, C + group * N, dt + head * dt_head, x + first)
    strides = (B_stride, C_stride, dt_token, x_stride)
    state += first * N
    y += first

    segment = gl.load(requests + request * 3)
    last_segment = gl.load(requests + request * 3 + 1)
    source = gl.load(requests + request * 3 + 2).to(gl.int64)
    S = (load_state(state, source, state_stride, TILE, N, layout),)
    if REST:
        reads += (x + first + TILE,)
        strides += (x_stride,)
        S += (load_state(state + TILE * N, source, state_stride, REST, N, rest_layout),)
    copies = (raw, reads, strides)
    bounds, given = (segment, last_segment), (feeds, rate, skip)
    walk(
        S, state, y, segments, bounds, copies, given, state_stride, H * P, _prepare, _token,
        num_warps,
    )  # fmt: skip


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    plan: PrefillPlan,
    tiles: Tiles | None = None,
) -> Tensor:
    """ssd/triton.py's, with a state in float32.

    Args:
        tiles: None: ``choose_tiles``. Bits do not depend on it.
    Raises: ValueError as ``check_sizes``.
    """
    n, H, P = x.shape
    G, N = B.shape[1:]
    sizes = Sizes(H, P, G, N)
    check_sizes(sizes, state)
    tile, rest, warps = tiles or choose_tiles(P, N)
    y = torch.empty(n, H * P, dtype=x.dtype, device=x.device)
    _scan_kernel[(H * P // (tile + rest), len(plan.requests))](
        *(x, B, C, dt, A, D, state, y, plan.requests, plan.segments),
        *(x.stride(0), B.stride(0), C.stride(0), *dt.stride(), state.stride(0)),
        **sizes.constants,
        TILE=tile,
        REST=rest,
        num_warps=warps,
        maxnreg=REGISTERS,
    )
    return y
