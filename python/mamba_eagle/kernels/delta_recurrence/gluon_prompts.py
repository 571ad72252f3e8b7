"""Gated DeltaNet over prompts of several requests, from and to state slots, in one kernel.

A program walks over the tokens of a request with some of a head's values, on each of which a state
has a row of its own. The inputs of the next CHUNK tokens are copied to shared memory meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from mamba_eagle.kernels.delta_recurrence.gluon_step import (
    advance,
    prepare,
    room_for_tokens,
    write_output,
)
from mamba_eagle.kernels.delta_recurrence.layout import check_sizes, choose_tiles
from mamba_eagle.kernels.prefill_plan import PrefillPlan
from mamba_eagle.kernels.recurrence.gluon_prompts import CHUNK, UNROLLED, copy_tokens, load_state
from mamba_eagle.kernels.recurrence.gluon_step import (
    PLAIN,
    barrier,
    in_state,
    read_layout,
    tile_layout,
)
from mamba_eagle.kernels.recurrence.layout import Tiles
from mamba_eagle.kernels.tree_verify.layout import Sizes


@gluon.jit
def _chunk(
    raw, reads, stage, at, end, WIDTH: gl.constexpr, GATES: gl.constexpr, num_warps: gl.constexpr
):
    """Have a chunk copied to shared memory, as it is."""
    for part in gl.static_range(3):
        copy_tokens(raw[part], stage, reads[part], WIDTH, at, end, num_warps)
    for part in gl.static_range(3, 5):
        copy_tokens(raw[part], stage, reads[part], GATES, at, end, num_warps)
    async_copy.commit_group()


@gluon.jit
def _prepare_chunk(raw, stage, tokens, EPS: gl.constexpr, num_warps: gl.constexpr):
    layout: gl.constexpr = read_layout(raw[0].shape[2], num_warps)
    of_values: gl.constexpr = read_layout(raw[2].shape[2], num_warps)
    q, k = raw[0].index(stage).load(layout), raw[1].index(stage).load(layout)
    g, beta = raw[3].index(stage).load(layout), raw[4].index(stage).load(layout)
    prepare(tokens, q, k, g, beta, EPS)
    tokens[0].store(raw[2].index(stage).load(of_values).to(gl.float32))


@gluon.jit
def _token(S, tokens, row, y):
    S, _ = advance(S, tokens, row)
    write_output(S, tokens, row, y)
    return S


@gluon.jit
def _scan_kernel(
    convolved,  # [n, 2*G*N + H*P]: queries, keys, values
    gates,  # [n, H + H]: g, beta
    state,  # [slots, H, P, N]
    y,  # [n, H*P]
    requests,  # [b, 3]
    segments,  # [S, 3]
    state_stride,
    H: gl.constexpr,
    P: gl.constexpr,
    G: gl.constexpr,
    N: gl.constexpr,
    TILE: gl.constexpr,
    EPS: gl.constexpr,
    num_warps: gl.constexpr,
):
    WIDTH: gl.constexpr = 2 * G * N + H * P
    dtype: gl.constexpr = convolved.dtype.element_ty
    layout: gl.constexpr = tile_layout(TILE, num_warps)
    raw = (
        gl.allocate_shared_memory(dtype, [2, CHUNK, N], PLAIN),
        gl.allocate_shared_memory(dtype, [2, CHUNK, N], PLAIN),
        gl.allocate_shared_memory(dtype, [2, CHUNK, TILE], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, CHUNK, 1], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, CHUNK, 1], PLAIN),
    )
    tokens = room_for_tokens(CHUNK, TILE, N)
    first = gl.program_id(0) * TILE
    request = gl.program_id(1)
    head = first // P
    queries = convolved + head // (H // G) * N
    reads = (
        queries,
        queries + G * N,
        convolved + 2 * G * N + first,
        gates + head,
        gates + H + head,
    )
    state += first * N
    y += first

    segment = gl.load(requests + request * 3)
    last_segment = gl.load(requests + request * 3 + 1)
    source = gl.load(requests + request * 3 + 2).to(gl.int64)
    S = load_state(state, source, state_stride, TILE, N, layout)
    for s in range(segment, last_segment):
        begin = gl.load(segments + s * 3)
        end = gl.load(segments + s * 3 + 1)
        slot = gl.load(segments + s * 3 + 2).to(gl.int64)
        async_copy.wait_group(0)  # of the segment before, nothing may come late
        stage = 0
        _chunk(raw, reads, stage, begin, end, WIDTH, 2 * H, num_warps)
        for at in range(begin, end, CHUNK):
            _chunk(raw, reads, 1 - stage, at + CHUNK, end, WIDTH, 2 * H, num_warps)
            async_copy.wait_group(1)
            barrier()
            _prepare_chunk(raw, stage, tokens, EPS, num_warps)
            barrier()
            count = gl.minimum(CHUNK, end - at)
            many = count // UNROLLED * UNROLLED
            out = y + at.to(gl.int64) * (H * P)
            for row in range(0, many, UNROLLED):
                for i in gl.static_range(UNROLLED):
                    S = _token(S, tokens, row + i, out + (row + i) * (H * P))
            for row in range(many, count):
                S = _token(S, tokens, row, out + row * (H * P))
            barrier()
            stage = 1 - stage
        if slot >= 0:
            gl.store(state + slot * state_stride + in_state(TILE, N, layout), S)


def scan(
    convolved: Tensor,
    gates: Tensor,
    state: Tensor,
    plan: PrefillPlan,
    sizes: Sizes,
    eps: float,
    tiles: Tiles | None = None,
) -> Tensor:
    """The outputs of all tokens of a plan; states are read from slots and saved to slots.

    Args:
        convolved: [n, 2*G*N + H*P], contiguous: queries, keys and values.
        gates: [n, H + H] float32, contiguous: g and beta.
        state: [slots, H, P, N] float32, of one layer.
        eps: added to the squared norms of queries and keys.
        tiles: None: ``choose_tiles``. Bits do not depend on it.
    Returns: [n, H*P], dtype of ``convolved``.
    Raises: ValueError as ``check_sizes``.
    """
    check_sizes(sizes, state)
    H, P, G, N = sizes
    tile, _, warps = tiles or choose_tiles(P)
    y = torch.empty(len(convolved), H * P, dtype=convolved.dtype, device=convolved.device)
    _scan_kernel[(H * P // tile, len(plan.requests))](
        convolved,
        gates,
        state,
        y,
        plan.requests,
        plan.segments,
        state.stride(0),
        H=H,
        P=P,
        G=G,
        N=N,
        TILE=tile,
        EPS=eps,
        num_warps=warps,
    )
    return y
